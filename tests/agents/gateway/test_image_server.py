"""Tests of image downloads by agents: a signed challenge is required, and an open command must name the image."""

from __future__ import annotations

import http.client
import json
import socket as sockets
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder
from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from accelerators.images import store
from accelerators.models import Command, Device, Event, Image
from agents import wire
from agents.gateway.asgi_app import AgentGateway
from agents.models import Agent
from cyborgweb import asgi
from cyborgweb.server import tls
from cyborgweb.settings.keys import Keys
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.webserver import serving, until
from tests.support.wireagent import WireAgent

pytestmark = pytest.mark.django_db(transaction=True)
IMAGE_BYTES = bytes(range(256)) * 3000


@pytest.fixture(autouse=True)
def keys(settings: Any, tmp_path: Path) -> Keys:
    settings.KEYS = Keys(state_dir=str(tmp_path), lease_flush_s=0.05)
    return settings.KEYS


@pytest.fixture
def gateway(keys: Keys) -> Iterator[AgentGateway]:
    made = AgentGateway(keys)
    yield made
    made.stop()


@pytest.fixture
def port(gateway: AgentGateway) -> Iterator[int]:
    with serving(asgi.HttpApplication(gateway, None)) as port:  # type: ignore[arg-type]
        yield port


@pytest.fixture
def image() -> Image:
    return store.store_upload(
        [IMAGE_BYTES], len(IMAGE_BYTES), "shell", {}, Caller("rita", "u", frozenset(), "p"), EventSource.API
    )


def enrol_agent(port: int, host: str = "cmp1", **more: Any) -> WireAgent:
    agent = WireAgent(port, host, host, **more)
    Agent.objects.create(host=get_or_create_host(host), public_key=agent.public_key)
    return agent


def place_program_command(image: Image, host: str = "cmp1") -> Command:
    apply_report(get_or_create_host(host), make_driver_report(make_card(1)))
    with conductor.writing():
        order = CommandOrder("program", Device.objects.get().uuid, arguments={"image": store.to_image_ref(image)})
        return command_queue.place_commands([order])[0]


def fetch_image(agent: WireAgent, image: object, authorization: str = "", method: str = "GET") -> tuple[int, bytes]:
    kind = http.client.HTTPSConnection if agent.tls else http.client.HTTPConnection
    more = {"context": agent.tls} if agent.tls else {}
    connection = kind("127.0.0.1", agent.port, timeout=10, **more)  # type: ignore[arg-type]
    header = authorization or agent.credential(agent.challenge())
    connection.request(method, f"{wire.IMAGE_PATH}{image}", headers={"Authorization": header})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def fetch_refusal(*asked: Any) -> tuple[int, str]:
    status, content = fetch_image(*asked)
    said = json.loads(content)
    assert said["error"]
    return status, said["code"]


@pytest.mark.parametrize("column", ["answered_at", "ended_at"])
def test_an_agent_can_fetch_the_image_of_its_command_only_while_the_command_is_open(
    port: int, image: Image, column: str
) -> None:
    agent, command = enrol_agent(port), place_program_command(image)
    assert fetch_image(agent, image.uuid) == fetch_image(agent, image.uuid) == (200, IMAGE_BYTES)
    with conductor.writing():
        Command.objects.filter(pk=command.pk).update(**{column: command.created_at})
    assert fetch_refusal(agent, image.uuid) == (403, "not-ordered")


def test_an_image_is_refused_without_valid_credentials_and_an_open_command(
    port: int, image: Image, gateway: AgentGateway
) -> None:
    agent, other = enrol_agent(port), enrol_agent(port, "cmp2")
    place_program_command(image)
    used = agent.credential(agent.challenge())
    assert fetch_image(agent, image.uuid, used)[0] == 200
    assert fetch_refusal(agent, image.uuid, used) == (401, "challenge"), "a nonce is good once"
    assert fetch_refusal(agent, image.uuid, "Bearer x") == (401, "credential")
    forged = agent.credential(agent.challenge(), host="cmp2")
    assert fetch_refusal(agent, image.uuid, forged) == (401, "signature")
    assert fetch_refusal(WireAgent(port), image.uuid) == (403, "not-enrolled")
    assert fetch_refusal(replace(agent, host="cmp2"), image.uuid) == (403, "not-enrolled")
    assert fetch_refusal(other, image.uuid) == (403, "not-ordered")
    assert fetch_refusal(agent, uuid4()) == (403, "not-ordered")
    assert fetch_refusal(agent, "..%2f..%2fsecret-key") == fetch_refusal(agent, "../secret-key") == (404, "no-image")
    assert fetch_image(agent, image.uuid, method="POST")[0] == 405
    Agent.objects.filter(host__name="cmp1").update(barred="revoked", barred_reason="stolen")
    assert fetch_refusal(agent, image.uuid) == (403, "revoked")
    gateway.refusals.flush()
    codes: dict[str, set[str]] = {}
    for host, (_, code) in Event.objects.filter(action="agent.refused").values_list("host", "changes__code"):
        codes.setdefault(host, set()).add(code)
    assert codes == {
        "(unknown)": {"challenge", "credential", "signature", "not-enrolled"},
        "cmp1": {"not-enrolled", "not-ordered", "no-image", "revoked"},
        "cmp2": {"not-ordered"},
    }, "a refusal is recorded under the host of the key, whatever name is claimed"


def test_aborted_busy_and_missing_image_downloads_are_handled(
    port: int, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = enrol_agent(port)
    place_program_command(image)
    with sockets.create_connection(("127.0.0.1", port), 10) as raw:
        header = agent.credential(agent.challenge())
        raw.sendall(f"GET {wire.IMAGE_PATH}{image.uuid} HTTP/1.0\r\nAuthorization: {header}\r\n\r\n".encode())
        assert b" 200 OK" in raw.recv(512)
    until(lambda: fetch_image(agent, image.uuid) == (200, IMAGE_BYTES))
    monkeypatch.setattr("agents.gateway.image_server.MAX_TRANSFERS", 0)
    assert fetch_refusal(agent, image.uuid) == (503, "busy")
    monkeypatch.undo()
    store.get_image_path(image.uuid).unlink()
    assert fetch_refusal(agent, image.uuid) == (404, "no-image")


def test_the_tls_listener_serves_images_to_agents_that_sign_its_certificate(
    keys: Keys, gateway: AgentGateway, image: Image
) -> None:
    pin, pem = tls.read_fingerprint(keys), Path(keys.state_dir) / tls.CERTIFICATE_FILE
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    place_program_command(image)
    with serving(asgi.AgentApplication(gateway, pin), ssl_certfile=pem, ssl_keyfile=pem) as port:
        agent = enrol_agent(port, tls=blind, fingerprint=pin)
        assert fetch_image(agent, image.uuid) == (200, IMAGE_BYTES)
        assert fetch_refusal(replace(agent, fingerprint="ab" * 32), image.uuid) == (401, "signature")
