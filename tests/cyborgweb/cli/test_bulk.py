"""Test device actions on many devices: one job, with preview, confirmation, progress, results and retry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AdmissionRule, AttachHandle, Attachment, Bulk, Device, DeviceProfile
from accelerators.models.attachments import AttachmentState
from accelerators.workflows import attachment_orders, bulk_actions
from tests.accelerators.api.own.conftest import Fill, fill
from tests.accelerators.api.own.test_bulk_targets import attach_all, list_states
from tests.cyborgweb.cli.conftest import Cyborg, assert_refused
from tests.cyborgweb.cli.terminal import Terminal
from tests.support.background import running_beside
from tests.support.clocks import replace_sleep
from tests.support.reports import create_heard_host
from tests.support.requests import NOVA

__all__ = ["fill"]
pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def run_job() -> Iterator[None]:
    """Run the jobs of bulk actions and of attachments in a thread: what is being detached is detached."""

    def work(over: Event) -> None:
        while not over.wait(0.05):
            bulk_actions.process_next_slice()
            for row in Attachment.objects.filter(state="detaching"):
                with conductor.writing():
                    attachment_orders.advance_attachment(row, AttachmentState.DETACHED, "detached", "")
        connection.close()

    with running_beside(work):
        yield


@pytest.mark.slow
def test_150_devices_are_one_job_that_is_followed_to_its_end(cyborg: Cyborg, sent: list[str]) -> None:
    create_heard_host("cmp1", 75)
    create_heard_host("cmp2", 75)
    with run_job():
        done = cyborg("device-ready", "--filter", "state=inactive", "--yes", "--reason", "burnt in", "-f", "json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 150 and {(row["outcome"], row["state"]) for row in rows} == {("done", "ready")}
    assert "of 150 devices" in done.stderr
    assert Device.objects.filter(state="ready", state_reason="burnt in").count() == 150
    assert [one for one in sent if one.startswith("POST")] == ["POST bulk_actions/"] * 2
    assert [one for one in sent if one.startswith("GET devices/")] == ["GET devices/"], "one list, and none for each"


def test_a_dry_run_prints_the_forecast_and_changes_nothing(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 3)
    shown = cyborg("device-ready", "--filter", "host=cmp1", "--filter", "state=inactive", "--dry-run", "-f", "csv")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[1].startswith("3,will be done,no,")
    assert "This applies enable to 3 devices on 1 host; 0 held devices would be changed." in shown.stderr
    assert Device.objects.filter(state="inactive").count() == 3


@pytest.mark.slow
def test_devices_of_several_hosts_need_the_typed_number(cyborg: Cyborg, terminal: Terminal) -> None:
    create_heard_host("cmp1", 1)
    create_heard_host("cmp2", 1)
    words = ("device-quarantine", "cmp1/0000:00:00.0", "cmp2/0000:00:00.0")
    assert_refused(cyborg(*words), 2, "give --yes")
    assert not Device.objects.filter(state="quarantined").exists()
    with terminal(*words) as program:
        program.expect("will be done")
        program.expect("This applies quarantine to 2 devices on 2 hosts")
        program.expect("type the number 2: ")
        program.type("2\n")
        assert program.end() == 0, program.text
    assert Device.objects.filter(state="quarantined").count() == 2


@pytest.mark.slow
def test_a_single_held_device_is_changed_only_after_a_confirmation(cyborg: Cyborg, terminal: Terminal) -> None:
    create_heard_host("cmp1", 1)
    handle, instance = AttachHandle.objects.all()[0], "aaaaaaaa-0000-4000-8000-000000000000"
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="one", groups=[])
        binding = {"deployable": handle.deployable, "attach_handle": handle, "instance_uuid": instance}
        AcceleratorRequest.objects.create(project_id="p1", profile=profile, group={}, state="Bound", **binding)
        Device.objects.update(state="ready")
    words = ("device-quarantine", "cmp1/0000:00:00.0")
    shown = cyborg(*words, "--dry-run", "-f", "csv")
    assert shown.stdout.splitlines()[1].startswith("1,will be done,yes,")
    assert_refused(cyborg(*words), 2, "give --yes")
    many = ("device-quarantine", "--filter", "host=cmp1")
    assert cyborg(*many, "--dry-run", "-f", "csv").exit_code == 0
    assert_refused(cyborg(*many), 2, "give --yes")
    assert not Bulk.objects.exists(), "none of these leaves a draft"
    with terminal(*words) as program:
        program.expect("will be done: becomes quarantined (held)")
        program.expect("Requests hold cmp1/0000:00:00.0: apply quarantine to it?")
        program.expect("type 1, the number of devices: ")
        program.type("no\n")
        assert program.end() == 1, program.text
    assert Device.objects.get().state == "ready"
    assert cyborg(*words, "--yes").exit_code == 0
    assert Device.objects.get().state == "quarantined"


@pytest.mark.slow
def test_retry_failed_repeats_the_action_for_the_refused_devices(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 2)
    with conductor.writing():
        Device.objects.filter(address="0000:00:00.0").update(state="ready")
    assert cyborg("device-retire", "--filter", "host=cmp1", "--yes").exit_code == 6
    bulk = Bulk.objects.get()
    assert cyborg("bulk-show", str(bulk.uuid), "--wait").exit_code == 6
    (failed,) = json.loads(cyborg("bulk-show", str(bulk.uuid), "-f", "json").stdout)["failed"]
    device = Device.objects.get(address="0000:00:00.0")
    assert (failed["target"], failed["outcome"], failed["host"]) == (str(device.uuid), "refused", "cmp1")
    assert "code" not in failed and failed["reason"] == "conflict"
    shown = cyborg("bulk-show", str(bulk.uuid))
    assert shown.stdout.splitlines()[-1].split()[:2] == [str(device.uuid), "refused"] and not shown.stderr
    assert shown.stdout.splitlines()[-2].split() == ["uuid", "outcome", "state", "host", "device", "text"]
    assert cyborg("device-maintain", "cmp1/0000:00:00.0").exit_code == 0
    assert_refused(cyborg("device-ready", "--retry-failed", str(bulk.uuid)), 2, "has the action retire, not enable")
    again = cyborg("device-retire", "--retry-failed", str(bulk.uuid), "--yes", "-f", "json")
    assert again.exit_code == 0, again.output
    assert [row["state"] for row in json.loads(again.stdout)] == ["retired"]
    assert Device.objects.filter(state="retired").count() == 2


def test_no_wait_names_the_command_that_follows_the_job_which_can_be_shown_and_cancelled(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 120)
    left = cyborg("device-quarantine", "--filter", "host=cmp1", "--no-wait")
    bulk = Bulk.objects.get()
    assert (left.exit_code, left.stdout) == (0, "")
    assert left.stderr == f"To follow: cyborg bulk-show {bulk.uuid} --wait\n"
    (row,) = json.loads(cyborg("bulk-show", "-f", "json").stdout)
    assert (row["state"], row["counts"]["waiting"] > 0) == ("running", True)
    assert json.loads(cyborg("bulk-cancel", str(bulk.uuid), "-f", "json").stdout)["state"] == "cancelled"
    assert cyborg("bulk-show", str(bulk.uuid), "--wait").exit_code == 1


def test_a_bulk_action_that_is_cancelled_while_it_is_followed_is_not_done(
    cyborg: Cyborg, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_heard_host("cmp1", 120)
    replace_sleep(monkeypatch, lambda seconds: bulk_actions.cancel_bulk(Bulk.objects.get(), NOVA))
    left = cyborg("device-quarantine", "--filter", "host=cmp1", "-f", "json")
    assert left.exit_code == 1
    assert {(row["outcome"], row["text"]) for row in json.loads(left.stdout)} == {
        ("waiting", "It was not changed: the bulk action was cancelled.")
    }


def test_bulk_show_shows_as_many_refused_devices_as_the_limit_says_and_tells_of_the_others(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 3)
    with conductor.writing():
        Device.objects.update(state="ready")
    assert cyborg("device-retire", "--filter", "host=cmp1", "--yes").exit_code == 1
    bulk = Bulk.objects.get()
    for words in ((), ("--wait",)):
        shown = cyborg("bulk-show", str(bulk.uuid), *words, "--limit", "2", "-f", "json")
        assert (shown.exit_code, len(json.loads(shown.stdout)["failed"])) == (1 if words else 0, 2)
        assert "Only the first 2 devices that were refused or have failed are shown. A larger --limit" in shown.stderr
        assert shown.stderr.endswith(f"/api/bulk_results/?bulk_action={bulk.uuid}&failed=true\n")
        shown = cyborg("bulk-show", str(bulk.uuid), *words, "--limit", "3", "-f", "json")
        assert (len(json.loads(shown.stdout)["failed"]), "Only the first" in shown.stderr) == (3, False)
    assert cyborg("device-retire", "--filter", "host=cmp1", "--yes").exit_code == 1
    assert len(json.loads(cyborg("bulk-show", "--limit", "1", "--json").stdout)) == 1


def test_an_interruption_names_the_bulk_action_that_goes_on(cyborg: Cyborg, monkeypatch: pytest.MonkeyPatch) -> None:
    create_heard_host("cmp1", 120)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    replace_sleep(monkeypatch, interrupt)
    left = cyborg("device-quarantine", "--filter", "host=cmp1")
    assert_refused(left, 130, "the ordered work goes on", f"cyborg bulk-show {Bulk.objects.get().uuid} --wait")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "Select devices in one way"),
        (("3f1c", "--filter", "host=cmp1"), "Select devices in one way"),
        (("--filter", "host"), "write NAME=VALUE"),
    ],
)
def test_wrong_selections_are_wrong_usage(cyborg: Cyborg, words: tuple[str, ...], says: str) -> None:
    assert_refused(cyborg("device-ready", *words), 2, says)


def test_an_unknown_filter_is_refused(cyborg: Cyborg) -> None:
    assert_refused(cyborg("device-ready", "--filter", "colour=red"), 1, "colour: unknown filter")


def test_a_short_uuid_and_an_address_cost_one_request_of_few_rows(cyborg: Cyborg, sent: list[str]) -> None:
    create_heard_host("cmp1", 30)
    uuid = str(Device.objects.get(address="0000:01:00.0").uuid)
    for name in (uuid[:13], "cmp1/0000:01:00.0"):
        sent.clear()
        assert json.loads(cyborg("device-show", name, "-f", "json").stdout)["uuid"] == uuid
        assert sent == ["GET devices/", f"GET devices/{uuid}/"]


def test_admission_rules_are_applied_after_a_preview_to_the_devices_that_they_move_or_to_chosen_ones(
    cyborg: Cyborg,
) -> None:
    for name in ("cmp1", "cmp2", "other"):
        create_heard_host(name, 2)
    with conductor.writing():
        Device.objects.update(state="inactive")
    assert_refused(cyborg("device-admit", "--dry-run"), 1, "No admission rule would move an inactive device. [invalid]")
    with conductor.writing():
        AdmissionRule.objects.create(name="all", action="ready", host="cmp*")
    shown = cyborg("device-admit", "--dry-run", "--format", "csv")
    assert shown.stdout.splitlines()[1] == "4,will be done,no,becomes ready by rule all"
    assert len(shown.stdout.splitlines()) == 2
    assert Device.objects.filter(state="inactive").count() == 6
    assert cyborg("device-admit", "--filter", "host=cmp1").exit_code == 0
    assert Device.objects.filter(host__name="cmp1", state_by="rule all").count() == 2
    one = Device.objects.filter(host__name="cmp2").first()
    assert cyborg("device-admit", str(one.uuid), "--reason", "hall 3").exit_code == 0
    assert Device.objects.get(pk=one.pk).state_reason.endswith(": hall 3")
    admitted = cyborg("device-admit", "--yes", "-f", "json")
    assert [row["host"] for row in json.loads(admitted.stdout)] == ["cmp2"]
    assert set(Device.objects.filter(host__name__startswith="cmp").values_list("state", flat=True)) == {"ready"}
    assert set(Device.objects.filter(host__name="other").values_list("state", flat=True)) == {"inactive"}


@pytest.mark.slow
def test_attachments_are_detached_by_one_job_that_is_followed_until_the_last_is_detached(
    cyborg: Cyborg, fill: Fill, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_actions, "BULK_SLICE_SIZE", 5)
    fill(20)
    rows = attach_all()
    shown = cyborg("attachment-detach", "--filter", "state=attached", "--dry-run", "-f", "csv")
    assert shown.stdout.splitlines() == ["attachments,outcome,held,text", f"{len(rows)},will be done,yes,is detached"]
    reach = f"This applies detach to {len(rows)} attachments on 2 hosts, of {len(rows)} instances"
    assert f"{reach}; {len(rows)} held units would be given back." in shown.stderr
    assert set(list_states()) == {"attached"}
    sent.clear()
    with run_job():
        done = cyborg("attachment-detach", "--filter", "state=attached", "--yes", "--reason", "ended", "-f", "json")
    assert done.exit_code == 0, done.output
    told = [(row["target"], row["outcome"], row["state"]) for row in json.loads(done.stdout)]
    assert told == [(str(row.uuid), "done", "detached") for row in rows]
    assert [one for one in sent if one.startswith("POST")] == ["POST bulk_actions/"] * 2
    assert {one for one in sent if one.startswith("GET attachments/")} == {"GET attachments/"}, "none for each"
    assert f"of {len(rows)} attachments" in done.stderr
    bulk = Bulk.objects.get(action="detach", state="done")
    assert bulk.reason == "ended"
    listed = cyborg("bulk-show", "-f", "csv", "-c", "uuid,action,target,total").stdout.splitlines()
    assert f"{bulk.uuid},detach,attachment,{len(rows)}" in listed
    with conductor.writing():
        Attachment.objects.filter(pk=rows[0].pk).update(state="detaching")
    with run_job():
        shown = cyborg("bulk-show", str(bulk.uuid), "--wait", "-f", "json")
    assert (shown.exit_code, json.loads(shown.stdout)["target"]) == (0, "attachment")
    assert set(list_states()) == {"detached"}, "it was waited for"


@pytest.mark.slow
def test_named_attachments_are_detached_after_their_number_was_typed_and_the_refused_one_is_retried(
    cyborg: Cyborg, fill: Fill, terminal: Terminal
) -> None:
    fill(10)
    first, second, *_ = attach_all()
    words = ("attachment-detach", str(first.uuid), str(second.uuid), "--no-wait")
    assert_refused(cyborg(*words), 2, "give --yes")
    with terminal(*words) as program:
        program.expect("will be done")
        program.expect("Unplug the accelerators from the guest first.")
        program.expect("type the number 2: ")
        with conductor.writing():
            Attachment.objects.filter(pk=first.pk).update(requests=[])
        program.type("2\n")
        assert program.end() == 6, program.text
    assert list_states()[:2] == ["attached", "detaching"]
    bulk = Bulk.objects.get(action="detach", state="done")
    assert_refused(cyborg("device-ready", "--retry-failed", str(bulk.uuid)), 2, "has the action detach, not enable")
    again = cyborg("attachment-detach", "--retry-failed", str(bulk.uuid), "--yes", "--no-wait", "-f", "json")
    assert [(row["target"], row["state"]) for row in json.loads(again.stdout)] == [(str(first.uuid), "detaching")]


def test_wrong_names_of_attachments_are_wrong_usage(cyborg: Cyborg) -> None:
    assert_refused(cyborg("attachment-detach"), 2, "Select attachments in one way")
    assert_refused(cyborg("attachment-detach", "3f1c", "77ab"), 2, "'3f1c' is not a uuid")


def test_all_attachments_of_an_instance_are_detached_by_one_job_which_is_always_confirmed(
    cyborg: Cyborg, fill: Fill, sent: list[str]
) -> None:
    fill(10)
    rows = attach_all()[:2]
    with conductor.writing():
        Attachment.objects.filter(pk__in=[row.pk for row in rows]).update(instance=rows[0].instance, requests=[])
    words = ("detach-instance", str(rows[0].instance), "--no-wait")
    assert_refused(cyborg(*words), 2, "give --attachment UUID, or --all")
    assert_refused(cyborg(*words, "--all"), 2, "give --yes")
    sent.clear()
    assert cyborg(*words, "--all", "--yes").exit_code == 0
    assert [one for one in sent if one.startswith("POST")] == ["POST bulk_actions/"] * 2
    assert list_states()[:3] == ["detaching", "detaching", "attached"]


@pytest.mark.slow
def test_many_accelerators_are_labelled_by_one_job_and_the_refused_one_is_retried(
    cyborg: Cyborg, fill: Fill, terminal: Terminal, sent: list[str]
) -> None:
    fill(20)
    first, *others = AcceleratorRequest.objects.order_by("id")
    words = ("accelerator-label", "--filter", "all=true", "--label", "training")
    with terminal(*words) as program:
        program.expect(
            f"This applies label to {len(others) + 1} accelerators on 2 hosts, of {len(others) + 1} instances."
        )
        program.expect(f"type the number {len(others) + 1}: ")
        with conductor.writing():
            AcceleratorRequest.objects.filter(pk=first.pk).update(label="theirs")
        program.type(f"{len(others) + 1}\n")
        assert program.end() == 6, program.text
    assert {*AcceleratorRequest.objects.values_list("label", flat=True)} == {"theirs", "training"}
    bulk = Bulk.objects.get(action="label", state="done")
    again = cyborg("accelerator-label", "--retry-failed", str(bulk.uuid), "-f", "json")
    assert [(row["target"], row["outcome"]) for row in json.loads(again.stdout)] == [(str(first.uuid), "done")]
    assert [one for one in sent if one.startswith("POST")] == [f"POST bulk_actions/{bulk.uuid}/retry/"] * 2
    assert {*AcceleratorRequest.objects.values_list("label", flat=True)} == {"training"}
