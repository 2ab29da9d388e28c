"""Test that one client cannot keep a web process busy: others are served, and the log and an event name it."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError

from accelerators import refusal_counts, slow_neighbours
from accelerators.models import Event
from cyborgweb.auth import clients
from cyborgweb.auth.clients import KnownTokens, known_tokens, name_client
from cyborgweb.http import refused_clients, slow_clients
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.models import ApiToken
from cyborgweb.monitoring import event_recorder
from cyborgweb.settings.keys import Keys
from cyborgweb.wsgi import application
from tests.support.webserver import serving, until

pytestmark = pytest.mark.django_db(transaction=True)
THREADS, QUEUE = 8, 8
FLOODER = "127.0.0.3"


class Service:
    """A server whose requests to `/v2/slow` last until `released` is set; all others go to the product."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.threads = DjangoThreads(self.serve, Keys(request_threads=THREADS, request_queue=QUEUE))
        self.port = 0

    def serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] != "/v2/slow":
            return application(environ, start_response)
        assert self.released.wait(60)
        start_response("200 OK", [])
        return [b"done"]

    def get(self, path: str, address: str = "127.0.0.1", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60, source_address=(address, 0))
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        received = answer.status, dict(answer.headers), answer.read()
        connection.close()
        return received


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    with serving(made.threads) as made.port:
        yield made
        made.released.set()


def make_token(name: str, project: str) -> str:
    user, _ = User.objects.get_or_create(username=name)
    return ApiToken.create_with_secret(name, user, ["admin"], project)


def flood(service: Service, answers: list[tuple[int, dict[str, str], bytes]], **options: str) -> list[threading.Thread]:
    """Send more slow requests than one client may have; store their answers."""
    clients = [
        threading.Thread(target=lambda: answers.append(service.get("/v2/slow", **options)))
        for _ in range(THREADS + QUEUE)
    ]
    for client in clients:
        client.start()
    until(lambda: service.threads.short.active_requests + len(answers) == THREADS + QUEUE)
    return clients


def finish(service: Service, clients: list[threading.Thread]) -> None:
    service.released.set()
    for client in clients:
        client.join(60)


def test_X5_a_flood_from_one_address_leaves_a_thread_and_a_place_for_others(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[tuple[int, dict[str, str], bytes]] = []
    refusal_counts.forget()
    with caplog.at_level(logging.WARNING):
        flooders = flood(service, answers, address=FLOODER)
        assert service.get("/healthz")[0] == 200
        # All places are taken now, and both others have to wait because they come at the same time.
        until(lambda: service.threads.short.active_requests == THREADS - 2 + QUEUE)
        blocked = threading.Thread(target=lambda: service.get("/v2/slow"))
        blocked.start()
        until(lambda: service.threads.short.active_requests == THREADS - 1 + QUEUE)
        waiting = threading.Thread(target=lambda: service.get("/v2/slow"))
        waiting.start()
        until(lambda: refusal_counts.record() or Event.objects.filter(action="client.refused").exists())
        assert any(f"address {FLOODER}" in record.message for record in caplog.records)
        finish(service, [*flooders, blocked, waiting])
    statuses = sorted(status for status, _, _ in answers)
    assert statuses[-1] == 503 and statuses.count(200) >= THREADS - 2
    (headers,) = (headers for _, headers, body in answers if b"send fewer at the same time" in body)
    assert headers["retry-after"] == "1"
    event = Event.objects.get(action="client.refused")
    assert f"address {FLOODER}" in event.changes["clients"][1]


def test_a_project_is_one_client_whatever_addresses_it_uses(service: Service) -> None:
    token = make_token("mallory", "p-mallory")
    for address in ("127.0.0.3", "127.0.0.4"):
        assert service.get("/v2/devices", address, X_Auth_Token=token)[0] == 200
    answers: list[tuple[int, dict[str, str], bytes]] = []
    flooders = flood(service, answers, address="127.0.0.3", X_Auth_Token=token)
    late = threading.Thread(target=lambda: answers.append(service.get("/v2/slow", "127.0.0.4", X_Auth_Token=token)))
    late.start()
    until(lambda: len(answers) == 3)
    assert service.threads.short._queue.running_requests == THREADS - 2, "its other address gets no further thread"
    assert service.get("/v2/devices", "127.0.0.3", X_Auth_Token=make_token("nova", "service"))[0] == 200
    finish(service, [*flooders, late])


def test_a_token_counts_for_its_project_only_after_it_was_accepted(service: Service) -> None:
    token = make_token("rita", "p-rita")
    assert known_tokens.find_project(token.encode()) == ""
    assert service.get("/v2/devices", X_Auth_Token=token)[0] == 200
    assert known_tokens.find_project(token.encode()) == "p-rita"
    ApiToken.objects.all().delete()
    assert service.get("/v2/devices", X_Auth_Token=token)[0] == 401
    assert known_tokens.find_project(token.encode()) == ""


def test_known_tokens_are_bounded() -> None:
    tokens = KnownTokens(max_tokens=2)
    for number in range(3):
        tokens.remember(f"t{number}", "p")
    assert [tokens.find_project(f"t{number}".encode()) for number in range(3)] == ["", "p", "p"]


@pytest.mark.parametrize(
    ("peer", "forwarded", "proxies", "name"),
    [
        ("192.0.2.1", b"", None, "address 192.0.2.1"),
        ("192.0.2.1", b"198.51.100.7", None, "address 192.0.2.1"),
        ("192.0.2.1", b"203.0.113.9, 198.51.100.7", (), "address 198.51.100.7"),
        ("192.0.2.1", b"", (), "address 192.0.2.1"),
        ("192.0.2.1", b"nonsense", (), "address 192.0.2.1"),
        ("192.0.2.1", b"198.51.100.7", ("10.0.0.5", "192.0.2.0/24"), "address 198.51.100.7"),
        ("::ffff:192.0.2.1", b"198.51.100.7", ("192.0.2.1",), "address 198.51.100.7"),
        ("192.0.2.1", b"198.51.100.7", ("10.0.0.5", "2001:db8::/32"), "address 192.0.2.1"),
        (None, b"198.51.100.7", ("10.0.0.5",), "address unknown"),
        ("2001:db8::1", b"", None, "address 2001:db8::"),
        ("::ffff:192.0.2.1", b"", None, "address 192.0.2.1"),
        (None, b"", None, "address unknown"),
    ],
)
def test_clients_have_the_address_that_the_proxy_saw(
    peer: str | None, forwarded: bytes, proxies: tuple[str, ...] | None, name: str
) -> None:
    keys = Keys() if proxies is None else Keys(public_url="https://a.example", proxy_addresses=proxies)
    headers = [(b"x-forwarded-for", forwarded)] if forwarded else []
    scope = {"client": (peer, 1) if peer else None, "headers": headers}
    assert name_client(scope, keys) == name


def test_a_request_with_two_tokens_counts_for_its_address() -> None:
    known_tokens.remember("accepted", "p-two")
    header = (b"x-auth-token", b"accepted")
    scope = {"client": ("192.0.2.1", 1), "headers": [header]}
    assert name_client(scope, Keys()) == "project p-two"
    for headers in ([header, (b"x-auth-token", b"invented")], [(b"x-auth-token", b"invented"), header]):
        assert name_client(scope | {"headers": headers}, Keys()) == "address 192.0.2.1"


def test_a_known_token_that_is_not_used_any_more_expires() -> None:
    now = 0.0
    tokens = KnownTokens(clock=lambda: now)
    tokens.remember("t", "p")
    now = clients.REMEMBER_S - 1
    assert tokens.find_project(b"t") == "p"
    tokens.remember("t", "p")
    now += clients.REMEMBER_S - 1
    assert tokens.find_project(b"t") == "p"
    now += 1
    assert tokens.find_project(b"t") == ""


def test_a_process_that_serves_http_records_its_slow_and_refused_clients() -> None:
    slow_neighbours.forget()
    refusal_counts.forget()
    for _ in range(slow_clients.SLOW_REQUESTS):
        slow_clients.note_slow_client(("192.0.2.77", 1))
    refused_clients.note_refused_client("address 192.0.2.78")
    stop = event_recorder.start_recording(interval_s=0.05)
    try:
        until(lambda: Event.objects.filter(action=slow_neighbours.ACTION).exists())
        until(lambda: Event.objects.filter(action="client.refused").exists())
    finally:
        stop()
        slow_neighbours.forget()
        refusal_counts.forget()


def test_counts_that_one_part_cannot_record_do_not_keep_the_others_from_being_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OperationalError("the database is down")

    refusal_counts.forget()
    refused_clients.note_refused_client("address 192.0.2.78")
    fail.__module__ = slow_neighbours.__name__
    monkeypatch.setattr(slow_neighbours, "record", fail)
    event_recorder.record_counts()
    assert Event.objects.filter(action="client.refused").exists()
    assert "What accelerators.slow_neighbours has counted cannot be recorded now: OperationalError" in caplog.text
