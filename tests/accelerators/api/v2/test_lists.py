"""Test the lists of devices and deployables: fields, order and pages; an element equals its detail byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Attribute, Deployable, Device, DeviceProfile
from tests.accelerators.api.v2.conftest import Get
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

Fill = Callable[[int], None]
COLLECTIONS = pytest.mark.parametrize("collection", ["devices", "deployables"])


def get_items(get: Get, path: str, version: str = "") -> list[dict[str, Any]]:
    """Return the elements of a list; check that its only key is the collection's name."""
    response = get(path, version)
    assert response.status_code == 200, response.content
    body = json.loads(response.content)
    assert list(body) == [path.split("?", maxsplit=1)[0].rsplit("/", 1)[-1]]
    return next(iter(body.values()))


def create_request_for(deployable: Deployable, handle: AttachHandle | None) -> None:
    """Create a request for `deployable`; with a handle it is bound."""
    profile, _ = DeviceProfile.objects.get_or_create(name="small", defaults={"groups": [{}]})
    AcceleratorRequest.objects.create(
        project_id="p1",
        state="Bound" if handle else "Initial",
        profile=profile,
        group={},
        deployable=deployable,
        attach_handle=handle,
    )


def test_a_device_and_its_deployable_are_shown_with_all_their_fields(get: Get) -> None:
    board = '{"product_id": "20f1", "weird": "é\\"\\\\ 100%s"}'
    apply_report(get_or_create_host("cmp1"), make_driver_report(make_card(1, std_board_info=board)))
    device, deployable = Device.objects.get(), Deployable.objects.get()
    with conductor.writing():
        Device.objects.update(created_at="2026-11-21T03:41:44.987654+02:00")
        Deployable.objects.update(
            created_at="2026-11-21T01:41:44Z", updated_at="2026-11-22T00:00:00.5Z", rp_uuid=device.uuid
        )
    shown = get_items(get, "/v2/devices", "2.3")
    assert shown == [
        {
            "uuid": str(device.uuid),
            "type": "FPGA",
            "vendor": "1af4",
            "model": "1044",
            "std_board_info": board,
            "vendor_board_info": "",
            "hostname": "cmp1",
            "status": "maintaining",
            "links": [{"href": f"http://testserver/accelerator/v2/devices/{device.uuid}", "rel": "self"}],
            "created_at": "2026-11-21T01:41:44+00:00",
            "updated_at": None,
        }
    ]
    assert "status" not in get_items(get, "/v2/devices", "2.2")[0]
    shown = get_items(get, "/v2/deployables")
    assert shown == [
        {
            "uuid": str(deployable.uuid),
            "parent_id": None,
            "root_id": None,
            "name": "cmp1_0000:01:00.0",
            "num_accelerators": 1,
            "device_id": device.id,
            "attributes_list": '[{"rc": "FPGA"}, {"trait0": "CUSTOM_TEST"}]',
            "rp_uuid": str(device.uuid),
            "driver_name": "test",
            "bitstream_id": None,
            "links": [
                {"href": f"http://testserver/accelerator/v2/deployables/{deployable.uuid}", "rel": "self"},
                {"href": f"http://testserver/accelerator/deployables/{deployable.uuid}", "rel": "bookmark"},
            ],
            "created_at": "2026-11-21T01:41:44+00:00",
            "updated_at": "2026-11-22T00:00:00+00:00",
        }
    ]


def test_links_begin_with_the_address_the_client_used(get: Get) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    response = get("/accelerator/v2/devices", Host="localhost:6666")
    assert b'"href":"http://localhost:6666/accelerator/v2/devices/' in response.content


def test_a_deployable_without_attributes_has_an_empty_list(get: Get) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    with conductor.writing():
        Attribute.objects.all().delete()
    assert get_items(get, "/v2/deployables")[0]["attributes_list"] == "[]"


@COLLECTIONS
@pytest.mark.parametrize("version", ["2.0", "2.3"])
def test_a_lists_element_and_its_detail_are_the_same_bytes(get: Get, fill: Fill, collection: str, version: str) -> None:
    fill(3)
    with conductor.writing():
        Device.objects.filter(address="0000:01:00.0").update(state="ready", updated_at=timezone.now(), model='"é\\')
        Deployable.objects.update(root=Deployable.objects.first())
    listed = get(f"/v2/{collection}", version).content
    details = [get(f"/v2/{collection}/{item['uuid']}", version).content for item in json.loads(listed)[collection]]
    assert len(details) == 3
    assert listed == b'{"%s":[%s]}' % (collection.encode(), b",".join(details))


STATES = [
    ("inactive", "maintaining"),
    ("installing", "maintaining"),
    ("ready", "enabled"),
    ("maintenance", "maintaining"),
    ("failed", "maintaining"),
    ("quarantined", "maintaining"),
    ("missing", None),
    ("retired", None),
]


@pytest.mark.parametrize(("state", "status"), STATES)
def test_devices_in_each_state_are_shown_with_their_v2_status_or_hidden(
    get: Get, state: str, status: str | None
) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    with conductor.writing():
        Device.objects.update(state=state)
    assert [item["status"] for item in get_items(get, "/v2/devices", "2.3")] == ([status] if status else [])
    assert len(get_items(get, "/v2/deployables")) == bool(status)
    expected = 200 if status else 404
    assert get(f"/v2/devices/{Device.objects.get().uuid}").status_code == expected
    assert get(f"/v2/deployables/{Deployable.objects.get().uuid}").status_code == expected


@pytest.mark.parametrize("bound", [True, False])
def test_a_missing_device_with_a_request_is_still_shown(get: Get, bound: bool) -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1), make_card(2)))
    with conductor.writing():
        deployable = Deployable.objects.get(name__contains=":01:")
        create_request_for(deployable, AttachHandle.objects.get(deployable=deployable) if bound else None)
    apply_report(host, make_driver_report(), seq=2)
    assert set(Device.objects.values_list("state", flat=True)) == {"missing"}
    with conductor.writing():
        Deployable.objects.update(missing_since=timezone.now())
    assert [item["uuid"] for item in get_items(get, "/v2/devices")] == [str(deployable.device.uuid)]
    assert [item["uuid"] for item in get_items(get, "/v2/deployables")] == [str(deployable.uuid)]


@pytest.mark.parametrize(
    ("query", "buses"),
    [
        ("", "0 1 2 3"),
        ("?type=", "0 1 2 3"),
        ("?type=FPGA", "3 2 1 0"),
        ("?type=GPU", ""),
        ("?type=GPU&type=FPGA", "3 2 1 0"),
        ("?vendor=0001", "3 1"),
        ("?vendor=0001&hostname=cmp0&type=FPGA", "3 1"),
        ("?hostname=nope", ""),
        ("?hostname=cmp0'%20OR%201=1--%20%25s", ""),
        ("?limit=2", "0 1"),
        ("?type=FPGA&limit=2", "3 2"),
        ("?limit=0", ""),
        ("?filters.field=limit&filters.value=2", "3 2"),
        ("?filters.field=limit&filters.value=0", ""),
        ("?filters.field=board&filters.value=x", "3 2 1 0"),
        ("?filters.field=name&filters.value=x", "3 2 1 0"),
        ("?filters.field=sort_key&filters.value=model&filters.field=sort_dir&filters.value=asc", "0 1 2 3"),
        ("?filters[0].field=sort_key&filters[0].value=vendor&filters[1].field=limit&filters[1].value=3", "3 1 2"),
        ("?filters[1].value=asc&filters[0].field=sort_key&filters[0].value=id&filters[1].field=sort_dir", "0 1 2 3"),
    ],
)
def test_device_lists_can_be_filtered_limited_and_sorted(get: Get, fill: Fill, query: str, buses: str) -> None:
    fill(4)
    bus = {str(device.uuid): str(int(device.address[5:7], 16)) for device in Device.objects.all()}
    assert " ".join(bus[item["uuid"]] for item in get_items(get, f"/v2/devices{query}")) == buses


def test_deployables_can_be_filtered_by_name(get: Get, fill: Fill) -> None:
    fill(3)
    found = get_items(get, "/v2/deployables?filters.field=name&filters.value=cmp0_0000:01:00.0")
    assert [item["name"] for item in found] == ["cmp0_0000:01:00.0"]


@COLLECTIONS
@pytest.mark.parametrize(
    "order",
    [
        "",
        "filters.field=sort_key&filters.value=updated_at",
        "filters[0].field=sort_key&filters[0].value=updated_at&filters[1].field=sort_dir&filters[1].value=asc",
        "filters.field=sort_key&filters.value=created_at",
    ],
)
def test_pages_followed_by_marker_add_up_to_the_whole_list(get: Get, fill: Fill, collection: str, order: str) -> None:
    """`updated_at` is null in some rows; a marker may be one of these rows, too."""
    fill(7)
    model: Any = Device if collection == "devices" else Deployable
    with conductor.writing():
        for row in model.objects.order_by("id")[::3]:
            model.objects.filter(id=row.id).update(updated_at=timezone.now())
    whole = get_items(get, f"/v2/{collection}?{order}")
    paged: list[dict[str, Any]] = []
    while page := get_items(
        get, f"/v2/{collection}?limit=2&{order}" + (f"&marker={paged[-1]['uuid']}" if paged else "")
    ):
        assert len(page) <= 2
        paged += page
    assert len(whole) == 7
    assert paged == whole


@COLLECTIONS
@pytest.mark.parametrize("query", ["", "?limit=2", "?filters.field=sort_key&filters.value=uuid"])
def test_p3_a_list_takes_at_most_five_statements_at_any_size(get: Get, fill: Fill, collection: str, query: str) -> None:
    counts = []
    for devices in (3, 60):
        fill(devices)
        marker = get_items(get, f"/v2/{collection}")[0]["uuid"]
        glue = "&" if query else "?"
        for path in (f"/v2/{collection}{query}", f"/v2/{collection}{query}{glue}marker={marker}"):
            with CaptureQueriesContext(connection) as captured:
                get(path)
            counts.append(len(captured))
    assert counts[:2] == counts[2:]
    assert max(counts) <= 5
