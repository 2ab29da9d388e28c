"""Test that every address has the security headers, and that only pages that need it have a wider content policy."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse

from cyborgweb.middleware.headers import PERMISSIONS_POLICY, build_content_policy

pytestmark = pytest.mark.django_db

UUID = "00000000-0000-0000-0000-000000000001"
STOCK_PAGE_POLICY = build_content_policy((("script-src", "'unsafe-eval'"), ("style-src", "'unsafe-inline'")))


@pytest.fixture
def operator(client: Client, django_user_model: type) -> Client:
    """Return the client of a superuser."""
    client.force_login(django_user_model.objects.create(username="olga", is_staff=True, is_superuser=True))
    return client


def list_route_addresses(resolver: URLResolver, before: str = "/") -> Iterator[str]:
    """Yield an address that matches each route of the urlconf, with a uuid for each parameter."""
    for one in resolver.url_patterns:
        here = before + fill_route_pattern(str(one.pattern))
        if isinstance(one, URLPattern):
            yield here
        else:
            yield from list_route_addresses(one, here)


def fill_route_pattern(pattern: str) -> str:
    """Return a path that matches a route or regular expression.

    Parameters become a uuid; of alternatives the first is taken, of optional parts the plain one.
    """
    text = re.sub(r"<[a-z]+:\w+>|\(\?P<\w+>(?:[^()]|\([^()]*\))*\)", UUID, pattern)
    text = re.sub(r"\(\?!.*\)", "", text)
    text = re.sub(r"\(\?:(?:([^()\\\[|]*)|\\.*?|/\[.*?)(?:\|[^()]*)?\)", r"\1", text)
    return re.sub(r"\\[AZ]|[\^$?]", "", text)


@pytest.mark.slow
def test_every_route_answers_with_the_security_headers(client: Client) -> None:
    """The client is anonymous, so views refuse or redirect it, which is fast; the headers do not depend on the view."""
    addresses = sorted(
        {*list_route_addresses(get_resolver()), "/v2/nowhere", "/static/console/page.css", "/static/nowhere.css"}
    )
    assert len(addresses) > 150
    for address in addresses:
        answered = client.get(address)
        assert answered.headers["X-Content-Type-Options"] == "nosniff", address
        assert answered.headers["Referrer-Policy"] == "same-origin", address
        assert answered.headers["Cross-Origin-Opener-Policy"] == "same-origin", address
        assert answered.headers["Permissions-Policy"] == PERMISSIONS_POLICY, address
        said = answered.headers["Content-Security-Policy"]
        assert said.startswith("default-src 'none'; script-src 'self'"), address
        assert "frame-ancestors 'none'" in said, address


def test_own_pages_have_the_strict_policy_and_stock_pages_a_wider_one(operator: Client) -> None:
    ours = ["/admin/", "/admin/nowhere/", "/api/", "/api/devices/", "/v2", "/healthz", "/static/console/page.css"]
    for path in ours:
        assert operator.get(path).headers["Content-Security-Policy"] == build_content_policy(), path
    for path in (reverse("admin:accelerators_device_changelist"), reverse("admin:auth_user_add")):
        assert operator.get(path).headers["Content-Security-Policy"] == STOCK_PAGE_POLICY, path
    swagger = operator.get("/api/docs/", headers={"accept": "text/html"}).headers["Content-Security-Policy"]
    assert swagger == build_content_policy((("style-src", "'unsafe-inline'"),))
    assert Client().get("/admin/login/").headers["Content-Security-Policy"] == build_content_policy()
    assert "unsafe" not in build_content_policy()
