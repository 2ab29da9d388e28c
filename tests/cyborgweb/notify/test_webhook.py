"""Test one attempt to deliver: its signature, the answers of receivers, and addresses to which nothing is sent."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cyborgweb.notify import webhook
from cyborgweb.notify.webhook import (
    AllowedDestinations,
    AttemptOutcome,
    parse_networks,
    parse_webhook_url,
    post_message,
)
from cyborgweb.server import tls
from tests.cyborgweb.notify.receiver import Receiver, run_receiver

PUBLIC_ONLY = AllowedDestinations()
WITH_LOOPBACK = AllowedDestinations(allow_http=True, networks=parse_networks(["127.0.0.0/8"]))


def test_the_signature_equals_the_example_of_the_specification() -> None:
    """Compare with the example of the specification, and a generated secret's signature with one computed here."""
    secret, message, at = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330
    wanted = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert webhook.sign_message(secret, message, at, b'{"test": 2432232314}') == wanted
    generated = webhook.generate_secret()
    key = base64.b64decode(generated.removeprefix("whsec_"))
    assert len(key) == 32 and generated != webhook.generate_secret()
    digest = hmac.new(key, f"{message}.{at}.a".encode(), hashlib.sha256).digest()
    assert webhook.sign_message(generated, message, at, b"a") == f"v1,{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "127.0.0.1",
        "::1",
        "10.1.2.3",
        "192.168.0.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "fe80::1%lo",
        "fd00::1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "fec0::1",
    ],
)
def test_a_name_or_address_that_is_not_public_is_refused_when_sending(address: str) -> None:
    outcome = post_message(
        "https://hook.example/x", {}, b"{}", PUBLIC_ONLY, lambda host, port: ["93.184.216.34", address]
    )
    assert "that is not public" in outcome.error
    assert address.partition("%")[0] not in outcome.error, "what a name means inside is nobody's"
    literal = address.partition("%")[0]
    url = f"https://[{literal}]/" if ":" in literal else f"https://{literal}/"
    with pytest.raises(webhook.WebhookUrlError, match="not public"):
        parse_webhook_url(url, PUBLIC_ONLY)


def test_the_connection_goes_to_the_address_that_was_checked_without_a_second_lookup() -> None:
    """A name may have another address a moment later, so it is looked up only once."""
    with run_receiver() as receiver:
        asked: list[str] = []

        def lookup(host: str, port: int) -> list[str]:
            asked.append(host)
            return ["127.0.0.1"] if len(asked) == 1 else ["127.9.9.9"]

        url = receiver.url.replace("127.0.0.1", "hook.example")
        assert post_message(url, {"webhook-id": "a"}, b"{}", WITH_LOOPBACK, lookup) == AttemptOutcome()
        assert asked == ["hook.example"]
        assert receiver.calls[0][0]["host"].startswith("hook.example:")


@pytest.mark.slow
def test_lookups_that_hang_are_bounded_and_do_not_keep_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(webhook, "_lookup_places", webhook.LookupPlaces(2, 2))
    before, answer, asked = set(threading.enumerate()), threading.Event(), []

    def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        answer.wait(20)
        return ["127.0.0.1"]

    for name in ("a", "b", "c", "d"):
        error = post_message(f"https://{name}.example/", {}, b"{}", PUBLIC_ONLY, lookup).error
        assert f"the name {name}.example was not resolved in time" in error
    hanging = set(threading.enumerate()) - before
    assert (asked, [thread.daemon for thread in hanging]) == (["a.example", "b.example"], [True, True])
    answer.set()
    for thread in hanging:
        thread.join(10)
    monkeypatch.setattr(webhook, "CONNECT_TIMEOUT_S", 20.0)
    assert "that is not public" in post_message("https://e.example/", {}, b"{}", PUBLIC_ONLY, lookup).error


@pytest.mark.slow
def test_lookups_that_hang_for_one_project_leave_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(webhook, "_lookup_places", webhook.LookupPlaces(4, 3))
    answer = threading.Event()

    def hang(host: str, port: int) -> list[str]:
        answer.wait(20)
        return ["127.0.0.1"]

    def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    try:
        for name in ("a", "b", "c", "d", "e"):
            outcome = post_message(f"https://{name}.example/", {}, b"{}", PUBLIC_ONLY, hang, project="p1")
            assert "was not resolved in time" in outcome.error
        own = post_message("https://f.example/", {}, b"{}", PUBLIC_ONLY, resolve, project="p1")
        monkeypatch.setattr(webhook, "CONNECT_TIMEOUT_S", 20.0)
        other = post_message("https://f.example/", {}, b"{}", PUBLIC_ONLY, resolve, project="p2")
        assert "was not resolved in time" in own.error and "that is not public" in other.error
    finally:
        answer.set()


@pytest.mark.slow
def test_an_attempt_has_one_deadline_for_the_lookup_the_connection_tls_and_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "ATTEMPT_TIMEOUT_S", 0.3)
    answer = threading.Event()

    def hang(host: str, port: int) -> list[str]:
        answer.wait(20)
        return ["127.0.0.1"]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"https://127.0.0.1:{silent.getsockname()[1]}/"
        for url, lookup in ((address, webhook.resolve_host), ("https://hook.example/", hang)):
            begun_at = time.monotonic()
            assert "in time" in post_message(url, {}, b"{}", WITH_LOOPBACK, lookup).error
            assert time.monotonic() - begun_at < webhook.CONNECT_TIMEOUT_S
    answer.set()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://example.org/", "begins with https://"),
        ("ftp://example.org/", "begins with https://"),
        ("https:///x", "the name of a host"),
        ("https://u:p@example.org/", "no name, password"),
        ("https://example.org/#x", "fragment"),
        ("https://example.org/a b", "without blanks"),
        ("https://example.org/\r\nX: y", "without blanks"),
        ("https://example.org:99999/", "no URL"),
        ("https://exämple.org/", "ASCII"),
        ("https://example.org\\@127.0.0.1/", "without blanks"),
        ("https://a_b$.org/", "no name"),
        ("https://example.org/" + "x" * 2000, "2000"),
    ],
)
def test_unusable_urls_are_refused_with_a_message(url: str, says: str) -> None:
    with pytest.raises(webhook.WebhookUrlError, match=says):
        parse_webhook_url(url, PUBLIC_ONLY)
    assert says in post_message(url, {}, b"", PUBLIC_ONLY).error


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("200", ""),
        ("204", ""),
        ("500", "The receiver answered 500."),
        ("302", "redirects are not followed"),
        ("rubbish", "no HTTP"),
        ("closes", "without an answer"),
        ("hangs", "did not answer in time"),
        ("trickles", "did not answer in time"),
    ],
)
def test_each_answer_of_a_receiver_gives_its_outcome(monkeypatch: pytest.MonkeyPatch, mood: str, error: str) -> None:
    if mood in ("hangs", "trickles"):
        monkeypatch.setattr(webhook, "ATTEMPT_TIMEOUT_S", 0.5)
    with run_receiver() as receiver:
        receiver.behaviours = [mood]
        outcome = post_message(receiver.url, {"webhook-id": "a"}, b"{}", WITH_LOOPBACK)
        assert error in outcome.error and bool(error) == bool(outcome.error)
        assert len(receiver.calls) == 1


def test_tls_is_verified_for_the_name_in_the_url_at_the_address_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "localhost.pem"
    file.write_bytes(tls._make_certificate())
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(file)
    asked_names: list[str | None] = []
    server_context.sni_callback = lambda _, name, __: asked_names.append(name)
    monkeypatch.setattr(webhook, "_tls_context", lambda: ssl.create_default_context(cafile=file))
    with run_receiver(server_context) as receiver:
        port = urlsplit(receiver.url).port
        for name, error in (("localhost", ""), ("hook.example", "certificate is not accepted: Hostname mismatch")):
            url = f"https://{name}:{port}/"
            outcome = post_message(url, {"webhook-id": "a"}, b"{}", WITH_LOOPBACK, lambda host, port: ["127.0.0.1"])
            assert error in outcome.error and bool(error) == bool(outcome.error)
        assert [headers["host"] for headers, _ in receiver.calls] == [f"localhost:{port}"]
        assert asked_names == ["localhost", "hook.example"]


def test_a_410_is_gone_and_unreachable_receivers_are_reported(receiver: Receiver) -> None:
    receiver.behaviours = ["410"]
    assert post_message(receiver.url, {"webhook-id": "a"}, b"", WITH_LOOPBACK).is_gone
    assert "cannot be reached: Connection refused" in post_message("http://127.0.0.1:1/", {}, b"", WITH_LOOPBACK).error
    assert "cannot be resolved" in post_message("https://nowhere.invalid/", {}, b"", PUBLIC_ONLY).error
    assert "cannot be reached" in post_message(receiver.url.replace("http:", "https:"), {}, b"", WITH_LOOPBACK).error


def test_only_listed_private_networks_may_be_reached() -> None:
    some = AllowedDestinations(networks=parse_networks(["10.1.0.0/16", "fd00::/8"]))
    assert parse_webhook_url("https://10.1.2.3/", some).host == "10.1.2.3"
    assert parse_webhook_url("https://[fd00::1]/", some)
    with pytest.raises(webhook.WebhookUrlError, match=r"10\.2"):
        parse_webhook_url("https://10.2.2.3/", some)
