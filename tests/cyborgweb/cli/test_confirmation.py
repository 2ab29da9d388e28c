"""Test that actions are ordered with their preview, and without one from a service of an older release."""

from __future__ import annotations

from typing import Any

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


def test_a_preview_that_has_changed_until_it_is_confirmed_is_not_confirmed() -> None:
    class ChangingService(ApiClient):
        """A service whose preview names one more host each time."""

        server_name = "a service"
        bodies: list[dict[str, Any]] = []

        def send_request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
            """Record the body and return a preview."""
            self.bodies.append(options["json"])
            number = len(self.bodies)
            return {"confirm": True, "total": number, "held": 0, "hosts": number, "forecast": [], "token": f"t{number}"}

    service = ChangingService()
    with pytest.raises(CliError, match="changed since the preview") as refused:
        order_after_preview(
            *(CliContext(client=service), "rollouts/", {"op": "install"}, "Sure?", "hosts"),
            yes=True,
            dry_run=False,
            stores_draft=True,
        )
    assert refused.value.reason == "stale_preview"
    asked = {"op": "install", "dry_run": True}
    assert service.bodies == [asked | {"keep": False}, asked], "nothing was confirmed"


def test_another_refused_field_of_a_preview_is_an_error() -> None:
    service = OldService("reason")
    with pytest.raises(CliError, match="reason: cannot be written"):
        order(service, reason="why")
