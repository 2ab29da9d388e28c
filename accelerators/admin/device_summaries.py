"""Load devices with their attach handles and holders as cards, which `accelerators.admin.topology_svg` draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from django.db.models import BooleanField, Case, Count, ExpressionWrapper, F, Q, QuerySet, Value, When, Window
from django.db.models.functions import RowNumber

from accelerators.admin.topology_svg import MAX_CELLS, DeviceCard, HandleCell, HandleState
from accelerators.domain.choices import Tone
from accelerators.domain.states import DeviceState, Health
from accelerators.models import AttachHandle, Device, ReleasedHandle
from accelerators.models.devices import HANDLE_USES, build_offered_condition
from accelerators.ui import badges

IS_MISSING = (
    Q(missing_since__isnull=False) | Q(deployable__missing_since__isnull=False) | Q(deployable__device__state="missing")
)
HANDLE_STATE = Case(
    When(IS_MISSING & HANDLE_USES["held"], then=Value(HandleState.MISSING_AND_HELD.value)),
    When(IS_MISSING, then=Value(HandleState.MISSING.value)),
    When(request__state="BindStarted", then=Value(HandleState.BEING_BOUND.value)),
    When(HANDLE_USES["held"], then=Value(HandleState.HELD.value)),
    When(HANDLE_USES["released"], then=Value(HandleState.RELEASED.value)),
    When(
        build_offered_condition("deployable__device") & Q(deployable__device__busy_with=None),
        then=Value(HandleState.FREE.value),
    ),
    default=Value(HandleState.RESERVED.value),
)
"""SQL expression for the state of an attach handle: a value of `HandleState`."""
DEVICE_ID = "deployable__device_id"


def load_cards(devices: Sequence[Device], max_cells: int = MAX_CELLS) -> list[DeviceCard]:
    """Return one card per device, in the order of `devices`, with at most `max_cells` attach handles each.

    If a device has more handles, the held and missing ones are shown first; the counts of a card include all its
    handles. Each device must have its `host` loaded. Runs one SQL statement, and a second one if a device has
    `max_cells` handles or more.
    """
    handles = AttachHandle.objects.filter(**{f"{DEVICE_ID}__in": [device.pk for device in devices]}).annotate(
        word=HANDLE_STATE
    )
    cells_by_device = _load_cells(handles, max_cells)
    counts_by_device = {key: Counter(unit.state for unit in cells) for key, cells in cells_by_device.items()}
    if truncated := [key for key, found in cells_by_device.items() if len(found) == max_cells]:
        counts_by_device |= {key: Counter[str]() for key in truncated}
        count_rows = (
            handles.filter(**{f"{DEVICE_ID}__in": truncated})
            .order_by()
            .values_list(DEVICE_ID, "word")
            .annotate(n=Count("*"))
        )
        for key, word, number in count_rows:
            counts_by_device[key][word] = number
    return [
        _build_card(device, cells_by_device.get(device.pk, ()), counts_by_device.get(device.pk, Counter()))
        for device in devices
    ]


def _load_cells(handles: QuerySet[AttachHandle], max_cells: int) -> dict[int, list[HandleCell]]:
    """Return the cells of at most `max_cells` handles of each device, by the device's id, sorted by deployable and id.

    If a device has more handles, held and missing ones are preferred. Devices without handles are left out. Costs one
    statement.
    """
    is_idle = ExpressionWrapper(Q(request__isnull=True, missing_since__isnull=True), output_field=BooleanField())
    position = Window(RowNumber(), partition_by=F(DEVICE_ID), order_by=[is_idle.asc(), F("id").asc()])
    selected = handles.annotate(place=position).filter(place__lte=max_cells).order_by("deployable_id", "id")
    request_url, handle_url = _page_url_template("acceleratorrequest"), _page_url_template("attachhandle")
    cells_by_device: dict[int, list[HandleCell]] = {}
    for device, key, request, *rest in selected.values_list(DEVICE_ID, "id", "request__id", *CELL_COLUMNS):
        url = request_url.format(request) if request else handle_url.format(key)
        cells_by_device.setdefault(device, []).append(_build_cell(url, *rest))
    return cells_by_device


CELL_COLUMNS = (
    "attach_info",
    "word",
    "deployable_id",
    "attach_type",
    "request__uuid",
    "request__profile__name",
    "request__instance_uuid",
    "request__project_id",
    "release__id",
    "release__instance",
    "release__answer",
)


def _build_cell(url: str, info: str, state: str, deployable_id: int, attach_type: str, *others: Any) -> HandleCell:
    """Build the cell of one handle.

    `others` has the values of the last seven CELL_COLUMNS: four of the request that holds the handle, and three of its
    release. They are None if there is none.
    """
    *holder, release, instance, answer = others
    reason = ReleasedHandle(instance=instance, answer=answer).description if release else ""
    texts = (*(str(one or "") for one in holder), reason)
    return HandleCell(badges.describe_handle(info), state, url, deployable_id, attach_type, info, *texts)


def _page_url_template(model: str) -> str:
    """Return a format string for the URLs of a model's pages, so that `reverse` runs once and not for each handle."""
    return badges.page_url(model, 0).replace("/0/", "/{}/")


def _build_card(device: Device, cells: Sequence[HandleCell], counts: Counter[str]) -> DeviceCard:
    """Build the card of a device. Its badges are the state and, if they apply, its health, "draining" and "stale".

    Health is shown unless it is `ok` or `unknown`. The device's `host` must be loaded.
    """
    stale = bool(device.host.stale_reason(device.driver, device.backend))
    other_badges: tuple[tuple[str, Tone, bool], ...] = (
        (f"health {device.status}", Health(device.status).tone, device.status not in ("ok", "unknown")),
        ("draining", "busy", bool(device.drain_to)),
        ("stale", "warn", stale),
    )
    return DeviceCard(
        name=str(device),
        model=device.hardware_name.full,
        type=device.type,
        address=device.address or device.key,
        numa=device.numa_node,
        bus=(device.address or "").rpartition(":")[0],
        bridges=tuple(device.bridges.split()),
        url=badges.page_url("device", device.pk),
        status_badges=(
            (device.state, DeviceState(device.state).tone),
            *((word, tone) for word, tone, true in other_badges if true),
        ),
        cells=tuple(cells),
        handle_counts=counts,
    )
