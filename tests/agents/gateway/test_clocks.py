"""The clocks of two nodes differ: what one node stores, the other one judges by the database's clock.

`here` has the right clock, the other node is seconds or an hour ahead or behind.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from django.core.signing import BadSignature
from django_q.models import OrmQ

from accelerators import conductor
from accelerators.models import AcceleratorRequest, Device, DeviceProfile, Host
from accelerators.requests import binding
from accelerators.runtime import database_clock
from accelerators.runtime.task_broker import DatabaseClockBroker
from accelerators.workflows.retention_sweep import remove_missing_devices
from agents import authentication, liveness
from agents.gateway import sample_rpc
from agents.gateway.leases import LeaseBuffer, mark_stale_hosts
from agents.models import Agent, JoinToken
from cyborgweb.auth import keystone
from tests.support.clocks import shifted_clock
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.parametrize("shift", [13.0, -13.0, 3600.0, -3600.0])]


@pytest.fixture
def host() -> Host:
    """Return a host with an agent that can write to Placement."""
    host = get_or_create_host()
    Agent.objects.create(host=host, public_key="k" * 43, writes="")
    return host


def renew_lease(host: Host) -> None:
    leases = LeaseBuffer(0.0)
    leases.note_heartbeat(host.id, 1)
    assert leases.flush()


def test_L1_a_host_whose_agent_sends_heartbeats_never_becomes_stale(host: Host, shift: float) -> None:
    with shifted_clock(shift):
        renew_lease(host)
    mark_stale_hosts()
    assert Host.objects.get().stale_since is None, "the gateway of the other node renewed its lease"
    renew_lease(host)
    with shifted_clock(shift):
        mark_stale_hosts()
    assert Host.objects.get().stale_since is None, "the job ran on the other node"


def test_L1_a_silent_host_becomes_stale_on_every_node(host: Host, shift: float) -> None:
    leases = LeaseBuffer(0.0)
    ten_minutes_ago = time.monotonic() - 600.0
    with patch.object(time, "monotonic", lambda: ten_minutes_ago):
        leases.note_heartbeat(host.id, 1)
    with shifted_clock(shift):
        assert leases.flush()
        mark_stale_hosts()
    since = Host.objects.get().stale_since
    assert since is not None and abs(since - datetime.now(UTC)) < timedelta(seconds=10), "by the database's clock"


def test_an_agent_that_may_write_to_placement_counts_as_up_on_every_node(host: Host, shift: float) -> None:
    """If such an agent counted as down, the conductor would write to Placement at the same time."""
    renew_lease(host)
    with shifted_clock(shift):
        status = liveness.get_writer_statuses([host.id])[host.id]
        assert liveness.get_agent_state(Agent.objects.get()) == "up"
        assert Agent.objects.filter(liveness.build_state_condition("up")).exists()
    assert (status.reason, status.has_stopped_writing) == ("", False)


def test_a_task_of_one_node_is_taken_by_another_at_once_and_by_nobody_twice(shift: float) -> None:
    broker = DatabaseClockBroker(list_key="work")
    with shifted_clock(shift):
        broker.enqueue("first")
    ((key, payload),) = broker.dequeue() or [(0, "")]
    assert payload == "first"
    with shifted_clock(shift):
        assert broker.dequeue() is None and (broker.queue_size(), broker.lock_size()) == (0, 1)
        broker.enqueue("second")
        assert [payload for _, payload in broker.dequeue() or []] == ["second"]
    assert broker.dequeue() is None
    broker.acknowledge(key)
    assert OrmQ.objects.count() == 1


def test_gateways_accept_each_others_questions_for_samples(shift: float) -> None:
    signer = sample_rpc._make_signer()
    with shifted_clock(shift):
        database_clock.refresh()
        signed = signer.sign("digest")
    assert signer.unsign(signed, sample_rpc.MAX_SIGNATURE_AGE_S) == "digest"
    signed = signer.sign("digest")
    with shifted_clock(shift):
        database_clock.refresh()
        assert signer.unsign(signed, sample_rpc.MAX_SIGNATURE_AGE_S) == "digest"
    with patch.object(database_clock, "estimate_timestamp", lambda: time.time() - 60):
        old = signer.sign("digest")
    with pytest.raises(BadSignature):
        signer.unsign(old, sample_rpc.MAX_SIGNATURE_AGE_S)


def test_a_token_of_keystone_ends_when_keystone_says(shift: float) -> None:
    """The other machine is Keystone's here: its clock dates the answer and the expiry."""
    keystones_now = datetime.now(UTC) + timedelta(seconds=shift)
    token = {"expires_at": keystones_now + timedelta(minutes=10), "user": {"id": "u", "name": "n"}, "roles": []}
    result = keystone._parse_token(
        msgspec.json.encode({"token": token}), format_datetime(keystones_now.replace(microsecond=0), usegmt=False)
    )
    assert 590 < result.expires_at - time.time() < 605


def test_a_join_token_of_one_node_can_be_used_on_another(host: Host, shift: float) -> None:
    with shifted_clock(shift), conductor.writing():
        authentication.create_join_token("cmp9", address="https://c", hours=1, created_by="olga")
    token = JoinToken.objects.get()
    assert abs(token.expires_at - datetime.now(UTC) - timedelta(hours=1)) < timedelta(seconds=60)


def test_a_missing_device_is_removed_neither_early_nor_late(shift: float, settings: Any) -> None:
    keys = settings.KEYS
    known = {name: getattr(keys, name) for name in keys.__dataclass_fields__}
    settings.KEYS = SimpleNamespace(**known | {"missing_retention_s": 1800})
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1)))
    apply_report(host, make_driver_report(), seq=2)
    with shifted_clock(shift):
        remove_missing_devices()
        assert Device.objects.count() == 1, "it has been missing for a second"
    with conductor.writing():
        Device.objects.update(state_since=datetime.now(UTC) - timedelta(seconds=1810))
    with shifted_clock(shift):
        remove_missing_devices()
    assert not Device.objects.exists()


def test_a_bind_ends_at_its_deadline(shift: float) -> None:
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="p", groups=[{"resources:FPGA": "1"}])
        AcceleratorRequest.objects.create(
            project_id="p",
            profile=profile,
            group={},
            state="BindStarted",
            deadline=datetime.now(UTC) + timedelta(seconds=10),
        )
    with shifted_clock(shift):
        binding.fail_overdue_binds()
    assert AcceleratorRequest.objects.get().state == "BindStarted"
