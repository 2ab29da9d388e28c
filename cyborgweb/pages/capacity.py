"""Capacity as bars: how many units of each resource class (or of other groups) are held, free and out of offer, and how
busy their devices are.
"""

from __future__ import annotations

from dataclasses import fields

from django.utils.html import format_html
from django.utils.safestring import SafeString

from accelerators.requests.capacity import CapacityGroup, CapacityQuery, LoadSummary
from agents.telemetry import LoadSnapshot
from cyborgweb.telemetry import usage_with_load

MAX_RESOURCE_CLASSES = 30
"""Resource classes that are shown, the largest first."""
MAX_PROJECTS = 10


class RenderableCapacity(CapacityGroup):
    """The capacity of a group (for example a resource class or a project), with bars and texts for templates."""

    @classmethod
    def from_group(cls, group: CapacityGroup) -> RenderableCapacity:
        """Return a copy of this group as a RenderableCapacity."""
        return cls(*(getattr(group, field.name) for field in fields(CapacityGroup)))

    @property
    def bar(self) -> SafeString:
        """The bar of the group's units as SVG, without numbers: solid is held, light is free, hatched is not
        offered.
        """
        whole = max(self.total or 0, self.held + (self.free or 0) + self.reserved, 1)
        held, free = 100 * self.held / whole, 100 * (self.free or 0) / whole
        return format_html(
            '<svg class="capacity" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            '<rect class="reserved" width="100" height="10"/><rect class="free" width="{}" height="10"/>'
            '<rect class="held" width="{}" height="10"/></svg>',
            f"{held + free:.2f}",
            f"{held:.2f}",
        )

    @property
    def load_bar(self) -> SafeString | str:
        """The bar of the mean utilisation of the group's devices; '' if no device reports it."""
        return render_load_bar(self.load)

    @property
    def memory(self) -> str:
        """The used and the total memory of the group's devices, such as `3.0 GiB of 16.0 GiB`; '' if one is unknown."""
        return format_memory(self.load)

    @property
    def watts(self) -> str:
        """The total power of the group's devices, such as `250 W`; '' if it is unknown."""
        return format_power(self.load)


def render_load_bar(load: LoadSummary) -> SafeString | str:
    """Return the mean utilisation as a bar with a line at the busiest device; '' if no device reports it."""
    return "" if load.mean is None else render_level_bar(load.mean, load.highest)


def format_memory(load: LoadSummary) -> str:
    """Return the used memory and the total as text, such as `3.0 GiB of 16.0 GiB`; '' if one of them is unknown."""
    return f"{format_bytes(load.used)} of {format_bytes(load.size)}" if load.used is not None and load.size else ""


def format_power(load: LoadSummary) -> str:
    """Return the total power in watts as text, such as `250 W`; '' if it is unknown."""
    return "" if load.power is None else f"{load.power:,.0f} W"


def render_level_bar(percent: float, mark: float | None = None) -> SafeString:
    """Return a bar as SVG, without numbers: filled to `percent` (0 to 100), with a line at `mark` percent if given."""
    line = (
        ""
        if mark is None
        else format_html('<rect class="mark-at" x="{}" width="1" height="10"/>', f"{mark * 0.99:.1f}")
    )
    return format_html(
        '<svg class="level" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="full" width="{}" height="10"/>{}</svg>',
        f"{percent:.1f}",
        line,
    )


def format_bytes(number: float) -> str:
    """Return a number of bytes in a readable unit, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if number >= 100 or unit == "B" else f"{number:.1f} {unit}"


BY_RESOURCE_CLASS = CapacityQuery(["resource_class"], order="largest", limit=MAX_RESOURCE_CLASSES)
BY_PROJECT = CapacityQuery(["project"], order="largest", limit=MAX_PROJECTS)


def query_capacity(loads: LoadSnapshot | None, *queries: CapacityQuery) -> list[list[RenderableCapacity]]:
    """Return the groups of each query as RenderableCapacity objects, in the order of the queries. Costs one statement
    for all queries. `loads` are the hosts' last samples; without them the groups have no load.
    """
    return [
        [RenderableCapacity.from_group(group) for group in groups]
        for groups in usage_with_load.count_groups_with_load(loads, *queries)
    ]
