"""Test which roles may read which collections of /api/, and the form of its error answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from django.test import Client

from accelerators import conductor
from accelerators.api.own import errors, instances
from accelerators.audit import sealing
from accelerators.domain.errors import RefusalReason
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest, BulkItem, Event
from tests.accelerators.api.own.conftest import INSTANCES, Ask, Fill, get_error_message, get_results

pytestmark = pytest.mark.django_db

INFRASTRUCTURE_COLLECTIONS = (
    *(
        "hosts",
        "agents",
        "devices",
        "deployables",
        "attach_handles",
        "commands",
        "images",
        "discrepancies",
        "seals",
    ),
    "nova_endpoints",
)
BULK_COLLECTIONS = ("bulk_actions", "bulk_results")
"""Members of a project see rows about its accelerators: tests/accelerators/api/own/test_bulk_targets.py."""
OPERATIONS_COLLECTIONS = ("backends", "services", "drivers", "rollouts", "attachments")
"""Their permissions are tested in tests/cyborgweb/auth/test_roles.py."""
PROJECT_COLLECTIONS = ("accelerators", "requests", "profiles", "events")

AGENT_COLLECTIONS = ("join_tokens",)
"""tests/agents/test_join_tokens.py tests who may see and make these rows."""
MESSAGE_COLLECTIONS = ("subscriptions", "deliveries", "inbox")
"""tests/cyborgweb/notify/test_api.py tests who may see these rows."""


@pytest.mark.slow
def test_infrastructure_is_shown_to_managers_and_admins_only(ask: Ask, fill: Fill) -> None:
    fill(1)
    for collection in INFRASTRUCTURE_COLLECTIONS:
        responses = [ask(f"/api/{collection}/", by) for by in ("admin", "manager", "member", "reader", "nobody", "")]
        assert [response.status_code for response in responses] == [200, 200, 403, 403, 403, 401], collection
        element_path = get_results(responses[0])[0]["url"].removeprefix("http://testserver")
        assert [ask(element_path, by).status_code for by in ("manager", "member", "")] == [200, 403, 401], element_path


@pytest.mark.slow
def test_x4_a_project_sees_its_own_requests_accelerators_and_events(ask: Ask, fill: Fill) -> None:
    fill(12)
    foreign = AcceleratorRequest.objects.filter(project_id="p2").first()
    own = AcceleratorRequest.objects.filter(project_id="p1").first()
    with conductor.writing():
        for request in (foreign, own):
            conductor.record_event("request.bound", EventSource.API, "nova", subject=(request.uuid, str(request.uuid)))
    for collection in ("requests", "accelerators"):
        seen = get_results(ask(f"/api/{collection}/", "reader"))
        assert {row["project"] for row in seen} == {"p1"}
        assert get_results(ask(f"/api/{collection}/?project=p2", "reader")) == []
        get_error_message(ask(f"/api/{collection}/{foreign.uuid}/", "reader"), 404)
        assert ask(f"/api/{collection}/{own.uuid}/", "reader").status_code == 200
        assert {row["project"] for row in get_results(ask(f"/api/{collection}/"))} == {"p1", "p2"}
    assert [event["subject"] for event in get_results(ask("/api/events/", "reader"))] == [str(own.uuid)]
    get_error_message(ask(f"/api/events/{Event.objects.get(subject=foreign.uuid).id}/", "reader"), 404)
    timeline = json.loads(ask(f"/api/requests/{own.uuid}/", "reader").content)["timeline"]
    assert [(event["action"], event["actor"]) for event in timeline] == [("request.bound", "nova")]


@pytest.mark.django_db(transaction=True)
def test_a_seal_is_shown_with_its_hash(ask: Ask, fill: Fill) -> None:
    fill(1)
    sealing.seal_oldest_events()
    seal, *_ = get_results(ask("/api/seals/", "manager"))
    assert seal["events"] == Event.objects.count() and len(seal["hash"]) == 64 and "marks" not in seal
    assert json.loads(ask(seal["url"].removeprefix("http://testserver"), "operator").content) == seal


def test_managers_see_accelerators_of_every_project_but_requests_only_of_their_own(ask: Ask, fill: Fill) -> None:
    fill(6)
    assert {row["project"] for row in get_results(ask("/api/accelerators/", "manager"))} == {"p1", "p2"}
    assert {row["project"] for row in get_results(ask("/api/requests/", "manager"))} == {"p1"}


def test_a_token_without_a_project_is_refused_everywhere(ask: Ask, fill: Fill) -> None:
    fill(1)
    for collection in (*INFRASTRUCTURE_COLLECTIONS, *BULK_COLLECTIONS, *PROJECT_COLLECTIONS):
        get_error_message(ask(f"/api/{collection}/", "admin", project=""), 403)


REASON_BY_STATUS = {
    400: "invalid",
    401: "not_authenticated",
    403: "not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "too_large",
    415: "unsupported_media_type",
}


@pytest.mark.parametrize(
    ("path", "options", "status", "says"),
    [
        ("/api/hosts/", {"by": ""}, 401, "requires authentication"),
        ("/api/hosts/", {"by": "nobody"}, 403, "cyborg:host:get_all"),
        ("/api/nope", {}, 404, "the address one level above lists what you may see"),
        ("/api/nope", {"method": "POST", "by": ""}, 404, "the address one level above lists what you may see"),
        ("/api/hosts/00000000-0000-4000-8000-000000000000/", {}, 404, "nothing here that you may see"),
        ("/api/hosts/nope/", {}, 404, "nothing here that you may see"),
        ("/api/events/999999999999999999/", {}, 404, "nothing here that you may see"),
        (
            "/api/hosts/",
            {"method": "POST"},
            405,
            'Method "POST" not allowed here; the Allow header lists the allowed methods.',
        ),
        ("/api/profiles/", {"method": "PUT", "data": {}}, 405, 'Method "PUT" not allowed here'),
        ("/api/hosts/", {"Accept": "application/xml"}, 406, "application/json"),
        ("/api/profiles/", {"method": "POST", "data": b"a=1", "Content-Type": "text/plain"}, 415, "application/json"),
        ("/api/profiles/", {"method": "POST", "data": b"{"}, 400, "The body is not valid JSON"),
        ("/api/profiles/", {"method": "POST", "data": []}, 400, "Invalid data"),
        ("/api/profiles/", {"method": "POST", "data": b"[" * 5000}, 400, "The body is not valid JSON"),
        ("/api/profiles/", {"method": "POST", "data": b'"' + b"a" * 1_048_576 + b'"'}, 413, "1 MiB"),
        ("/api/profiles/?name=x", {"method": "POST", "data": {}}, 400, "unknown parameter; this address takes none"),
    ],
)
def test_every_refusal_has_the_same_shape_and_says_what_to_do(
    ask: Ask, path: str, options: dict[str, object], status: int, says: str
) -> None:
    response = ask(path, **options)
    assert says in get_error_message(response, status, REASON_BY_STATUS[status])
    assert response["Content-Type"] == "application/json"
    if status == 401:
        assert response["WWW-Authenticate"].startswith("Keystone uri=")
    if status == 405:
        assert response["Allow"] in ("GET, HEAD", "GET, HEAD, POST", "GET, POST")


def test_the_manual_lists_every_reason_with_its_status() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "cli.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE)
    statuses = {reason: status for status, reason in errors.REASON_BY_STATUS.items()} | {errors.READ_ONLY: 503}
    statuses |= {reason.value: errors.STATUS_BY_REASON.get(reason, 409) for reason in RefusalReason}
    assert [(reason, int(status)) for reason, status in listed] == sorted(statuses.items())
    assert [reason for reason, _ in listed] == errors.REASONS


def test_reasons_of_refusals_fit_where_bulk_actions_store_them() -> None:
    assert max(len(reason) for reason in RefusalReason) <= (BulkItem._meta.get_field("why").max_length or 0)


def test_the_root_lists_all_collections_without_a_token(client: Client) -> None:
    found = json.loads(client.get("/api/").content)
    rest = {"usage", "census", "rules", "schema", "docs"}
    assert set(found) == {
        *INFRASTRUCTURE_COLLECTIONS,
        *BULK_COLLECTIONS,
        *PROJECT_COLLECTIONS,
        *OPERATIONS_COLLECTIONS,
        *MESSAGE_COLLECTIONS,
        *AGENT_COLLECTIONS,
        *rest,
    }
    assert client.get("/api").content == client.get("/api/").content
    assert client.get(found["hosts"]).status_code == 401


def test_without_nova_the_state_of_an_instance_is_unknown(ask: Ask, fill: Fill) -> None:
    fill(2)
    with instances.INSTANCE_STATES.replaced("nova", None):
        shown = get_results(ask("/api/accelerators/"))[0]["instance"]
    assert shown == {"uuid": INSTANCES[0], "state": "unknown", "name": ""}


def test_an_accelerator_shows_the_instances_state_and_name_from_nova(ask: Ask, fill: Fill) -> None:
    fill(3)
    asked = []

    def nova(wanted: object) -> dict[str, instances.InstanceState]:
        asked.append(wanted)
        return {INSTANCES[0]: instances.InstanceState("ACTIVE", "web-1")}

    with instances.INSTANCE_STATES.replaced("nova", nova):
        first, second = get_results(ask("/api/accelerators/"))
        assert asked == [{instances.InstanceKey(INSTANCES[0], "p1"), instances.InstanceKey(INSTANCES[1], "p2")}]
        tag = ask("/api/accelerators/")["ETag"]
    assert first["instance"] == {"uuid": INSTANCES[0], "state": "ACTIVE", "name": "web-1"}
    assert second["instance"]["state"] == "unknown"
    assert (first["driver"], first["host"]["name"], first["handle"]["info"]["bus"]) == ("pci_driver", "cmp0", "00")
    with instances.INSTANCE_STATES.replaced("nova", lambda wanted: {}):
        assert ask("/api/accelerators/", **{"If-None-Match": tag}).status_code == 200
