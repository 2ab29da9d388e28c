"""The guard that stands around every test: product code that changes something says so by an event (X6)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain.states import EventSource
from accelerators.models import Command, Event, Host
from accelerators.workflows import sweep
from tests.support.audit import COLUMNS, EXEMPT, Unrecorded
from tests.support.reports import a_host
from tests.support.writeguard import ForbiddenWrite, expect_violation, violations

pytestmark = pytest.mark.django_db

TOLD = "conductor.record_event('host.changed', Source.SYSTEM, 'test', host=Host.objects.first())"


def product(*lines: str) -> Callable[[], None]:
    """A function of the product that does this while it writes."""
    body = "".join(f"        {line}\n" for line in lines)
    known = {"__name__": "accelerators.forgetful", "conductor": conductor, "Host": Host, "Source": EventSource}
    exec(f"def change():\n    with conductor.writing():\n{body}", known)
    return known["change"]  # type: ignore[return-value]


def test_what_is_changed_without_an_event_fails_and_is_not_kept() -> None:
    a_host()
    with expect_violation(Unrecorded, match="accelerators_host"):
        product("Host.objects.update(node='elsewhere')")()
    assert Host.objects.get().node == "cmp1"
    with expect_violation(Unrecorded):
        product("Host.objects.update(node='elsewhere', reported_at=None)")()
    with expect_violation(Unrecorded):
        product("Host.objects.all().delete()")()


def test_an_event_about_another_type_of_thing_does_not_tell_about_a_change() -> None:
    a_host()
    with expect_violation(Unrecorded, match="accelerators_host.*the events are about: token"):
        product("Host.objects.update(node='elsewhere')", TOLD.replace("host.changed", "token.created"))()


def test_an_event_about_one_row_does_not_tell_about_a_change_of_two() -> None:
    a_host()
    a_host("cmp2")
    with expect_violation(Unrecorded, match="2 rows, events about 1"):
        product("Host.objects.update(node='elsewhere')", TOLD)()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("write", "violation"),
    [("Host.objects.update(node='elsewhere')", Unrecorded), ("pass", ForbiddenWrite)],
)
def test_a_server_s_thread_is_guarded_though_it_catches_every_exception(
    write: str, violation: type[AssertionError]
) -> None:
    a_host()
    change = product(write)

    def serve() -> None:
        try:
            change()
            Host.objects.update(node="elsewhere")
        except AssertionError:
            pass  # as a view or a job that turns every exception into an answer
        finally:
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    (found,) = violations
    violations.clear()
    assert isinstance(found, violation)
    assert Host.objects.get().node == "cmp1"


@pytest.mark.parametrize(
    "lines",
    [
        ("Host.objects.update(node='elsewhere')", TOLD),
        (TOLD, "Host.objects.update(node='elsewhere')"),
        ("Host.objects.filter(name='nobody').update(node='elsewhere')",),
        ("Host.objects.update(applied_hash='', updated_at=None)",),
        ("conductor.raise_intents('provider', {'a': {}})",),
    ],
)
def test_what_is_told_changes_nothing_or_needs_no_event_passes(lines: tuple[str, ...]) -> None:
    a_host()
    product(*lines)()


def test_what_needs_no_event_has_a_reason_and_is_there() -> None:
    tables = {model._meta.db_table for model in (*Host._meta.apps.get_models(),)}
    assert {table for _, table in EXEMPT} | COLUMNS.keys() <= tables and all(EXEMPT.values())
    for table, columns in COLUMNS.items():
        (model,) = (one for one in Host._meta.apps.get_models() if one._meta.db_table == table)
        assert {*columns.split()} <= {field.column for field in model._meta.fields}


def test_texts_of_an_event_are_cut_to_what_a_row_takes() -> None:
    with conductor.writing():
        subject, text = (None, "s" * 300), "r" * 5000
        conductor.record_event(
            "host.changed", EventSource.SYSTEM, "a" * 300, host_name="h" * 300, subject=subject, reason=text
        )
    event = Event.objects.get()
    texts = (event.actor, event.host, event.subject_name, event.reason)
    assert [len(text) for text in texts] == [255, 255, 255, 4096]


def test_what_is_forgotten_in_time_is_told() -> None:
    host = a_host()
    with conductor.writing():
        placing.place_commands([placing.CommandOrder("rescan", host=host.id, actor="olga")])
        Command.objects.update(ended_at="2020-01-01T00:00Z", state="succeeded")
    sweep.delete_old_commands()
    assert not Command.objects.exists()
    assert Event.objects.get(action="command.forgotten").changes == {"number": [1, 0]}
