"""Callers with tokens, and inventories of a given size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client

from accelerators import conductor
from accelerators.models import Deployable, Device
from cyborgweb.models import ApiToken
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

Get = Callable[..., HttpResponse]
Call = Callable[..., HttpResponse]


@pytest.fixture
def token(db: None) -> str:
    """A token of project p1 with no role at all: enough to read (contract section 3.1)."""
    return ApiToken.create_with_secret("reader", User.objects.create_user("rita"), [], "p1")


@pytest.fixture
def get(client: Client, token: str) -> Get:
    """Return `get(path, version="", method="GET", **headers)`, which sends a request with the token."""

    def call(path: str, version: str = "", method: str = "GET", **headers: Any) -> HttpResponse:
        sent = {"X-Auth-Token": token} | ({"OpenStack-API-Version": version} if version else {})
        return client.generic(method, path, headers=sent | headers)

    return call


@pytest.fixture
def call(client: Client, db: None) -> Call:
    """Return `call(method, path, body, roles=, project=, service=, version=)`, which sends JSON with a token.

    The token has exactly these roles; `service` adds a service token.
    """
    user = User.objects.create_user(f"user-{uuid4()}")
    secrets: dict[tuple[str, str], str] = {}

    def token_of(roles: str, project: str) -> str:
        if (roles, project) not in secrets:
            secrets[roles, project] = ApiToken.create_with_secret(f"{roles} of {project}", user, roles.split(), project)
        return secrets[roles, project]

    def ask(
        method: str,
        path: str,
        body: object = None,
        *,
        roles: str = "admin member reader",
        project: str = "p1",
        service: bool = False,
        version: str = "2.3",
        **headers: str,
    ) -> HttpResponse:
        sent = {"X-Auth-Token": token_of(roles, project)}
        if version:
            sent["OpenStack-API-Version"] = f"accelerator {version}"
        if service:
            sent["X-Service-Token"] = token_of("service", "services")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        kind = headers.pop("content_type", "application/json")
        return client.generic(method, path, data, kind, headers=sent | headers)

    return ask


@pytest.fixture
def fill(db: None) -> Callable[[int], None]:
    """Return `fill(devices)`, which creates hosts cmp0, cmp1… with ten cards each."""

    def make(devices: int) -> None:
        for n in range(0, devices, 10):
            cards = [make_card(b, vendor=f"{b % 2:04x}") for b in range(min(10, devices - n))]
            apply_report(get_or_create_host(f"cmp{n // 10}"), make_driver_report(*cards))

    return make


@pytest.fixture
def offered(db: None) -> Callable[..., str]:
    """Return `offered(handles=1, n=1)`, which creates a ready card at bus `n` and returns the uuid of its provider."""

    def make(handles: int = 1, n: int = 1, **changes: object) -> str:
        provider = str(uuid4())
        apply_report(get_or_create_host(f"cmp{n}"), make_driver_report(make_card(n, handles, **changes)))
        with conductor.writing():
            part = Deployable.objects.get(device__host__name=f"cmp{n}")
            Deployable.objects.filter(id=part.id).update(rp_uuid=provider)
            Device.objects.filter(id=part.device_id).update(state="ready")
        return provider

    return make


def get_fault_string(response: HttpResponse) -> str:
    """Return the sentence of an error of form A."""
    sentence: str = json.loads(json.loads(response.content)["error_message"])["faultstring"]
    return sentence
