"""Test the guard around every test: product code that changes something must record an event about it (promise X6)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.states import EventSource
from accelerators.models import Command, Event, Host
from accelerators.workflows import retention_sweep
from tests.support.audit import COLUMNS, EXEMPT, UnrecordedChangeError
from tests.support.reports import get_or_create_host
from tests.support.writeguard import ForbiddenWriteError, expect_violation, violations

pytestmark = pytest.mark.django_db

RECORD_HOST_EVENT = "conductor.record_event('host.changed', Source.SYSTEM, 'test', host=Host.objects.first())"


def make_product_function(*lines: str) -> Callable[[], None]:
    """Return a function that counts as product code and runs these lines inside `conductor.writing()`."""
    body = "".join(f"        {line}\n" for line in lines)
    known = {"__name__": "accelerators.forgetful", "conductor": conductor, "Host": Host, "Source": EventSource}
    exec(f"def change():\n    with conductor.writing():\n{body}", known)
    return known["change"]  # type: ignore[return-value]


def test_a_change_without_an_event_is_a_violation_and_is_rolled_back() -> None:
    get_or_create_host()
    with expect_violation(UnrecordedChangeError, match="accelerators_host"):
        make_product_function("Host.objects.update(node='elsewhere')")()
    assert Host.objects.get().node == "cmp1"
    with expect_violation(UnrecordedChangeError):
        make_product_function("Host.objects.update(node='elsewhere', reported_at=None)")()
    with expect_violation(UnrecordedChangeError):
        make_product_function("Host.objects.all().delete()")()


def test_an_event_about_another_type_of_subject_does_not_cover_a_change() -> None:
    get_or_create_host()
    with expect_violation(UnrecordedChangeError, match="accelerators_host.*the events are about: token"):
        make_product_function(
            "Host.objects.update(node='elsewhere')", RECORD_HOST_EVENT.replace("host.changed", "token.created")
        )()


def test_one_event_does_not_cover_a_change_of_two_rows() -> None:
    get_or_create_host()
    get_or_create_host("cmp2")
    with expect_violation(UnrecordedChangeError, match="2 rows, events about 1"):
        make_product_function("Host.objects.update(stale_since=None)", RECORD_HOST_EVENT)()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("write", "violation"),
    [("Host.objects.update(node='elsewhere')", UnrecordedChangeError), ("pass", ForbiddenWriteError)],
)
def test_a_violation_in_a_server_thread_is_recorded_even_if_the_thread_catches_it(
    write: str, violation: type[AssertionError]
) -> None:
    get_or_create_host()
    change = make_product_function(write)

    def serve() -> None:
        try:
            change()
            Host.objects.update(node="elsewhere")
        except AssertionError:
            pass  # like a view or a job that answers every exception
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
        ("Host.objects.update(node='elsewhere')", RECORD_HOST_EVENT),
        (RECORD_HOST_EVENT, "Host.objects.update(node='elsewhere')"),
        ("Host.objects.filter(name='nobody').update(node='elsewhere')",),
        ("Host.objects.update(applied_hash='', updated_at=None)",),
        ("conductor.raise_intents('provider', {'a': {}})",),
    ],
)
def test_recorded_changes_empty_changes_and_exempt_columns_pass(lines: tuple[str, ...]) -> None:
    get_or_create_host()
    make_product_function(*lines)()


def test_exempt_tables_and_columns_exist_and_have_a_reason() -> None:
    tables = {model._meta.db_table for model in (*Host._meta.apps.get_models(),)}
    assert {table for _, table in EXEMPT} | COLUMNS.keys() <= tables and all(EXEMPT.values())
    for table, columns in COLUMNS.items():
        (model,) = (one for one in Host._meta.apps.get_models() if one._meta.db_table == table)
        assert {*columns.split()} <= {field.column for field in model._meta.fields}


def test_texts_of_an_event_are_cut_to_their_column_lengths() -> None:
    with conductor.writing():
        subject, text = (None, "s" * 300), "r" * 5000
        conductor.record_event(
            "host.changed", EventSource.SYSTEM, "a" * 300, host_name="h" * 300, subject=subject, reason=text
        )
    event = Event.objects.get()
    texts = (event.actor, event.host, event.subject_name, event.reason)
    assert [len(text) for text in texts] == [255, 255, 255, 4096]


def test_deleting_old_commands_is_recorded_as_an_event() -> None:
    host = get_or_create_host()
    with conductor.writing():
        command_queue.place_commands([command_queue.CommandOrder("rescan", host=host.id, actor="olga")])
        Command.objects.update(ended_at="2020-01-01T00:00Z", state="succeeded")
    retention_sweep.delete_old_commands()
    assert not Command.objects.exists()
    assert Event.objects.get(action="command.forgotten").changes == {"number": [1, 0]}
