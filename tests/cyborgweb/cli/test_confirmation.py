"""Test that actions are ordered with their preview, and without one from a service of an older release."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import click
import pytest

from cyborgweb.cli.confirmation import order_after_preview
from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.options import CliContext


class OldService(ApiClient):
    """A service of an older release, which knows no `dry_run`. It refuses with the text that such services send."""

    def __init__(self, field: str = "dry_run") -> None:
        super().__init__()
        self.unknown_field = field
        self.bodies: list[dict[str, Any]] = []

    @property
    def server_name(self) -> str:
        return "an older service"

    def send_request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Record the body and return an answer; raise CliError for a body with the unknown field."""
        body = options["json"]
        if self.unknown_field in body:
            text = f"{self.unknown_field}: cannot be written; writable fields: reason."
            raise CliError(ExitCode.REFUSED, text, "invalid")
        self.bodies.append(body)
        return {"state": "maintenance"}


def order(service: OldService, **body: str) -> dict[str, Any] | None:
    context = CliContext(client=service)
    return order_after_preview(context, "devices/x/disable/", body, "Sure?", "devices", yes=False, dry_run=False)


def test_a_service_of_an_older_release_is_sent_the_action_without_a_preview() -> None:
    service = OldService()
    assert order(service, reason="why") == {"state": "maintenance"}
    assert service.bodies == [{"reason": "why"}]


def test_a_preview_that_was_asked_for_is_an_error_with_a_service_of_an_older_release() -> None:
    service = OldService()
    with pytest.raises(CliError, match="older release"):
        order_after_preview(CliContext(client=service), "x/", {}, "Sure?", "devices", yes=True, dry_run=True)
    assert service.bodies == []


class PreviewingService(ApiClient):
    """A service that previews a change of two hosts, stores drafts as it is told, and records the bodies."""

    server_name = "a service"

    def __init__(self, needs_confirmation: bool) -> None:
        super().__init__()
        self.needs_confirmation = needs_confirmation
        self.bodies: list[dict[str, Any]] = []

    def send_request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Record the body and return a preview."""
        body = options["json"]
        self.bodies.append(body)
        is_stored = (
            body.get("store_draft") == "always" or (body.get("store_draft") == "when_needed") & self.needs_confirmation
        )
        token = "the token" if is_stored else None
        return {"confirm": self.needs_confirmation, "total": 2, "held": 0, "hosts": 2, "forecast": [], "token": token}


NOBODY, SOMEBODY = False, True
DRAFT_CASES = (
    # whether a confirmation is needed, whether the verb always asks, --yes, a terminal; the storage, and what is sent
    (True, False, True, NOBODY, "when_needed", {"token": "the token"}),
    (True, False, False, SOMEBODY, "when_needed", {"token": "the token"}),
    (True, False, False, NOBODY, "never", None),
    (False, False, True, NOBODY, "when_needed", {}),
    (False, False, False, SOMEBODY, "when_needed", {}),
    (False, False, False, NOBODY, "never", {}),
    (False, True, True, SOMEBODY, "when_needed", {}),
    (False, True, False, SOMEBODY, "always", {"token": "the token"}),
    (False, True, False, NOBODY, "never", None),
)


@pytest.mark.parametrize(("is_needed", "always_ask", "yes", "is_terminal", "storage", "sent"), DRAFT_CASES)
def test_a_draft_is_stored_only_if_its_token_is_sent(
    monkeypatch: pytest.MonkeyPatch,
    is_needed: bool,
    always_ask: bool,
    yes: bool,
    is_terminal: bool,
    storage: str,
    sent: dict[str, str] | None,
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("click.prompt", lambda *words, **options: "2")
    service = PreviewingService(is_needed)
    with nullcontext() if sent is not None else pytest.raises(click.UsageError, match="give --yes"):
        order_after_preview(
            *(CliContext(client=service), "rollouts/", {"op": "install"}, "Sure?", "hosts"),
            yes=yes,
            dry_run=False,
            always_ask=always_ask,
            stores_draft=True,
        )
    preview = {"op": "install", "dry_run": True, "store_draft": storage}
    assert service.bodies == [preview, *([] if sent is None else [{"op": "install", **sent}])]


def test_another_refused_field_of_a_preview_is_an_error() -> None:
    service = OldService("reason")
    with pytest.raises(CliError, match="reason: cannot be written"):
        order(service, reason="why")
