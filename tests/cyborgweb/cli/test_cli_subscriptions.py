"""Test the verbs of `cyborg` for subscriptions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from accelerators.domain.caller import Caller
from cyborgweb.notify import subscriptions
from tests.cyborgweb.cli.conftest import Cyborg, assert_refused

MAILS = {"name": "letters", "kinds": ["request.bound"], "way": "email", "target": "olga@example.org"}


def test_an_unconfirmed_address_is_shown_and_its_confirmation_sent_again(
    cyborg: Cyborg, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.KEYS = replace(
        settings.KEYS, mail_host="mail", mail_domains=("*",), public_url="https://accelerators.example"
    )
    row, _ = subscriptions.create(MAILS, Caller("olga", "7", frozenset({"admin"}), "p1"))
    listed = json.loads(cyborg("subscription-list", "--json").output)
    assert [one["standing"] for one in listed] == ["waiting for confirmation"]
    sent = cyborg("subscription-resend", str(row.uuid))
    assert sent.exit_code == 0 and "waiting for confirmation" in sent.output
    assert row.deliveries.filter(kind="subscription.confirmation").count() == 2
    monkeypatch.setattr(subscriptions, "MAX_ASKED_OF_ADDRESS", 2)
    assert_refused(cyborg("subscription-resend", str(row.uuid)), 1, "2 requests to confirm in 1 day")
    subscriptions.confirm_address(str(row.uuid), row.target)
    assert [one["standing"] for one in json.loads(cyborg("subscription-list", "--json").output)] == ["active"]
