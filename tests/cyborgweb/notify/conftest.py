"""Fixtures: a receiver, settings that let webhooks reach it, and a function that creates subscriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from cyborgweb.models.event_types import NotificationKind
from cyborgweb.models.notify import ConfirmationRequest, Delivery, Subscription
from cyborgweb.notify import subscriptions
from tests.cyborgweb.notify.receiver import Receiver, run_receiver

OLGA = Caller("olga", "7", frozenset({"admin"}), "p1")
PAST_TIME = "2020-01-01T00:00:00Z"
Subscribe = Callable[..., Subscription]


@pytest.fixture(autouse=True)
def _open_to_loopback(settings: Any) -> None:
    settings.KEYS = replace(
        settings.KEYS,
        webhook_allow_http=True,
        webhook_networks=("127.0.0.0/8",),
        mail_host="mail",
        mail_domains=("*",),
        public_url="https://accelerators.example",
    )


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with run_receiver() as one:
        yield one


@pytest.fixture
def subscribe(db: None) -> Subscribe:
    """Return `subscribe(way="inbox", caller=OLGA, **values)`, which creates a subscription. By default it covers all
    kinds of messages of the whole cloud; it was created, and its address confirmed, long ago.
    """

    def make(way: str = "inbox", caller: Caller = OLGA, **values: Any) -> Subscription:
        said = {"name": "mine", "kinds": list(NotificationKind), "scope": "cloud", "way": way} | values
        personal = said.pop("personal", way == "inbox")
        row, _ = subscriptions.create(said, caller, EventSource.API, personal=personal)
        Subscription.objects.filter(pk=row.pk).update(created_at=PAST_TIME, confirmed_at=PAST_TIME)
        row.deliveries.all().delete()
        ConfirmationRequest.objects.all().delete()
        return row

    return make


def make_retries_due() -> None:
    """Let all waiting deliveries and paused subscriptions be due for their next attempt."""
    Delivery.objects.filter(progress="waiting").update(next_at=PAST_TIME)
    Subscription.objects.update(retry_at=PAST_TIME)
