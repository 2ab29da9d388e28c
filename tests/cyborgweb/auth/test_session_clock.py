"""Test that sessions and signed links expire by the database's clock, whatever the clock of the machine says."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db.models.functions import Now
from django.test import Client

from accelerators.runtime import database_clock
from cyborgweb.auth.sessions import SessionStore
from cyborgweb.notify.mail_links import CONFIRM_MAX_AGE_S, LinkAction, build_link, read_token
from tests.support.clocks import shifted_clock

pytestmark = pytest.mark.django_db
DAY_S = 86_400.0


@pytest.fixture
def console(client: Client) -> Client:
    """Return a client that is logged in to the console."""
    client.force_login(User.objects.create_superuser("rita", password="secret"))
    return client


def may_enter(console: Client) -> bool:
    return console.get("/admin/").status_code == 200


def test_a_session_is_valid_on_a_machine_whose_clock_is_ahead(console: Client) -> None:
    with shifted_clock(365 * DAY_S):
        assert may_enter(console)


def test_an_ended_session_is_refused_on_a_machine_whose_clock_is_behind(console: Client) -> None:
    Session.objects.update(expire_date=Now() - timedelta(hours=1))
    with shifted_clock(-DAY_S):
        assert not may_enter(console)


@pytest.mark.parametrize("shift", [13.0, -13.0, DAY_S, -DAY_S])
def test_a_session_that_another_machine_stores_ends_in_time(shift: float) -> None:
    store, keystone_store = SessionStore(), SessionStore()
    with shifted_clock(shift):
        store.save()
        keystone_store.set_expiry(database_clock.now() + timedelta(hours=8))
        keystone_store.save()
        assert keystone_store.get_expiry_age() == pytest.approx(8 * 3600, abs=2)
    for key, seconds in ((store.session_key, django_settings.SESSION_COOKIE_AGE), (keystone_store.session_key, 28_800)):
        left = Session.objects.get(session_key=key).expire_date - database_clock.now()
        assert left.total_seconds() == pytest.approx(seconds, abs=5)


def test_only_ended_sessions_are_cleared_by_a_machine_whose_clock_is_ahead(console: Client) -> None:
    ended = SessionStore()
    ended.save()
    Session.objects.filter(session_key=ended.session_key).update(expire_date=Now() - timedelta(hours=1))
    with shifted_clock(365 * DAY_S):
        SessionStore.clear_expired()
    assert Session.objects.count() == 1 and may_enter(console)


@pytest.mark.parametrize("shift", [-2.0 * CONFIRM_MAX_AGE_S, 2.0 * CONFIRM_MAX_AGE_S])
def test_the_age_of_a_link_in_a_mail_is_that_of_the_databases_clock(
    shift: float, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.KEYS = replace(settings.KEYS, public_url="https://acc.example.org")
    subscription = str(uuid4())
    with shifted_clock(shift):
        link = build_link(LinkAction.CONFIRM, subscription, "rita@example.org")
    token = link.rstrip("/").rpartition("/")[2]
    assert read_token(LinkAction.CONFIRM, token) == (subscription, "rita@example.org")
    with shifted_clock(shift):
        assert read_token(LinkAction.CONFIRM, token) == (subscription, "rita@example.org")
    later = database_clock.timestamp() + CONFIRM_MAX_AGE_S + 60
    monkeypatch.setattr(database_clock, "estimate_timestamp", lambda: later)
    assert read_token(LinkAction.CONFIRM, token) is None, "it is too old"
