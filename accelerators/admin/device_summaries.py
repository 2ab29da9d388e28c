"""Load devices with their attach handles and holders as cards, which `accelerators.admin.topology_svg` draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from django.db.models import BooleanField, Case, Count, ExpressionWrapper, F, Q, QuerySet, Value, When, Window
from django.db.models.functions import RowNumber

from accelerators.admin.topology_svg import SHOWN, Card, Unit
from accelerators.models import AttachHandle, Device
from accelerators.ui import badges

GONE = (
    Q(missing_since__isnull=False) | Q(deployable__missing_since__isnull=False) | Q(deployable__device__state="missing")
)
HELD = Q(request__isnull=False)
STATE = Case(
    When(GONE & HELD, then=Value("missing and held")),
    When(GONE, then=Value("missing")),
    When(request__state="BindStarted", then=Value("being bound")),
    When(HELD, then=Value("held")),
    When(deployable__device__state="ready", deployable__device__busy_with=None, then=Value("free")),
    default=Value("reserved"),
)
"""SQL expression for the state of an attach handle: one of the words in `topology_svg.UNITS`."""
OF = "deployable__device_id"


def of(devices: Sequence[Device], most: int = SHOWN) -> list[Card]:
    """Return one card per device, in the order of `devices`, with at most `most` attach handles each.

    Held and missing handles are preferred; the counts of a card include all its handles. Each device must have its
    `host` loaded. Costs one statement, and a second one if a device has `most` handles or more.
    """
    handles = AttachHandle.objects.filter(**{f"{OF}__in": [device.pk for device in devices]}).annotate(word=STATE)
    units = _units(handles, most)
    counts = {key: Counter(unit.state for unit in found) for key, found in units.items()}
    if full := [key for key, found in units.items() if len(found) == most]:
        counts |= {key: Counter[str]() for key in full}
        counted = handles.filter(**{f"{OF}__in": full}).order_by().values_list(OF, "word").annotate(n=Count("*"))
        for key, word, number in counted:
            counts[key][word] = number
    return [_card(device, units.get(device.pk, ()), counts.get(device.pk, Counter())) for device in devices]


def _units(handles: QuerySet[AttachHandle], most: int) -> dict[int, list[Unit]]:
    """Return at most `most` handles per device id, by deployable and id; held and missing ones are preferred."""
    idle = ExpressionWrapper(Q(request__isnull=True, missing_since__isnull=True), output_field=BooleanField())
    place = Window(RowNumber(), partition_by=F(OF), order_by=[idle.asc(), F("id").asc()])
    found = handles.annotate(place=place).filter(place__lte=most).order_by("deployable_id", "id")
    by_request, by_itself = _addresses("acceleratorrequest"), _addresses("attachhandle")
    units: dict[int, list[Unit]] = {}
    for device, key, request, *rest in found.values_list(OF, "id", "request__id", *COLUMNS):
        url = by_request.format(request) if request else by_itself.format(key)
        units.setdefault(device, []).append(_unit(url, *rest))
    return units


COLUMNS = (
    "attach_info",
    "word",
    "deployable_id",
    "attach_type",
    "request__uuid",
    "request__profile__name",
    "request__instance_uuid",
    "request__project_id",
)


def _unit(url: str, info: str, word: str, part: int, kind: str, *holder: object) -> Unit:
    return Unit(badges.handle(info), word, url, part, kind, info, *(str(one or "") for one in holder))


def _addresses(model: str) -> str:
    """Return a format string for the URLs of a model's pages, so that `reverse` runs once and not for each handle."""
    return badges.page(model, 0).replace("/0/", "/{}/")


def _card(device: Device, units: Sequence[Unit], counts: Counter[str]) -> Card:
    stale = bool(device.host.why_stale(device.driver, device.backend))
    others = (
        (f"health {device.status}", badges.HEALTH[device.status], device.status not in ("ok", "unknown")),
        ("draining", "busy", bool(device.drain_to)),
        ("stale", "warn", stale),
    )
    return Card(
        name=str(device),
        model=device.model,
        type=device.type,
        place=device.address or device.key,
        numa=device.numa_node,
        bus=(device.address or "").rpartition(":")[0],
        bridges=tuple(device.bridges.split()),
        url=badges.page("device", device.pk),
        marks=((device.state, badges.STATES[device.state]), *((word, tone) for word, tone, true in others if true)),
        units=tuple(units),
        counts=counts,
    )
