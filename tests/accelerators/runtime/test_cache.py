"""Test the cache and the notification hub.

A hit costs no statement, concurrent misses share one load, and a change by another process is seen, even if its
notification is lost.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.models import DeviceProfile
from accelerators.requests import binding, profiles
from accelerators.runtime import generations, pubsub
from accelerators.runtime.cache import GenerationCache
from tests.support.webserver import until

pytestmark = pytest.mark.django_db(transaction=True)

ADMIN = Caller("root", "", frozenset({"admin"}), "p1")
EDIT_IN_OTHER_PROCESS = """
import sys, django
django.setup()
from django.db import connection
connection.settings_dict["NAME"] = sys.argv[1]
from accelerators.requests import profiles
from accelerators.domain.caller import Caller
from accelerators.models import DeviceProfile
uuid = DeviceProfile.objects.get(name="p").uuid
caller = Caller("other process", "", frozenset({"admin"}), "p1")
profiles.edit_profile(uuid, {"groups": [{"resources:FPGA": "2"}]}, caller)
"""


@pytest.fixture(autouse=True)
def _listener_has_cleared_the_caches() -> None:
    """Wait until this process's listener is connected and has emptied the caches, as it does after each connect.

    It empties them before it receives its first notification. So later cache entries of a test are dropped only by a
    real notification. The fence is sent under another process's id, because a process ignores its own notifications.
    """
    received = threading.Event()
    fence = f"fence-{uuid4()}"
    pubsub.subscribe(fence, lambda detail: received.set() if detail == "reached" else None)
    pubsub.start_listener()

    def is_reached() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [pubsub.CHANNEL, f"0 {fence} reached"])
        return received.wait(0.05)

    until(is_reached)


def get_profile_groups(name: str = "p") -> list[dict[str, str]]:
    found = profiles.get_profile_by_name(name)
    assert found is not None
    return list(found.groups)


def test_a_cache_hit_costs_no_statement_and_absence_is_not_cached(django_assert_num_queries: Any) -> None:
    assert profiles.get_profile_by_name("p") is None
    uuid = profiles.create_profile("p", [{"resources:FPGA": "1"}], None, None, ADMIN)
    with django_assert_num_queries(2):
        get_profile_groups()
    with django_assert_num_queries(0):
        assert get_profile_groups() == [{"resources:FPGA": "1"}]
    profiles.delete_profile(uuid, ADMIN)
    assert profiles.get_profile_by_name("p") is None, "the process that deleted it forgets it at once"


@pytest.mark.parametrize("change", [{"name": "other"}, {"groups": [{"resources:FPGA": "1"}] * 2}])
def test_requests_are_not_created_from_a_cached_profile_that_another_process_has_changed(
    change: dict[str, Any],
) -> None:
    profiles.create_profile("p", [{"resources:FPGA": "1"}], None, None, ADMIN)
    get_profile_groups()
    with conductor.writing():
        DeviceProfile.objects.update(updated_at=datetime.now(UTC), **change)
    if "name" in change:
        with pytest.raises(RefusedError, match="not found with name=p"):
            binding.create_requests("p", ADMIN)
    else:
        assert len(binding.create_requests("p", ADMIN)) == 2, "one for each group that the profile has now"


@pytest.mark.system
def test_a_change_by_another_process_empties_the_cache_by_notification(
    django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        profiles._profiles_by_name, "_ttl_s", float("inf")
    )  # so that an entry's age never causes a new look-up
    profiles.create_profile("p", [{"resources:FPGA": "1"}], None, None, ADMIN)
    heard: list[str | None] = []
    pubsub.subscribe("profiles", heard.append)
    assert get_profile_groups() == [{"resources:FPGA": "1"}]
    with conductor.writing():
        DeviceProfile.objects.update(groups=[{"resources:FPGA": "7"}])  # without a notification
    with django_assert_num_queries(0):
        assert get_profile_groups() == [{"resources:FPGA": "1"}], "nothing but a notification empties the cache"
    assert heard == []
    name = str(connection.settings_dict["NAME"])
    subprocess.run([sys.executable, "-c", EDIT_IN_OTHER_PROCESS, name], check=True, timeout=60)
    until(lambda: heard, 10)
    assert heard == [""], "one notification, and no reconnection that empties the cache as well"
    until(lambda: get_profile_groups() == [{"resources:FPGA": "2"}], 10)


def test_a_cache_that_hears_nothing_sees_a_change_when_its_entry_expires() -> None:
    profiles.create_profile("p", [{"resources:FPGA": "1"}], None, None, ADMIN)
    loads: list[str] = []
    now = [1000.0]

    def load(name: str) -> object:
        loads.append(name)
        return DeviceProfile.objects.get(name=name).groups

    cache = GenerationCache("profiles", load, ttl_s=15.0, clock=lambda: now[0])
    assert cache.get("p") == [{"resources:FPGA": "1"}]
    now[0] += 15.0
    assert cache.get("p") == [{"resources:FPGA": "1"}]
    assert loads == ["p"], "an entry whose generation stands is not loaded again"
    with conductor.writing():
        DeviceProfile.objects.update(groups=[{"resources:FPGA": "3"}])  # without a notification
    now[0] += 14.9
    assert cache.get("p") == [{"resources:FPGA": "1"}]
    assert loads == ["p"], "an entry that has not expired is not compared with the database"
    now[0] += 0.1
    assert cache.get("p") == [{"resources:FPGA": "3"}]
    assert loads == ["p", "p"]


def test_concurrent_misses_of_one_key_share_one_load() -> None:
    asked, go = [], threading.Event()

    def load(key: str) -> str:
        asked.append(key)
        go.wait(10)
        return key.upper()

    cache = GenerationCache("profiles", load)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(_call_and_close_connection, cache.get, "k") for _ in range(8)]
        until(lambda: asked)
        go.set()
        assert [answer.result(10) for answer in answers] == ["K"] * 8
    assert asked == ["k"]


def test_a_value_loaded_before_a_drop_is_not_cached() -> None:
    started, go = threading.Event(), threading.Event()
    values = iter(["old", "new"])

    def load(_: str) -> str:
        value = next(values)
        if value == "old":
            started.set()
            go.wait(10)
        return value

    cache = GenerationCache("profiles", load)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(_call_and_close_connection, cache.get, "k")
        assert started.wait(10)
        cache.drop_all()
        go.set()
        assert first.result(10) == "old"
    assert cache.get("k") == "new"


def test_a_failed_load_raises_and_is_tried_again_at_the_next_get() -> None:
    values = iter([ValueError("no"), "yes"])

    def load(_: str) -> str:
        value = next(values)
        if isinstance(value, Exception):
            raise value
        return value

    cache = GenerationCache("profiles", load)
    with pytest.raises(ValueError, match="no"):
        cache.get("k")
    assert cache.get("k") == "yes"


def test_a_full_cache_drops_its_oldest_entry(django_assert_num_queries: Any) -> None:
    cache = GenerationCache("profiles", str.upper, size=2)
    for key in ("a", "b", "c"):
        cache.get(key)
    with django_assert_num_queries(0):
        cache.get("b"), cache.get("c")
    with django_assert_num_queries(1):
        cache.get("a")


@pytest.mark.slow
def test_a_reconnected_listener_tells_subscribers_to_drop_all_entries() -> None:
    heard: list[str | None] = []
    pubsub.subscribe("devices", heard.append)
    pubsub.start_listener()
    pids = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"

    def listeners() -> list[int]:
        with connection.cursor() as cursor:
            cursor.execute(pids)
            return [pid for (pid,) in cursor.fetchall()]

    (before,) = until(listeners)
    heard.clear()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [before])
    until(lambda: heard == [None])
    pubsub.publish("devices", "x")
    until(lambda: heard[-1] == "x")


def test_a_committed_write_increases_the_generation_of_its_topic_only() -> None:
    before = generations.current_generation("profiles"), generations.current_generation("requests")
    profiles.create_profile("p", [{"resources:FPGA": "1"}], None, None, ADMIN)
    assert generations.current_generation("profiles") > before[0]
    assert generations.current_generation("requests") == before[1]


def _call_and_close_connection(function: Any, *arguments: object) -> object:
    try:
        return function(*arguments)
    finally:
        connection.close()


def test_a_notification_of_somebody_else_on_the_channel_does_not_stop_the_listener() -> None:
    received = threading.Event()
    topic = f"topic-{uuid4()}"
    pubsub.subscribe(topic, lambda detail: received.set() if detail == "after" else None)
    with connection.cursor() as cursor:
        for payload in ("", "junk", "one two", f"0 {topic} after"):
            cursor.execute("SELECT pg_notify(%s, %s)", [pubsub.CHANNEL, payload])
    assert received.wait(5)


@pytest.mark.slow
def test_a_subscriber_that_raises_does_not_end_the_listener() -> None:
    received = threading.Event()
    topic = f"topic-{uuid4()}"

    def receive(detail: str | None) -> None:
        if detail == "bad":
            raise ValueError("the subscriber cannot read this")
        if detail == "good":
            received.set()

    def is_received() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [pubsub.CHANNEL, f"0 {topic} good"])
        return received.wait(0.05)

    pubsub.subscribe(topic, receive)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [pubsub.CHANNEL, f"0 {topic} bad"])
    until(is_received)
