"""Test the verbs of `cyborg` for subscriptions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import User

from accelerators.domain.caller import Caller
from cyborgweb.models import ApiToken
from cyborgweb.models.notify import Subscription
from cyborgweb.notify import owners, subscriptions
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


def test_an_ended_subscription_is_handed_over(cyborg: Cyborg) -> None:
    values = {"name": "hook", "kinds": ["request.bound"], "way": "webhook", "target": "https://hook.example/"}
    row, _ = subscriptions.create(values, Caller("olga", "7", frozenset({"admin"}), "p1"))
    owners.end(Subscription.objects.all(), "Its owner olga was deactivated.", "tests")
    (listed,) = json.loads(cyborg("subscription-list", "--json").output)
    assert (listed["standing"], listed["last_error"]) == ("ended", "Its owner olga was deactivated.")
    assert_refused(cyborg("subscription-hand-over", str(row.uuid), "bob"), 1, "There is no active user bob")
    row.refresh_from_db()
    bob = User.objects.create(username="bob")
    ApiToken.create_with_secret("bob", bob, ["member", "reader"], "p1")
    outdated = cyborg("subscription-hand-over", str(row.uuid), "bob", "--generation", "7")
    assert_refused(outdated, 1, f"is at generation {row.generation} now, not 7: somebody changed it", "[conflict]")
    assert outdated.stderr.count("--- present version") == 1, "the difference is still the same when it is refused"
    done = cyborg("subscription-hand-over", str(row.uuid), "bob", "--reason", "Olga has left.")
    assert done.exit_code == 0, done.output
    row.refresh_from_db()
    assert (row.standing, row.owner) == ("active", str(bob.pk))
