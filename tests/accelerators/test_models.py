"""What the database itself refuses."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import IntegrityError, transaction

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Attribute, Deployable, Device, DeviceProfile, Host
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db


@pytest.fixture
def host() -> Host:
    host = a_host()
    apply(host, answer(card(1)))
    return host


def refused(write: object) -> None:
    with conductor.writing(), pytest.raises(IntegrityError), transaction.atomic():
        write()  # type: ignore[operator]


def request(**values: object) -> AcceleratorRequest:
    profile, _ = DeviceProfile.objects.get_or_create(name="p", defaults={"groups": [{"resources:FPGA": "1"}]})
    return AcceleratorRequest.objects.create(**{"project_id": "p", "profile": profile, "group": {}} | values)


def test_S2_one_handle_one_request(host: Host) -> None:
    handle = AttachHandle.objects.get()
    with conductor.writing():
        request(state="Bound", attach_handle=handle)
    refused(lambda: request(state="Bound", attach_handle=handle))


def test_a_bound_request_holds_a_handle_and_an_unbound_one_does_not(host: Host) -> None:
    handle = AttachHandle.objects.get()
    refused(lambda: request(state="Bound"))
    refused(lambda: request(state="Unbound", attach_handle=handle))
    refused(lambda: request(state="BindStarted", attach_handle=handle))
    with conductor.writing():
        request(state="BindStarted", attach_handle=handle, deadline=datetime.now(UTC))


def test_S1_a_held_handle_cannot_be_deleted(host: Host) -> None:
    handle = AttachHandle.objects.get()
    with conductor.writing():
        request(state="Bound", attach_handle=handle)
    refused(lambda: AttachHandle.objects.filter(id=handle.id).delete())


def test_states_and_words_are_closed_sets(host: Host) -> None:
    refused(lambda: Device.objects.update(state="sleeping"))
    refused(lambda: Device.objects.update(status="fine"))
    refused(lambda: Device.objects.update(type="TOASTER"))
    refused(lambda: Device.objects.update(state="ready", returns_to="ready"))
    refused(lambda: AttachHandle.objects.update(attach_type="USB"))
    refused(lambda: request(state="Deleting"))


def test_one_attribute_per_key(host: Host) -> None:
    refused(lambda: Attribute.objects.create(deployable=Deployable.objects.get(), key="rc", value="GPU"))
