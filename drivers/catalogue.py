"""Find and load the installed drivers by their Python entry points.

The entry point group and the driver names are upstream's, so an operator's `enabled_drivers` keeps working. Only a
driver's own process loads it; other processes need the names only. As an exception, the conductor loads the drivers of
this package to check settings (docs/adr/0019-driver-code-in-the-conductor.md).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import cast

from drivers.base import Driver
from drivers.errors import Failed, Invalid

ENTRY_POINT_GROUP = "cyborg.accelerator.driver"


def list_driver_names() -> tuple[str, ...]:
    """Return the names of all installed drivers, sorted; no driver is imported."""
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def load_driver(name: str) -> Driver:
    """Import a driver and return an instance of it.

    Raises Invalid if the name is unknown or ambiguous, and Failed if the driver's code cannot be loaded.
    """
    point = _find_entry_point(name)
    try:
        return cast(Driver, point.load()())
    except Exception as error:
        raise Failed(f"driver {name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}") from error


def load_own_driver(name: str) -> Driver | None:
    """Import a driver of this package and return an instance of it; None for any other name.

    Code of other packages is not loaded. Raises Failed if the driver's code cannot be loaded.
    """
    own = {point.value for point in entry_points(group=ENTRY_POINT_GROUP, name=name)}
    return load_driver(name) if len(own) == 1 and own.pop().startswith("drivers.") else None


def _find_entry_point(name: str) -> EntryPoint:
    """Return the entry point of a driver without importing the driver.

    Raises Invalid if no driver has the name, or if several different classes are registered under it.
    """
    points = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP, name=name)}
    if not points:
        raise Invalid(f"there is no driver {name!r}; installed are {', '.join(list_driver_names()) or 'none'}")
    if len(points) > 1:
        raise Invalid(f"driver {name!r} is installed twice: {' and '.join(sorted(points))}")
    return points.popitem()[1]
