"""Add, change, disable and remove one backend of a driver on one host: a named section of the driver's settings.

All other settings stay. Each change is a rollout on one host, which is based on the generation that was read here, so
two people who change the same driver at the same moment cannot overwrite each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.generations import refuse_if_changed, require_generation
from accelerators.domain.setting_edits import PATH_SEPARATOR, SettingEdits, apply_edits, check_edits
from accelerators.domain.states import EventSource, RolloutOp
from accelerators.models import DriverWish, Host, Rollout
from accelerators.workflows import driver_rollouts
from accelerators.workflows.driver_config import DriverChange

DEFAULT_DRIVER = "generic_driver"
"""The driver whose settings are backends."""
SECTIONS_SETTING = "backends"
BACKEND_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class BackendPlace(NamedTuple):
    """The place of a backend: its host, its driver and its name."""

    host: Host
    driver: str
    name: str


@dataclass(frozen=True)
class ChangeContext:
    """The author, reason and interface of a change of a backend, and the generation of the driver that it is based on.

    A change without a generation is refused.
    """

    caller: Caller
    source: EventSource
    reason: str = ""
    generation: int | None = None


def list_sections(wish: DriverWish | None) -> dict[str, Any]:
    """Return the sections of a driver's wanted settings by name; empty if there are none."""
    settings = wish.settings if wish and wish.installed else None
    sections = settings.get(SECTIONS_SETTING) if isinstance(settings, dict) else None
    return sections if isinstance(sections, dict) else {}


def add_backend(place: BackendPlace, section: Mapping[str, Any], context: ChangeContext) -> Rollout:
    """Add a backend with these settings, and return the rollout.

    Raises RefusedError: INVALID for a wrong name or section, CONFLICT if there is a backend of this name, and whatever
    `driver_rollouts.start_rollout` raises.
    """
    if not BACKEND_NAME.fullmatch(place.name):
        text = "A backend is named with at most 64 letters, digits and the characters _ . -"
        raise RefusedError(RefusalReason.INVALID, text)
    wish = _find_wish(place, context)
    if place.name in list_sections(wish):
        text = f"{_describe(place)} exists already: change it, or choose another name."
        raise RefusedError(RefusalReason.CONFLICT, text)
    edits = SettingEdits({_build_path(place.name): dict(section)})
    return _start(place, edits, wish, context)


def change_backend(place: BackendPlace, edits: SettingEdits, context: ChangeContext) -> Rollout:
    """Change single settings of a backend, such as `enabled`, and return the rollout. Paths begin in its section.

    Raises RefusedError: NOT_FOUND if it does not exist, INVALID without edits, and whatever
    `driver_rollouts.start_rollout` raises.
    """
    wish = _find_wish_with_section(place, context)
    if not edits:
        raise RefusedError(RefusalReason.INVALID, "Say what to change.")
    in_section = SettingEdits(
        {_build_path(place.name, path): value for path, value in edits.set.items()},
        [_build_path(place.name, path) for path in edits.unset],
    )
    return _start(place, in_section, wish, context)


def remove_backend(place: BackendPlace, context: ChangeContext) -> Rollout:
    """Remove a backend, and return the rollout.

    Raises RefusedError: NOT_FOUND if it does not exist, IN_USE while a device of the driver is held, and whatever else
    `driver_rollouts.start_rollout` raises.
    """
    wish = _find_wish_with_section(place, context)
    return _start(place, SettingEdits(unset=[_build_path(place.name)]), wish, context)


def _build_path(*parts: str) -> str:
    """Return the path of a backend's section, or of a setting in it."""
    return PATH_SEPARATOR.join((SECTIONS_SETTING, *parts))


def _describe(place: BackendPlace) -> str:
    """Return the backend's name, driver and host for a message."""
    return f"The backend {place.name} of {place.driver} on {place.host.name}"


def _find_wish(place: BackendPlace, context: ChangeContext) -> DriverWish | None:
    """Return the wanted configuration of the driver, None if there never was one.

    Raises ChangedMeanwhileError if it has another generation than the caller has seen, NoGenerationError if the caller
    names none.
    """
    wish = DriverWish.objects.filter(host=place.host, driver=place.driver).first()
    present = wish.generation if wish else 0
    subject, hosts = f"{place.driver} on {place.host.name}", [place.host.name]
    refuse_if_changed(subject, present, require_generation(subject, present, context.generation, hosts), hosts)
    return wish


def _find_wish_with_section(place: BackendPlace, context: ChangeContext) -> DriverWish | None:
    """Return the wanted configuration that has the backend's section. Raises RefusedError NOT_FOUND without one.

    A driver that runs with the settings of its host's own file has no section that is known here.
    """
    wish = _find_wish(place, context)
    if place.name not in list_sections(wish):
        text = f"{_describe(place)} is not in the settings that are set here"
        raise RefusedError(RefusalReason.NOT_FOUND, f"{text}; a host's own file can have others.")
    return wish


def _start(place: BackendPlace, edits: SettingEdits, wish: DriverWish | None, context: ChangeContext) -> Rollout:
    """Start the rollout of these edits on the host, based on the generation that was read.

    Raises RefusedError INVALID if the backend would then have no kind: the driver could not load its configuration.
    """
    check_edits(edits)
    sections = apply_edits((wish and wish.settings) or {}, edits).get(SECTIONS_SETTING, {})
    kind = sections[place.name].get("kind") if place.name in sections else None
    if place.name in sections and not (isinstance(kind, str) and kind):
        raise RefusedError(RefusalReason.INVALID, "Say the kind of the backend, for example pci.")
    return driver_rollouts.start_rollout(
        DriverChange(RolloutOp.UPDATE, place.driver, edits=edits),
        [place.host],
        context.caller,
        reason=context.reason,
        source=context.source,
        generation=wish.generation if wish else 0,
    )
