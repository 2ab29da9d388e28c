"""Test that replaying all events from the first one on gives the stored state, whatever was done (promise X6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import transaction
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from accelerators import conductor
from accelerators.audit.replay import ReplayEvent, replay_events
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.devices import admission_rules, lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DrainTarget, EventSource
from accelerators.images import download, store
from accelerators.models import (
    AcceleratorRequest,
    AdmissionRule,
    Attachment,
    Command,
    Deployable,
    Device,
    DeviceProfile,
    Host,
    Image,
)
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.requests import binding, profiles
from accelerators.requests.binding import BindSpec
from accelerators.workflows import attachment_orders, bulk_actions, bulk_admission, command_endings, retention_sweep
from accelerators.workflows.attachment_orders import NovaInstance
from drivers.inventory import Device as Card
from placement_sync.jobs import attachments as attaching
from placement_sync.jobs import providers as placement_tasks
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.attaching import FakeCloud, configured_cloud, make_intents_due
from tests.support.long import few_or_many
from tests.support.replayed import read_tables, replay_all_events
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
IMAGE = {"id": str(uuid4()), "size": 1, "sha256": "a" * 64}
HANDLES_PER_CARD = st.integers(0, 3)
"""The number of handles with which a card is reported; 0 means that the card is not reported."""


def upload_image(content: bytes) -> UUID:
    """Store an image as an upload does; return its uuid."""
    return store.store_upload([content], len(content), "an image", {}, NOVA, EventSource.API).uuid


def run_attachments() -> None:
    """Run the jobs of providers and attachments until they are idle; waiting intents become due at once."""
    for _ in range(30):
        make_intents_due()
        while placement_tasks.step():
            pass
        if not attaching.step():
            return


@pytest.fixture
def cloud(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """Run the fakes of Placement and Nova.

    Images are in a directory of the test's own, with room for two copies of Glance's images.
    """
    monkeypatch.setattr(store, "get_image_directory", lambda: tmp_path)
    monkeypatch.setattr(store, "MAX_COPIES", 2)
    with download.IMAGE_SERVICE.replaced("glance", None), configured_cloud(settings) as one:
        yield one


class EventReplayMachine(RuleBasedStateMachine):
    """Two hosts with two cards each; people, Nova and agents act in random order."""

    cloud: FakeCloud
    """Set by the test before the machine runs."""

    @initialize()
    def begin(self) -> None:
        self.before = transaction.savepoint()
        self.hosts = [get_or_create_host(f"cmp-{uuid4()}") for _ in range(2)]
        self.instances = [str(uuid4()) for _ in self.hosts]
        for host, instance in zip(self.hosts, self.instances, strict=True):
            root = str(uuid4())
            self.cloud.placement.model.providers[root] = ObservedProvider(root, host.name, "", 0)
            self.cloud.boot_instance(instance, host.name, root)
        names = {instance: host.name for host, instance in zip(self.hosts, self.instances, strict=True)}
        # Nova's HTTP would take most of the time; the scenarios below use it.
        self.replaced_lookup = attachment_orders.INSTANCE_LOOKUP.replaced(
            "nova", lambda uuid, _: NovaInstance(uuid, "p1", "ACTIVE", frozenset({names[uuid]}))
        )
        self.replaced_lookup.__enter__()
        self.seq = 0
        for host in self.hosts:
            self.report(host, 2, 2, "ok")
        # Without a ready device and a profile from the start, few examples would reach an attachment.
        for host in self.hosts:
            lifecycle.enable_device(Device.objects.filter(host=host).order_by("id")[0].uuid, NOVA)
        profiles.create_profile(f"p-{uuid4()}", [{"resources:FPGA": "1"}], None, None, NOVA)

    def report(self, host: Host, one: int, two: int, health: str) -> None:
        self.seq += 1
        cards: list[Card] = [
            make_card(bus, size, status=health, acts="reset program", to_install="" if bus == 1 else "bind it")
            for bus, size in ((1, one), (2, two))
            if size
        ]
        apply_report(host, make_driver_report(*cards), seq=self.seq)

    @rule(
        which=st.integers(0, 1),
        one=HANDLES_PER_CARD,
        two=HANDLES_PER_CARD,
        health=st.sampled_from(["ok", "degraded", "failed"]),
    )
    def an_agent_reports(self, which: int, one: int, two: int, health: str) -> None:
        self.report(self.hosts[which], one, two, health)

    @rule(data=st.data(), action=st.sampled_from(Action), then=st.sampled_from(DrainTarget))
    def a_person_decides(self, data: st.DataObject, action: Action, then: DrainTarget) -> None:
        devices = list(Device.objects.order_by("id").values_list("uuid", flat=True))
        if devices:
            lifecycle.apply_action(
                action, data.draw(st.lists(st.sampled_from(devices), min_size=1, unique=True)), NOVA, drain_to=then
            )

    @rule(programs=st.booleans(), label=st.text("abc", max_size=2))
    def a_profile_is_made_or_edited(self, programs: bool, label: str) -> None:
        group = {"resources:FPGA": "1"} | ({"accel:bitstream_id": IMAGE["id"]} if programs else {})
        unused = DeviceProfile.objects.filter(requests__isnull=True).first()
        if unused and label:
            profiles.edit_profile(unused.uuid, {"groups": [group], "description": label}, NOVA)
        elif unused and DeviceProfile.objects.count() > 2:
            profiles.delete_profile(unused.uuid, NOVA)
        else:
            profiles.create_profile(f"p-{uuid4()}", [group], label or None, None, NOVA)

    @rule(enabled=st.booleans(), data=st.data())
    def a_rule_is_made_edited_or_deleted(self, enabled: bool, data: st.DataObject) -> None:
        there = list(AdmissionRule.objects.order_by("id"))
        if len(there) < 2:
            made = {"name": f"r-{uuid4()}", "driver": "test_*", "action": "ready", "enabled": enabled}
            admission_rules.create_rule(made, NOVA)
        elif enabled:
            admission_rules.edit_rule(
                data.draw(st.sampled_from(there)).uuid, {"action": "quarantined", "order": 7}, NOVA
            )
        else:
            admission_rules.delete_rule(there[0].uuid, NOVA)

    @rule()
    def the_rules_are_applied(self) -> None:
        if Device.objects.exists():
            devices = Device.objects.all()
            bulk = bulk_actions.create_draft(bulk_admission.ADMIT, DrainTarget.MAINTENANCE, devices, NOVA)
            bulk_actions.confirm_draft(bulk, "", held_too=False)

    @rule(data=st.data(), project=st.sampled_from(["", "p2"]))
    def a_request_is_made_and_bound(self, data: st.DataObject, project: str) -> None:
        names = list(DeviceProfile.objects.order_by("id").values_list("name", flat=True))
        offers = list(Deployable.objects.filter(rp_uuid__isnull=False).order_by("id"))
        if names and offers:
            profiles.clear_profile_cache()
            uuids = binding.create_requests(data.draw(st.sampled_from(names)), NOVA)
            offer, instance = data.draw(st.sampled_from(offers)), str(uuid4())
            host, rp = offer.device.host.name, str(offer.rp_uuid)
            with suppress(RefusedError):  # a refusal is recorded as BindFailed
                binding.bind_requests([BindSpec(uuid, host, rp, instance, project) for uuid in uuids], NOVA)

    @rule(content=st.sampled_from([b"one", b"two"]))
    def an_image_is_uploaded(self, content: bytes) -> None:
        upload_image(content)

    @rule(again=st.booleans(), size=st.integers(1, 3))
    def an_image_is_copied_from_glance(self, again: bool, size: int) -> None:
        known = Image.objects.filter(source="glance").first() if again else None
        store.add_glance_copy(known.uuid if known else uuid4(), "a copy", size, f"{size}" * 64, {})

    @rule(data=st.data())
    def an_image_is_removed(self, data: st.DataObject) -> None:
        if there := list(Image.objects.order_by("id").values_list("uuid", flat=True)):
            with suppress(RefusedError):  # a command is going to use it
                store.delete_image(data.draw(st.sampled_from(there)), NOVA, EventSource.API)

    @rule(data=st.data(), uploads=st.booleans())
    def a_device_is_programmed_with_an_image(self, data: st.DataObject, uploads: bool) -> None:
        if devices := list(Device.objects.order_by("id").values_list("uuid", flat=True)):
            image = upload_image(b"three") if uploads else UUID(IMAGE["id"])
            with suppress(RefusedError):  # the device is held, busy or missing
                command_queue.order_device_command("program", data.draw(st.sampled_from(devices)), NOVA, image=image)

    @rule()
    def the_image_job_runs(self) -> None:
        download.run()

    @rule(data=st.data(), which=st.integers(0, 1), of_device=st.booleans(), begins=st.booleans())
    def an_attachment_is_asked_for(self, data: st.DataObject, which: int, of_device: bool, begins: bool) -> None:
        """Order an attachment. With `begins` its first step follows at once; few examples would reach it otherwise."""
        names = list(DeviceProfile.objects.order_by("id").values_list("name", flat=True))
        devices = list(Device.objects.filter(host=self.hosts[which]).order_by("id").values_list("uuid", flat=True))
        chosen = {"device": devices} if of_device else {"profile": names}
        for name, choices in chosen.items():
            if choices:
                with suppress(RefusedError):  # no unit is free
                    attachment_orders.order_attachment(
                        UUID(self.instances[which]), NOVA, **{name: data.draw(st.sampled_from(choices))}
                    )
                    if begins:
                        make_intents_due()
                        attaching.step()

    @rule(data=st.data())
    def an_attachment_is_detached(self, data: st.DataObject) -> None:
        if there := list(Attachment.objects.order_by("id").values_list("uuid", flat=True)):
            attachment_orders.order_detachment(data.draw(st.sampled_from(there)), NOVA)

    @rule(to_the_end=st.booleans())
    def attachments_get_on(self, to_the_end: bool) -> None:
        if to_the_end:
            run_attachments()
        else:
            make_intents_due()
            attaching.step()

    @rule(away=st.booleans())
    def placement_goes_away_or_comes_back(self, away: bool) -> None:
        self.cloud.placement.away = away

    @rule(data=st.data(), ends=st.booleans())
    def a_request_is_unbound_or_deleted(self, data: st.DataObject, ends: bool) -> None:
        there = list(AcceleratorRequest.objects.order_by("id").values_list("uuid", flat=True))
        if there:
            (binding.delete_requests if ends else binding.unbind_requests)(
                [str(data.draw(st.sampled_from(there)))], NOVA
            )

    @rule(data=st.data(), outcome=st.sampled_from(["succeeded", "succeeded", "failed", "refused", "unknown"]))
    def an_agent_answers(self, data: st.DataObject, outcome: str) -> None:
        waiting = list(Command.objects.filter(COMMAND_IS_OPEN, answered_at__isnull=True).order_by("id"))
        if waiting:
            command = data.draw(st.sampled_from(waiting))
            if command.state == "preparing":
                command_queue.mark_image_ready(command.id, IMAGE)
            command_queue.store_answers([CommandAnswer(command.host_id, command.id, outcome, "as it is")])
            while command_endings.end_answered_commands():
                pass

    @rule()
    def time_passes(self) -> None:
        with conductor.writing():
            past = datetime.now(UTC) - timedelta(seconds=1)
            Command.objects.filter(COMMAND_IS_OPEN, answered_at__isnull=True).update(start_by=past, end_by=past)
            AcceleratorRequest.objects.filter(state="BindStarted").update(deadline=past)
        while (
            command_endings.end_late_commands() | command_endings.end_answered_commands() | binding.fail_overdue_binds()
        ):
            pass
        retention_sweep.remove_missing_devices(datetime.now(UTC) + timedelta(days=2))

    @rule(which=st.integers(0, 1), silent=st.booleans())
    def an_agent_falls_silent_or_is_heard(self, which: int, silent: bool) -> None:
        conductor.set_hosts_stale_since([self.hosts[which].id], datetime.now(UTC) if silent else None)

    @invariant()
    def events_say_how_everything_stands(self) -> None:
        assert replay_all_events() == read_tables()

    def teardown(self) -> None:
        self.replaced_lookup.__exit__(None, None, None)
        transaction.savepoint_rollback(self.before)
        self.cloud.placement.away = False


@few_or_many(2, 12)
@pytest.mark.django_db
@pytest.mark.slow
def test_X6_replayed_events_equal_the_stored_state(cloud: FakeCloud, examples: int) -> None:
    EventReplayMachine.cloud = cloud
    run_state_machine_as_test(EventReplayMachine, settings=settings(max_examples=examples, stateful_step_count=20))


def assert_replay_shows_state(kind: str, uuid: UUID, *states: str | None) -> None:
    """Check that the replayed events equal the tables, and that the object has one of these states.

    None stands for an object that does not exist, "here" for an object that exists and has no state.
    """
    assert replay_all_events() == read_tables()
    shown = read_tables()[kind].get(str(uuid))
    assert (shown and shown.get("state", "here")) in states


@pytest.mark.django_db
def test_X6_replayed_events_equal_the_stored_images_from_upload_to_removal(cloud: FakeCloud) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1, acts="program")))
    device = Device.objects.get()
    lifecycle.enable_device(device.uuid, NOVA)
    image = upload_image(b"bits")
    assert_replay_shows_state("image", image, "here")
    command = command_queue.order_device_command("program", device.uuid, NOVA, image=image)
    download.run()
    with pytest.raises(RefusedError):
        store.delete_image(image, NOVA, EventSource.API)
    assert_replay_shows_state("image", image, "here")
    command_queue.store_answers([CommandAnswer(command.host_id, command.pk, "succeeded", "as wanted")])
    while command_endings.end_answered_commands():
        pass
    assert Deployable.objects.get().bitstream_id == image
    assert_replay_shows_state("image", image, "here")
    store.delete_image(image, NOVA, EventSource.API)
    assert_replay_shows_state("image", image, None)
    copies = [store.add_glance_copy(uuid4(), "a copy", 5, "5" * 64, {}).uuid for _ in range(3)]
    assert_replay_shows_state("image", copies[0], None)
    store.add_glance_copy(copies[2], "a copy that has changed", 6, "6" * 64, {})
    assert_replay_shows_state("image", copies[2], "here")


@pytest.mark.django_db
@pytest.mark.slow
def test_X6_replayed_events_equal_the_stored_attachments_in_each_state(cloud: FakeCloud) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    lifecycle.enable_device(Device.objects.get().uuid, NOVA)
    profiles.create_profile("one", [{"resources:FPGA": "1"}], None, None, NOVA)
    run_attachments()
    (instance,) = cloud.nova.shown
    first, second = (attachment_orders.order_attachment(UUID(instance), NOVA, profile="one").uuid for _ in range(2))
    assert_replay_shows_state("attachment", first, "asked")
    attaching.step()
    assert_replay_shows_state("attachment", first, "attaching")
    run_attachments()
    assert_replay_shows_state("attachment", first, "attached")
    assert_replay_shows_state("attachment", second, "failed")
    cloud.placement.away = True
    attachment_orders.order_detachment(first, NOVA)
    run_attachments()
    assert_replay_shows_state("attachment", first, "detaching")
    cloud.placement.away = False
    run_attachments()
    assert_replay_shows_state("attachment", first, "detached")
    third = attachment_orders.order_attachment(UUID(instance), NOVA, profile="one").uuid
    attaching.step()
    attachment_orders.order_detachment(third, NOVA)
    assert_replay_shows_state("attachment", third, "undoing")
    run_attachments()
    assert_replay_shows_state("attachment", third, "failed")


def test_replaying_events_continues_from_a_given_state() -> None:
    first = ReplayEvent(
        "device.found", "device", "d", "h", {"state": [None, "inactive"], "deployable x": [None, 2], "odd": [0, 1]}
    )
    then = ReplayEvent("device.ready", "device", "d", "h", {"state": ["inactive", "ready"]})
    state = replay_events([first])
    assert state["device"] == {"d": {"state": "inactive", "deployable x": 2}}
    assert (
        replay_events([then, ReplayEvent("list.exported", "list", "", "", {"rows": [None, 3]})], state)["device"]["d"][
            "state"
        ]
        == "ready"
    )
    assert replay_events([ReplayEvent("device.removed", "device", "d", "h", {})], state)["device"] == {}
