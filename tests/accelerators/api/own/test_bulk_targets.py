"""Test bulk actions on attachments and accelerators, and an action that this release does not know."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DrainTarget
from accelerators.models import AcceleratorRequest, Attachment, Bulk, Command, Device, Event, Intent
from accelerators.workflows import attachment_orders, bulk_actions
from cyborgweb.auth import policy
from cyborgweb.auth.policy import Policy
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.accelerators.api.own.test_bulk_actions import PATH, get_body, get_free_uuids, get_preview, post, run_job
from tests.accelerators.api.own.test_units import report_many_cards

pytestmark = pytest.mark.django_db(transaction=True)
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")


def attach_all() -> list[Attachment]:
    """Make an attached attachment of each request that exists; return them in the order of the requests."""
    with conductor.writing():
        Attachment.objects.all().delete()
        return [
            Attachment.objects.create(
                instance=request.instance_uuid,
                project_id=request.project_id,
                host=request.hostname,
                profile="small",
                state="attached",
                requests=[request.uuid],
                actor="olga",
            )
            for request in AcceleratorRequest.objects.order_by("id")
        ]


def list_states() -> list[str]:
    return [*Attachment.objects.order_by("id").values_list("state", flat=True)]


def get_outcomes(ask: Ask, bulk: dict[str, Any], by: str = "admin") -> dict[str, tuple[str, str]]:
    """Return outcome and reason of each object of a bulk action, by its uuid."""
    rows = get_results(ask(bulk["results"].removeprefix("http://testserver"), by))
    return {row["target"]: (row["outcome"], row["reason"]) for row in rows}


def get_labels() -> set[str]:
    return {*AcceleratorRequest.objects.values_list("label", flat=True)}


def test_several_attachments_are_detached_after_a_preview_with_hosts_instances_and_units(ask: Ask, fill: Fill) -> None:
    fill(20)
    rows = attach_all()
    order = {"action": "detach", "selector": {"all": True}, "reason": "end of lease"}
    preview = get_preview(post(ask, **order))
    assert (preview["target"], preview["total"], preview["hosts"], preview["held"]) == (
        "attachment",
        len(rows),
        2,
        len(rows),
    )
    assert (preview["instances"], preview["units"]) == (len({row.instance for row in rows}), len(rows))
    shown = preview["devices"][0]
    assert (shown["target"], shown["device"], shown["held"]) == (str(rows[0].uuid), None, True)
    assert set(list_states()) == {"attached"} and not Intent.objects.filter(kind="attachment").exists()
    made = get_body(post(ask, **order, token=preview["token"]))
    run_job()
    assert (made["action"], made["target"]) == ("detach", "attachment")
    assert set(list_states()) == {"detaching"}
    assert Intent.objects.filter(kind="attachment").count() == len(rows)
    assert set(get_outcomes(ask, made).values()) == {("moved", "")}
    events = Event.objects.filter(action="attachment.detaching")
    assert set(events.values_list("actor", "source", "reason")) == {("admin-p1", "api", "end of lease")}


def test_an_attachment_that_changed_since_the_preview_is_refused_and_a_retry_detaches_it(ask: Ask, fill: Fill) -> None:
    fill(10)
    first, second, third = attach_all()[:3]
    order = {"action": "detach", "attachments": [str(row.uuid) for row in (first, second, third)]}
    preview = get_preview(post(ask, **order))
    with conductor.writing():
        Attachment.objects.filter(pk=first.pk).update(requests=[])
    attachment_orders.order_detachment(second.uuid, OLGA)
    made = get_body(post(ask, **order, token=preview["token"]))
    assert (made["state"], made["counts"]) == ("done", {"moved": 1, "unchanged": 1, "refused": 1, "waiting": 0})
    assert get_outcomes(ask, made) == {
        str(first.uuid): ("refused", "in_use"),
        str(second.uuid): ("unchanged", ""),
        str(third.uuid): ("moved", ""),
    }
    assert list_states()[:3] == ["attached", "detaching", "detaching"]
    again = get_body(post(ask, f"{PATH}{made['uuid']}/retry/"))
    assert get_outcomes(ask, again) == {str(first.uuid): ("moved", "")}
    assert list_states()[0] == "detaching"


def test_an_attachment_that_holds_units_is_detached_only_if_the_confirmation_includes_it(fill: Fill) -> None:
    fill(10)
    rows = attach_all()
    draft = bulk_actions.create_draft("detach", DrainTarget.MAINTENANCE, Attachment.objects.all(), OLGA)
    bulk_actions.confirm_draft(draft, "", held_too=False)
    draft.refresh_from_db()
    assert (draft.state, draft.refused, draft.moved) == ("done", len(rows), 0)
    assert set(draft.items.values_list("why", flat=True)) == {"in_use"}
    assert set(list_states()) == {"attached"}


def test_a_dry_run_of_a_detachment_changes_nothing(fill: Fill) -> None:
    fill(10)
    rows = attach_all()
    draft = bulk_actions.create_draft("detach", DrainTarget.MAINTENANCE, Attachment.objects.all(), OLGA)
    bulk_actions.confirm_draft(draft, "", held_too=False, dry_run=True)
    draft.refresh_from_db()
    assert (draft.state, draft.moved) == ("draft", len(rows))
    assert set(list_states()) == {"attached"} and not Intent.objects.filter(kind="attachment").exists()


@pytest.mark.parametrize("action", ["detach", "label"])
def test_L2_a_bulk_action_whose_worker_dies_in_a_slice_is_finished_once(
    fill: Fill, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    fill(20)
    attach_all()
    chosen: Any = Attachment.objects.all() if action == "detach" else AcceleratorRequest.objects.all()
    monkeypatch.setattr(bulk_actions, "BULK_SLICE_SIZE", 2)
    draft = bulk_actions.create_draft(action, DrainTarget.MAINTENANCE, chosen, OLGA, arguments={"label": "x"})
    bulk_actions.confirm_draft(draft, "", held_too=True)
    assert bulk_actions.process_next_slice()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        # the last statement of a slice, after all objects were changed
        patch.setattr(Bulk, "save", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
        bulk_actions.process_next_slice()
    assert draft.items.exclude(outcome="").count() == 2
    kind = "attachment.detaching" if action == "detach" else "request.labelled"
    assert Event.objects.filter(action=kind).count() == 2
    run_job()
    draft.refresh_from_db()
    assert (draft.state, draft.moved) == ("done", draft.total)
    subjects = [*Event.objects.filter(action=kind).values_list("subject", flat=True)]
    assert len(subjects) == len(set(subjects)) == draft.total


WORKER_THAT_KILLS_ITSELF = """
import os, signal, sys, django
from django.conf import settings
settings.DATABASES["default"]["NAME"] = sys.argv[1]
django.setup()
from accelerators.models import Bulk
from accelerators.workflows import bulk_actions

def kill(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

assert bulk_actions.process_next_slice()
if sys.argv[2] == "in a slice":
    Bulk.save = kill  # the last statement of a slice, after all commands were placed
    bulk_actions.process_next_slice()
kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["between slices", "in a slice"])
def test_L2_a_change_of_units_whose_worker_is_killed_orders_each_device_once(ask: Ask, moment: str) -> None:
    report_many_cards(150)
    report_many_cards(150, "cmp2")
    order: dict[str, Any] = {"selector": {"all": True}, "count": 1}
    order["token"] = get_preview(post(ask, "/api/accelerators/", **order))["token"]
    bulk = Bulk.objects.get(uuid=get_body(post(ask, "/api/accelerators/", **order))["bulk_action"])
    words = [sys.executable, "-c", WORKER_THAT_KILLS_ITSELF, str(connection.settings_dict["NAME"]), moment]
    worker = subprocess.run(words, timeout=120, capture_output=True, text=True, check=False)
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    bulk.refresh_from_db()
    assert (bulk.state, bulk.moved, Command.objects.count()) == ("running", 100, 100)
    run_job()
    bulk.refresh_from_db()
    assert (bulk.state, bulk.moved, bulk.refused) == ("done", 300, 0)
    assert Command.objects.count() == Command.objects.values("device").distinct().count() == 300
    assert set(Command.objects.values_list("arguments__layout__vfs", flat=True)) == {"3"}
    assert Event.objects.filter(action="command.ordered").count() == 300
    assert Event.objects.filter(subject=bulk.uuid, action="bulk.done").count() == 1


def test_accelerators_are_labelled_with_a_result_for_each_and_the_refused_one_is_retried(ask: Ask, fill: Fill) -> None:
    fill(20)
    requests = [*AcceleratorRequest.objects.order_by("id")]
    order = {"action": "label", "selector": {"all": True}, "label": "training", "reason": "new team"}
    preview = get_preview(post(ask, **order))
    assert (preview["target"], preview["total"], preview["hosts"], preview["held"], preview["units"]) == (
        *("accelerator", len(requests), 2),
        *(0, 0),
    )
    assert preview["instances"] == len({one.instance_uuid for one in requests})
    with conductor.writing():
        AcceleratorRequest.objects.filter(pk=requests[0].pk).update(label="theirs")
    get_error_message(post(ask, **(order | {"label": "other"}), token=preview["token"]), 409, "stale_preview")
    made = get_body(post(ask, **order, token=preview["token"]))
    run_job()
    assert get_outcomes(ask, made)[str(requests[0].uuid)] == ("refused", "conflict")
    assert get_labels() == {"theirs", "training"}
    event = Event.objects.filter(action="request.labelled")[0]
    assert (event.reason, event.actor, event.source) == ("new team", "admin-p1", "api")
    again = get_body(post(ask, f"{PATH}{made['uuid']}/retry/"))
    assert get_outcomes(ask, again) == {str(requests[0].uuid): ("moved", "")}
    assert get_labels() == {"training"}


def test_X4_a_manager_labels_and_sees_only_what_the_rules_allow(ask: Ask, fill: Fill) -> None:
    fill(20)
    theirs = AcceleratorRequest.objects.filter(project_id="p2").first()
    assert theirs
    refused = post(ask, by="manager", action="label", accelerators=[str(theirs.uuid)], label="x")
    assert "There is no accelerator" in get_error_message(refused, 400)
    order = {"action": "label", "selector": {"all": True}, "label": "ours"}
    made = get_body(post(ask, by="manager", **order, token=get_preview(post(ask, by="manager", **order))["token"]))
    run_job()
    assert {*AcceleratorRequest.objects.filter(label="ours").values_list("project_id", flat=True)} == {"p1"}
    assert Bulk.objects.get(uuid=made["uuid"]).project_id == "p1"
    attach_all()
    everything = {"action": "detach", "selector": {"all": True}}
    detached = get_body(post(ask, **everything, token=get_preview(post(ask, **everything))["token"]))
    run_job()
    assert get_results(ask("/api/bulk_results/", "manager"))
    assert (
        not get_outcomes(ask, detached, "manager") and ask(f"{PATH}{detached['uuid']}/", "manager").status_code == 404
    )
    get_error_message(post(ask, by="manager", **everything), 403)
    get_error_message(post(ask, by="reader", **order), 403)
    # a project manager of p2 sees accelerators of all projects, and changes only those of p2
    answer = ask(f"{PATH}{made['uuid']}/retry/", "manager", project="p2", method="POST", data={})
    get_error_message(answer, 403)


def test_X4_a_member_who_may_not_see_devices_labels_the_accelerators_of_the_project_in_bulk(
    ask: Ask, fill: Fill
) -> None:
    fill(20)
    of_devices = get_body(post(ask, action="quarantine", devices=get_free_uuids()[:1]))
    everywhere = {"action": "label", "selector": {"all": True}, "label": "everywhere"}
    of_all = get_body(post(ask, **everywhere, token=get_preview(post(ask, **everywhere))["token"]))
    order = {"action": "label", "selector": {"all": True}, "label": "ours"}
    preview = get_preview(post(ask, by="member", **order))
    made = get_body(post(ask, by="member", **order, token=preview["token"]))
    run_job()
    assert {*AcceleratorRequest.objects.filter(label="ours").values_list("project_id", flat=True)} == {"p1"}
    assert {outcome for outcome, _ in get_outcomes(ask, made, "member").values()} == {"moved"}
    for reader in ("member", "reader"):
        assert {row["uuid"] for row in get_results(ask(PATH, reader))} == {made["uuid"]}
        assert {row["bulk_action"].split("/")[-2] for row in get_results(ask("/api/bulk_results/", reader))} == {
            made["uuid"]
        }
        for hidden in (of_devices, of_all):
            assert ask(f"{PATH}{hidden['uuid']}/", reader).status_code == 404
            refused = ask(f"{PATH}{hidden['uuid']}/retry/", reader, method="POST", data={})
            assert refused.status_code == (404 if (reader, hidden) == ("member", of_all) else 403)
    assert not get_results(ask(PATH, "member", project="p2"))
    get_error_message(ask(f"{PATH}{made['uuid']}/cancel/", "member", project="p2", method="POST", data={}), 404)
    for path in (PATH, "/api/bulk_results/"):
        get_error_message(ask(path, "nobody"), 403)
        get_error_message(ask(path, ""), 401)
    get_error_message(post(ask, by="member", action="detach", selector={"all": True}), 403)


def test_X4_a_member_to_whom_the_policy_file_gives_detaching_detaches_those_of_the_project_in_bulk(
    ask: Ask, fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "policy.yaml"
    written.write_text('"cyborg:attachment:delete": "rule:project_member_api"\n')
    monkeypatch.setattr(policy, "_get_policy", lambda: Policy(written, False))
    fill(10)
    rows = attach_all()
    order = {"action": "detach", "selector": {"all": True}}
    assert "cyborg:attachment:get" in get_error_message(post(ask, by="member", **order), 403, "not_allowed")
    written.write_text(written.read_text() + '"cyborg:attachment:get": "rule:project_member_api"\n')
    allowing = Policy(written, False)
    monkeypatch.setattr(policy, "_get_policy", lambda: allowing)
    made = get_body(post(ask, by="member", **order, token=get_preview(post(ask, by="member", **order))["token"]))
    own = {str(row.uuid) for row in rows if row.project_id == "p1"}
    assert {*get_outcomes(ask, made, "member")} == own
    assert {row["uuid"] for row in get_results(ask(PATH, "member"))} == {made["uuid"]}
    states = {(row.project_id, row.state) for row in Attachment.objects.all()}
    assert states == {("p1", "detaching"), ("p2", "attached")}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"action": "detach", "devices": [str(uuid4())]}, "detach needs attachments"),
        ({"action": "detach", "attachments": []}, "either attachments"),
        ({"action": "detach", "attachments": [str(uuid4())]}, "There is no attachment"),
        ({"action": "detach", "selector": {"driver": "x"}}, "unknown filter"),
        ({"action": "label", "selector": {"all": True}}, "label needs it"),
        ({"action": "label", "label": "x", "selector": {"attached": False}}, "unknown filter"),
        ({"action": "enable", "label": "x", "selector": {"all": True}}, "only label accepts it"),
        ({"action": "enable"}, "either devices"),
        ({"action": "partition", "selector": {"all": True}}, "partition needs it"),
        ({"action": "partition", "layout": {}, "selector": {"all": True}}, "layout: This dictionary may not be empty"),
        ({"action": "enable", "layout": {"vfs": "4"}, "selector": {"all": True}}, "only partition accepts it"),
    ],
)
def test_wrong_bodies_are_refused_with_what_is_wrong(ask: Ask, fields: dict[str, Any], says: str) -> None:
    assert says in get_error_message(post(ask, **fields), 400)


def store_unknown_action() -> Bulk:
    """Store a running bulk action of a newer release, before all others, and return it."""
    devices = Device.objects.all()
    bulk = bulk_actions.create_draft(Action.QUARANTINE, DrainTarget.MAINTENANCE, devices, OLGA)
    with conductor.writing():
        Bulk.objects.filter(pk=bulk.pk).update(action="polish", state="running", target="planet")
    bulk.refresh_from_db()
    return bulk


def test_C2_an_action_of_a_newer_release_is_left_to_it_and_the_others_go_on(
    ask: Ask, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(10)
    unknown = store_unknown_action()
    monkeypatch.setattr(bulk_actions, "BULK_SLICE_SIZE", 5)
    known = bulk_actions.create_draft(Action.QUARANTINE, DrainTarget.MAINTENANCE, Device.objects.all(), OLGA)
    bulk_actions.confirm_draft(known, "", held_too=True)
    run_job()
    known.refresh_from_db()
    assert (known.state, known.moved) == ("done", 10)
    unknown.refresh_from_db()
    assert (unknown.state, unknown.finished_count) == ("running", 0)
    assert not unknown.items.exclude(outcome="").exists()
    shown = get_body(ask(f"{PATH}{unknown.uuid}/"), 200)
    assert (shown["action"], shown["target"], shown["state"]) == ("polish", "planet", "running")
    assert len(get_results(ask(f"/api/bulk_results/?bulk_action={unknown.uuid}"))) == 10
    assert get_body(post(ask, f"{PATH}{unknown.uuid}/cancel/"))["state"] == "cancelled"
    assert "does not know" in get_error_message(post(ask, f"{PATH}{unknown.uuid}/retry/"), 409, "conflict")
    with conductor.writing():
        Bulk.objects.filter(pk=unknown.pk).update(state="draft")
    with pytest.raises(RefusedError, match="does not know the action polish"):
        bulk_actions.confirm_draft(Bulk.objects.get(pk=unknown.pk), "", held_too=True)


def test_admission_without_a_set_chooses_the_devices_that_a_rule_would_move(ask: Ask, fill: Fill) -> None:
    fill(10)
    with conductor.writing():
        Device.objects.update(state="inactive")
    assert "No admission rule" in get_error_message(post(ask, action="admit", dry_run=True), 400)
    address = Device.objects.get(uuid=get_free_uuids()[0]).address
    with conductor.writing():
        Device.objects.filter(address=address).update(model="special")
    rule = {"name": "special", "model": "special", "action": "quarantined"}
    token = get_body(ask("/api/rules/", method="POST", data=rule | {"dry_run": True}), 200)["token"]
    get_body(ask("/api/rules/", method="POST", data=rule | {"token": token}), 201)
    preview = get_body(post(ask, action="admit", dry_run=True), 200)
    assert (preview["total"], preview["counts"]["moved"]) == (1, 1)
    assert get_body(post(ask, action="admit"))["counts"]["moved"] == 1
    assert [*Device.objects.filter(state="quarantined").values_list("address", flat=True)] == [address]
