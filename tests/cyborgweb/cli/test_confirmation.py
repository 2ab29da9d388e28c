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


@pytest.mark.parametrize(
    ("yes", "is_terminal", "is_kept"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_draft_is_stored_only_if_somebody_can_confirm_it(
    monkeypatch: pytest.MonkeyPatch, yes: bool, is_terminal: bool, is_kept: bool
) -> None:
    class PreviewingService(ApiClient):
        """A service that previews one host, and records the bodies."""

        server_name = "a service"

        def __init__(self) -> None:
            super().__init__()
            self.bodies: list[dict[str, Any]] = []

        def send_request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
            """Record the body and return a preview."""
            self.bodies.append(options["json"])
            return {"confirm": True, "total": 2, "held": 0, "hosts": 2, "forecast": [], "token": "the token"}

    monkeypatch.setattr("sys.stdin.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("click.prompt", lambda *words, **options: "2")
    service = PreviewingService()
    with nullcontext() if is_kept else pytest.raises(click.UsageError, match="give --yes"):
        order_after_preview(
            *(CliContext(client=service), "rollouts/", {"op": "install"}, "Sure?", "hosts"),
            yes=yes,
            dry_run=False,
            stores_draft=True,
        )
    asked = {"op": "install", "dry_run": True}
    confirmed = {"op": "install", "token": "the token"}
    assert service.bodies == ([asked, confirmed] if is_kept else [asked | {"keep": False}])


def test_another_refused_field_of_a_preview_is_an_error() -> None:
    service = OldService("reason")
    with pytest.raises(CliError, match="reason: cannot be written"):
        order(service, reason="why")
