"""A caller with a token, and inventories of a given size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client

from cyborgweb.models import ApiToken
from tests.support.reports import a_host, answer, apply, card

Get = Callable[..., HttpResponse]


@pytest.fixture
def token(db: None) -> str:
    """A token of project p1 with no role at all: enough to read (contract section 3.1)."""
    return ApiToken.make("reader", User.objects.create_user("rita"), [], "p1")


@pytest.fixture
def get(client: Client, token: str) -> Get:
    """`get(path, version="", **headers)` with the token; `method` for the other verbs."""

    def call(path: str, version: str = "", method: str = "GET", **headers: Any) -> HttpResponse:
        sent = {"X-Auth-Token": token} | ({"OpenStack-API-Version": version} if version else {})
        return client.generic(method, path, headers=sent | headers)

    return call


@pytest.fixture
def fill(db: None) -> Callable[[int], None]:
    """`fill(devices)`: hosts cmp0, cmp1… of ten cards each."""

    def make(devices: int) -> None:
        for n in range(0, devices, 10):
            cards = [card(b, vendor=f"{b % 2:04x}") for b in range(min(10, devices - n))]
            apply(a_host(f"cmp{n // 10}"), answer(*cards))

    return make
