"""Slow receivers take a share of the places for webhooks, and delay only the webhooks of their own projects."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerators.runtime import database_clock
from cyborgweb.models.notify import Delivery, SlowProject, Subscription
from cyborgweb.notify import places, sender, webhook
from cyborgweb.notify.places import FEW, MAX_OF_SLOW, MAX_WEBHOOKS, MAX_WEBHOOKS_PER_HOST, choose_webhooks
from cyborgweb.notify.webhook import AttemptOutcome
from drivers.isolation.threads import start_in_thread
from tests.cyborgweb.notify.conftest import OLGA, PAST_TIME, Subscribe, make_retries_due
from tests.cyborgweb.notify.receiver import Receiver
from tests.support.webserver import until


@dataclass(frozen=True)
class Attempt:
    """An attempt as the decision sees it."""

    project_id: str
    host: str
    is_slow: bool = False


def list_attempts(project: str, count: int, is_slow: bool = False) -> list[Attempt]:
    """Return attempts of this project to as many different hosts."""
    return [Attempt(project, f"{project}-{number}", is_slow) for number in range(count)]


def test_a_project_may_use_all_its_places_until_half_of_all_are_taken() -> None:
    assert len(choose_webhooks(list_attempts("p1", 20), [])) == places.MAX_WEBHOOKS_PER_PROJECT
    half = [one for number in range(4) for one in list_attempts(f"q{number}", 8)]
    assert len(half) == MAX_WEBHOOKS // 2 and len(choose_webhooks(list_attempts("p1", 20), half)) == FEW


def test_sixteen_unknown_projects_that_all_hang_leave_places_for_another_one() -> None:
    due = [one for turn in range(8) for number in range(16) for one in list_attempts(f"p{number}", 8)[turn : turn + 1]]
    hanging: list[Attempt] = []
    for _ in range(20):
        hanging += choose_webhooks([one for one in due if one not in hanging], hanging)
    assert len(choose_webhooks(list_attempts("quick", 1), hanging)) == 1


def test_slow_projects_together_get_a_quarter_of_the_places_and_each_a_few() -> None:
    due = [one for number in range(30) for one in list_attempts(f"s{number}", 8, is_slow=True)]
    chosen = choose_webhooks(due, [])
    assert len(chosen) == MAX_OF_SLOW == MAX_WEBHOOKS // 4
    assert max(Counter(one.project_id for one in chosen).values()) == FEW
    assert not choose_webhooks(due, chosen)


def test_slow_projects_leave_half_of_a_host_that_they_share_with_others() -> None:
    slow = [Attempt(f"s{number}", "shared", is_slow=True) for number in range(4)]
    quick = [Attempt(f"q{number}", "shared") for number in range(4)]
    chosen = choose_webhooks(slow + quick, [])
    assert [one.is_slow for one in chosen] == [True, True, False, False]


ATTEMPTS = st.lists(
    st.builds(Attempt, st.sampled_from([f"p{n}" for n in range(12)]), st.sampled_from([f"h{n}" for n in range(30)])),
    max_size=150,
)


@given(ATTEMPTS, st.sets(st.sampled_from([f"p{n}" for n in range(12)])))
def test_no_limit_is_ever_exceeded_and_a_second_choice_with_the_first_in_flight_adds_nothing(
    attempts: list[Attempt], slow: set[str]
) -> None:
    due = [replace(one, is_slow=one.project_id in slow) for one in attempts]
    chosen = choose_webhooks(due, [])
    assert len(chosen) <= MAX_WEBHOOKS and sum(one.is_slow for one in chosen) <= MAX_OF_SLOW
    assert all(count <= MAX_WEBHOOKS_PER_HOST for count in Counter(one.host for one in chosen).values())
    for project, count in Counter(one.project_id for one in chosen).items():
        assert count <= (FEW if project in slow else places.MAX_WEBHOOKS_PER_PROJECT)
    remaining = list((Counter(due) - Counter(chosen)).elements())
    assert choose_webhooks(remaining, chosen) == []


# With real receivers


@pytest.fixture
def hanging_targets() -> Iterator[list[str]]:
    """URLs of 16 destinations that accept connections and never answer."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(16)]
        yield [f"http://127.0.0.1:{server.getsockname()[1]}/" for server in servers]


def create_messages(row: Subscription, count: int, first: int = 0) -> None:
    """Create waiting messages of this subscription."""
    for number in range(first, first + count):
        row.deliveries.create(kind="request.bound", data={"request": "r"}, event=number)


def subscribe_hanging_projects(subscribe: Subscribe, targets: list[str]) -> None:
    """Create for each target a project with four subscriptions to it, each with messages that are due before others."""
    for number, target in enumerate(targets):
        caller = replace(OLGA, project_id=f"slow-{number}")
        for part in range(4):
            create_messages(subscribe("webhook", caller=caller, name=f"{part}", target=f"{target}{part}"), 4)
    Delivery.objects.update(next_at=PAST_TIME)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_x5_a_quick_projects_webhooks_stay_quick_beside_sixteen_projects_whose_receivers_hang(
    subscribe: Subscribe, receiver: Receiver, hanging_targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "ATTEMPT_TIMEOUT_S", 4.0)
    monkeypatch.setattr(sender, "SLOW_ATTEMPT_S", 1.0)
    monkeypatch.setattr(sender, "MAX_RUN_S", 6.0)
    subscribe_hanging_projects(subscribe, hanging_targets)
    quick = subscribe("webhook", caller=replace(OLGA, project_id="quick"), name="quick", target=receiver.url)
    round_of_sending = start_in_thread(send_and_close)
    try:
        delays: list[float] = []
        while not round_of_sending.done():
            created_at, before = time.monotonic(), len(receiver.accepted)
            create_messages(quick, 1, first=before)
            until(lambda seen=before: len(receiver.accepted) > seen or round_of_sending.done())
            if len(receiver.accepted) > before:
                delays.append(time.monotonic() - created_at)
            time.sleep(0.2)
    finally:
        round_of_sending.result(60)
    assert len(delays) >= 10 and max(delays) < 2.5, delays  # a place that is awaited takes 4 s
    assert SlowProject.objects.filter(project_id__startswith="slow-").exists()
    assert not SlowProject.objects.filter(project_id="quick").exists()


def send_and_close() -> None:
    """Run one round of sending on this thread's own connection to the database."""
    from django.db import connection

    try:
        sender.send_webhooks()
    finally:
        connection.close()


@pytest.mark.django_db
def test_a_project_is_slow_for_a_time_that_doubles_each_time_it_is_slow_again(
    subscribe: Subscribe, hanging_targets: list[str]
) -> None:
    hook = subscribe("webhook", target=hanging_targets[0])
    create_messages(hook, 1)

    def be_slow() -> float:
        """Store a slow attempt; return for how many seconds the project is slow then."""
        make_retries_due()
        (one,) = sender.fetch_due_webhooks()
        sender.store_outcomes([one], [AttemptOutcome("slow", seconds=sender.SLOW_ATTEMPT_S)], 0)
        return round((SlowProject.objects.get().slow_until - database_clock.now()).total_seconds())

    def pass_time(seconds: float) -> None:
        row = SlowProject.objects.get()
        SlowProject.objects.update(slow_until=row.slow_until - timedelta(seconds=seconds))

    assert be_slow() == be_slow() == sender.SLOW_S, "attempts of the same time count once"
    pass_time(sender.SLOW_S + 1)
    assert sender.fetch_due_webhooks() == [] and be_slow() == 2 * sender.SLOW_S
    pass_time(2 * sender.SLOW_S + 1)
    assert be_slow() == 4 * sender.SLOW_S
    pass_time(4 * sender.SLOW_S + sender.MAX_SLOW_S + 1)
    assert be_slow() == sender.SLOW_S, "it was quick for long"
    pass_time(sender.SLOW_S + sender.MAX_SLOW_S + 1)
    sender.give_up_and_delete_old()
    assert not SlowProject.objects.exists()


@pytest.mark.django_db
@pytest.mark.slow
def test_the_due_messages_of_slow_projects_do_not_hide_those_of_others(
    subscribe: Subscribe, hanging_targets: list[str]
) -> None:
    for number in range(MAX_WEBHOOKS + 6):
        project = f"slow-{number}"
        hook = subscribe("webhook", caller=replace(OLGA, project_id=project), target=f"http://127.0.0.{number + 1}:9/")
        create_messages(hook, 1)
        SlowProject.objects.create(project_id=project, slow_until=database_clock.now() + timedelta(minutes=1))
    Delivery.objects.update(next_at=PAST_TIME)
    quick = subscribe("webhook", caller=replace(OLGA, project_id="quick"), target=hanging_targets[0])
    create_messages(quick, 1)
    chosen = sender.fetch_due_webhooks()
    assert quick.pk in {one.subscription for one in chosen}
    assert Counter(one.is_slow for one in chosen) == {True: MAX_OF_SLOW, False: 1}
    assert [one.is_slow for one in sender.fetch_due_webhooks(only_idle_projects=True)] == [False]


def test_lookups_of_eight_projects_that_hang_leave_places_to_others(monkeypatch: Any) -> None:
    lookups = webhook.LookupPlaces(64, 8)
    for number in range(16):
        while lookups.take(f"p{number}", 0):
            pass
    assert lookups.take("other", 0)
