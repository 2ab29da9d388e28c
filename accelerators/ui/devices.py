"""Names of devices for lists of several kinds: exports and the search page."""

from __future__ import annotations

import json

from django.db.models import OuterRef, Q, Subquery
from django.db.models.functions import JSONObject

from accelerators.domain.uuids import uuid_bounds
from accelerators.models import Device
from accelerators.models.devices import MIN_TERM_LENGTH, find_name_condition
from accelerators.runtime.hardware_names import get_hardware_name
from accelerators.ui.export import ExportedValue
from accelerators.ui.search import PCI_ADDRESS

MIN_UUID_TEXT = 8
"""A shorter search term may be hardware, even if it is the beginning of a uuid."""


def build_name_export(name: str, path: str = "") -> ExportedValue:
    """Return the exported column `name` with what people call a device's hardware; `path` leads to the device."""
    fields = (f"{path}vendor", f"{path}model", f"{path}subsystem")
    return ExportedValue(
        name, fields, lambda vendor, model, subsystem: vendor and get_hardware_name(vendor, model, subsystem).full
    )


def build_name_export_by_uuid(name: str, field: str) -> ExportedValue:
    """Return the exported column `name` with what people call the hardware of the device whose uuid is in `field`; it
    is empty if there is no such device."""
    ids = JSONObject(vendor="vendor", model="model", subsystem="subsystem")
    device_ids = Subquery(Device.objects.filter(uuid=OuterRef(field)).values_list(ids))
    return ExportedValue(name, (device_ids,), lambda ids: ids and get_hardware_name(**ids).full)


def describe_hit(identity: str) -> str:
    """Return the name of a device that was found, with its key; `identity` is JSON with the ids of its hardware."""
    ids = json.loads(identity)
    return f"{get_hardware_name(ids['vendor'], ids['model'], ids['subsystem']).full} {ids['key']}"


def find_by_name(term: str) -> Q | None:
    """Return the condition for devices whose hardware people call by `term`; None if there are none.

    Costs one statement, which reads all devices, or none for terms that can only be an address or a uuid.
    """
    is_uuid = len(term) >= MIN_UUID_TEXT and uuid_bounds(term)
    if len(term) < MIN_TERM_LENGTH or is_uuid or PCI_ADDRESS.fullmatch(term):
        return None
    return find_name_condition(term)
