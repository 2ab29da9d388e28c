"""Test promise C1: the requests that Nova sends, in its order, and the fields that it reads (contract 7.1, annex A).

Nova sends no microversion. It sends a user's token, and a service token with requests that change bindings. It reads
neither headers nor links, and any status below 400 is a success for it.
"""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import uuid4

import pytest

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile
from tests.accelerators.api.v2.conftest import Call
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")
GROUPS = [{"resources:FPGA": "1", "trait:CUSTOM_TEST": "required"}, {"resources:FPGA": "1"}]
GROUP_KEY = re.compile(r"^(resources|trait)([a-zA-Z0-9_-]{1,64})?:(.*)$")
ARQS = "/accelerator/v2/accelerator_requests"


@pytest.fixture
def nova(call: Call) -> Any:
    """Return `nova(method, path, body)`, which returns the status and the decoded body, or None without a body."""

    def ask(method: str, path: str, body: object = None) -> tuple[int, Any]:
        response = call(method, path, body, service=True, version="")
        return response.status_code, json.loads(response.content) if response.content else None

    return ask


@pytest.fixture
def providers(db: None) -> list[str]:
    """Create two ready cards on cmp1 and a profile; return the providers that Placement would name."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2)))
    for uuid in Device.objects.values_list("uuid", flat=True):
        lifecycle.enable_device(uuid, ADMIN)
    with conductor.writing():
        DeviceProfile.objects.create(name="dp", groups=GROUPS)
    return [str(uuid) for uuid in Deployable.objects.order_by("id").values_list("rp_uuid", flat=True)]


def bind_body(arqs: list[dict[str, Any]], providers: list[str], instance: str) -> dict[str, Any]:
    """Return the body of the PATCH that binds all requests of an instance, each to the provider of its group."""
    values = [{"hostname": "cmp1", "device_rp_uuid": rp, "instance_uuid": instance} for rp in providers]
    return {
        arq["uuid"]: [
            {"path": f"/{name}", "op": "add", "value": value}
            for name, value in values[arq["device_profile_group_id"]].items()
        ]
        for arq in arqs
    }


def test_C1_nova_creates_binds_reads_and_deletes_the_requests_of_a_server(nova: Any, providers: list[str]) -> None:
    status, found = nova("GET", "/accelerator/v2/device_profiles?name=dp")
    assert status == 200
    (profile,) = found["device_profiles"]
    assert profile["groups"] == GROUPS
    assert all(GROUP_KEY.match(key) for group in profile["groups"] for key in group)
    status, made = nova("POST", ARQS, {"device_profile_name": "dp"})
    assert (status, [arq["device_profile_group_id"] for arq in made["arqs"]]) == (201, [0, 1])
    instance = str(uuid4())
    assert nova("PATCH", ARQS, bind_body(made["arqs"], providers, instance)) == (202, None)
    status, bound = nova("GET", f"{ARQS}?instance={instance}")
    assert (status, [arq["state"] for arq in bound["arqs"]]) == (200, ["Bound", "Bound"])
    assert {arq["uuid"] for arq in bound["arqs"]} == {arq["uuid"] for arq in made["arqs"]}
    for arq, bus in zip(bound["arqs"], ("01", "02"), strict=True):
        assert arq["attach_handle_type"] == "PCI"
        assert arq["attach_handle_info"] == {"domain": "0000", "bus": bus, "device": "00", "function": "0"}
        assert (arq["hostname"], arq["instance_uuid"]) == ("cmp1", instance)
    for _ in range(2):  # Nova sends the DELETE again when it is not sure of the first
        assert nova("DELETE", f"{ARQS}?instance={instance}") == (204, None)
    assert nova("GET", f"{ARQS}?instance={instance}") == (200, {"arqs": []})
    assert not AcceleratorRequest.objects.exists()
    assert AttachHandle.objects.filter(request__isnull=True).count() == 2


def test_C1_after_a_failed_bind_nova_deletes_the_requests_and_can_bind_again(nova: Any, providers: list[str]) -> None:
    """Nova deletes the requests after a failed bind; then the same devices can be bound."""
    _, made = nova("POST", ARQS, {"device_profile_name": "dp"})
    instance = str(uuid4())
    assert nova("PATCH", ARQS, bind_body(made["arqs"], [str(uuid4()), providers[1]], instance))[0] >= 400
    uuids = ",".join(arq["uuid"] for arq in made["arqs"])
    assert nova("DELETE", f"{ARQS}?arqs={uuids}") == (204, None)
    assert not AcceleratorRequest.objects.exists()
    _, again = nova("POST", ARQS, {"device_profile_name": "dp"})
    assert nova("PATCH", ARQS, bind_body(again["arqs"], providers, str(uuid4()))) == (202, None)


def test_C1_unbound_requests_and_missing_service_tokens_are_answered_as_upstream_does(
    nova: Any, call: Call, providers: list[str]
) -> None:
    _, made = nova("POST", ARQS, {"device_profile_name": "dp"})
    for arq in made["arqs"]:
        assert (arq["attach_handle_type"], arq["attach_handle_info"]) == ("", {})
        assert nova("GET", f"{ARQS}/{arq['uuid']}") == (200, arq), "shown bare, not wrapped"
    # Clients look for these words in the refusal of a request without a service token.
    body = bind_body(made["arqs"], providers, str(uuid4()))
    refused = call("PATCH", ARQS, body, version="")
    assert refused.status_code == 403
    assert "requires a service token" in json.loads(json.loads(refused.content)["error_message"])["faultstring"]
    assert {arq["state"] for arq in nova("GET", ARQS)[1]["arqs"]} == {"Initial"}
