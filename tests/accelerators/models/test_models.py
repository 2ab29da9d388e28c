"""Test which writes the constraints of the database refuse."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import IntegrityError, transaction

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Attribute, Deployable, Device, DeviceProfile, Host
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db


@pytest.fixture
def host() -> Host:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1)))
    return host


def assert_refused_by_database(write: object) -> None:
    with conductor.writing(), pytest.raises(IntegrityError), transaction.atomic():
        write()  # type: ignore[operator]


def create_request(**values: object) -> AcceleratorRequest:
    profile, _ = DeviceProfile.objects.get_or_create(name="p", defaults={"groups": [{"resources:FPGA": "1"}]})
    return AcceleratorRequest.objects.create(**{"project_id": "p", "profile": profile, "group": {}} | values)


def test_S2_a_handle_cannot_be_held_by_two_requests(host: Host) -> None:
    handle = AttachHandle.objects.get()
    with conductor.writing():
        create_request(state="Bound", attach_handle=handle)
    assert_refused_by_database(lambda: create_request(state="Bound", attach_handle=handle))


def test_a_bound_request_holds_a_handle_and_an_unbound_one_does_not(host: Host) -> None:
    handle = AttachHandle.objects.get()
    assert_refused_by_database(lambda: create_request(state="Bound"))
    assert_refused_by_database(lambda: create_request(state="Unbound", attach_handle=handle))
    assert_refused_by_database(lambda: create_request(state="BindStarted", attach_handle=handle))
    with conductor.writing():
        create_request(state="BindStarted", attach_handle=handle, deadline=datetime.now(UTC))


def test_S1_a_held_handle_cannot_be_deleted(host: Host) -> None:
    handle = AttachHandle.objects.get()
    with conductor.writing():
        create_request(state="Bound", attach_handle=handle)
    assert_refused_by_database(lambda: AttachHandle.objects.filter(id=handle.id).delete())


def test_unknown_states_statuses_and_types_are_refused(host: Host) -> None:
    assert_refused_by_database(lambda: Device.objects.update(state="sleeping"))
    assert_refused_by_database(lambda: Device.objects.update(status="fine"))
    assert_refused_by_database(lambda: Device.objects.update(type="TOASTER"))
    assert_refused_by_database(lambda: Device.objects.update(state="ready", returns_to="ready"))
    assert_refused_by_database(lambda: AttachHandle.objects.update(attach_type="USB"))
    assert_refused_by_database(lambda: create_request(state="Deleting"))


def test_a_second_attribute_with_the_same_key_is_refused(host: Host) -> None:
    assert_refused_by_database(
        lambda: Attribute.objects.create(deployable=Deployable.objects.get(), key="rc", value="GPU")
    )
