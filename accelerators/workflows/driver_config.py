"""Order a driver on one host to be installed, changed or uninstalled: check the change, store it, and place a command.

The wanted configuration of a driver is stored as a `DriverWish`; the command `configure` sends it to the host's agent.
A driver whose devices are held is not changed, and while a driver is being changed nothing is bound to its devices.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from accelerators import conductor, safety
from accelerators.commands import placing
from accelerators.commands.placing import Order
from accelerators.devices.lifecycle import PATIENCE_S
from accelerators.domain import driver_status
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import DriverState, RolloutOp, Source
from accelerators.models import Command, Device, DriverWish, Host
from drivers.inventory import WORD

OP = "configure"
MAX_SETTINGS, MAX_DEPTH = 64 * 1024, 8
MAX_SHOWN = 4096
"""Bytes of JSON up to which an event stores settings whole; of longer ones it stores the size and the SHA-256."""
SECRET = re.compile(r"passw|secret|token|credential|(private|api|access)[-_. ]?key", re.IGNORECASE)
"""Keys of settings that look like secrets: such settings are refused."""
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A change of a driver. `enabled` or `settings` None: that part stays as it is."""

    op: RolloutOp
    driver: str
    enabled: bool | None = None
    settings: Settings | None = None


@dataclass(frozen=True)
class Wanted:
    """The wanted configuration of a driver on a host. `settings` None: those of the host's own file."""

    installed: bool = True
    enabled: bool = True
    settings: Settings | None = None

    @property
    def runs(self) -> bool:
        """Return True if the driver is wanted to run."""
        return self.installed and self.enabled


class By(NamedTuple):
    """Who orders a change, why, and through which interface."""

    actor: str
    reason: str
    source: Source


def check(change: Change) -> Change:
    """Check a change and return it. Raises RefusedError INVALID if it makes no sense or its settings are not allowed.

    Settings are not allowed if they are too large, nested too deep, hold something that looks like a secret, or values
    that JSON or the database cannot represent, or name `acts`, which only the host's own configuration may set.
    """
    if not re.fullmatch(WORD, change.driver) or len(change.driver) > 64:
        raise RefusedError(Reason.INVALID, "Give the driver's name; GET /api/drivers/ lists the drivers.")
    if change.op is RolloutOp.UNINSTALL and (change.enabled is not None or change.settings is not None):
        raise RefusedError(Reason.INVALID, "Uninstalling takes neither settings nor enabled, because it deletes both.")
    if change.op is RolloutOp.UPDATE and change.enabled is None and change.settings is None:
        raise RefusedError(Reason.INVALID, "Say what to change: enabled, settings, or both.")
    if change.settings is not None:
        if "acts" in change.settings:
            text = "acts: only CYBORG_DRIVER_SETTINGS on the host itself decides which acts are allowed there."
            raise RefusedError(Reason.INVALID, text)
        if _size(change.settings) > MAX_SETTINGS:
            raise RefusedError(Reason.INVALID, f"Settings are at most {MAX_SETTINGS} bytes of JSON.")
        _check_settings(change.settings)
    return change


def _size(settings: Settings) -> int:
    """Return the size of the settings in bytes of JSON.

    Values that JSON cannot represent are counted as text here; `_check_settings` refuses them later and names their
    place. Raises RefusedError INVALID if the settings are nested too deep for Python, or hold a number that is too
    long.
    """
    try:
        text = json.dumps(settings, ensure_ascii=False, separators=(",", ":"), default=str, skipkeys=True)
    except (RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        text = f"Settings may be nested at most {MAX_DEPTH} levels deep, and their numbers must fit into 64 bits."
        raise RefusedError(Reason.INVALID, text) from None
    return len(text.encode(errors="replace"))


def _check_settings(value: Any, path: str = "settings", depth: int = 0) -> None:
    """Check settings recursively. Raises RefusedError INVALID with the path of the first value that is not allowed."""
    path = path[:200]
    if depth > MAX_DEPTH:
        raise RefusedError(Reason.INVALID, f"{path}: settings may be nested at most {MAX_DEPTH} levels deep.")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if SECRET.search(key):
                text = f"{path}.{key[:64]} looks like a secret, and settings are shown and journaled: put it into"
                raise RefusedError(Reason.INVALID, f"{text} a file on the host, and set that path under another name.")
            _check_settings(inner, f"{path}.{key}", depth + 1)
            _check_settings(key, f"{path}.{key}", depth)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_settings(inner, f"{path}[{number}]", depth + 1)
    elif isinstance(value, str) and not _storable(value):
        raise RefusedError(Reason.INVALID, f"{path!r} holds characters that cannot be stored.")
    elif not isinstance(value, str | int | float | None):
        raise RefusedError(Reason.INVALID, f"{path}: JSON has no {type(value).__name__}; give it as text.")
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > 2**63):
        raise RefusedError(Reason.INVALID, f"{path}: the number is out of range.")


def _storable(text: str) -> bool:
    """Return True if PostgreSQL can store this text: no NUL character, and valid Unicode."""
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:  # the text holds half of a surrogate pair
        return False


def order(host: Host, change: Change, by: By) -> Command | None:
    """Store a change of a driver on this host and place the `configure` command; returns the command.

    Returns None if nothing has to be changed. Locks the host and the driver's devices; the devices are busy until the
    command has ended. Raises RefusedError: CONFLICT if the driver to be updated is not installed, another change of it
    or an exclusive command on one of its devices is under way, or the agent takes no commands; HELD, naming the holder,
    if a device of a running driver is held; AWAY if a witness cannot be asked, or all of them take longer than
    HOLDER_CHECKS_TIMEOUT_S.
    """
    with conductor.writing():
        host = Host.objects.select_for_update(no_key=True).get(pk=host.pk)
        wish = DriverWish.objects.filter(host=host, driver=change.driver).select_related("command").first()
        entry = host.drivers.get(change.driver)
        wanted = _wanted(change, wish, entry, host)
        if wanted is None or _is_so(wish, wanted, entry):
            return None
        if wish and wish.command and wish.command.ended_at is None:
            text = f"{change.driver} on {host.name} is being changed (command {wish.command.uuid}): wait for its end."
            raise RefusedError(Reason.CONFLICT, text)
        placing.reachable(host)
        devices = conductor.locked(Device.objects.filter(host=host, driver=change.driver))
        _refuse_busy(devices)
        if entry and driver_status.state_of(entry) not in driver_status.OFF:
            _refuse_held(devices, change, host)
        kept = wish or DriverWish(host=host, driver=change.driver, generation=0)
        kept.generation = max(kept.generation, (entry or {}).get("generation", 0)) + 1
        return _tell(kept, wanted, devices, by)


def is_driven(entry: Mapping[str, Any] | None, generation: int, runs: bool) -> bool:
    """Return True if the agent reports the driver as it is wanted.

    `entry` is the driver's entry in `Host.drivers`, None if the agent has not reported the driver. The reported
    generation must be `generation`, and the driver must be ok if it should run (`should_run`), otherwise disabled or
    absent.
    """
    if entry is None or entry.get("generation", 0) != generation:
        return False
    state = driver_status.state_of(entry)
    return state == DriverState.OK if runs else state in driver_status.OFF


def _wanted(change: Change, wish: DriverWish | None, entry: Mapping[str, Any] | None, host: Host) -> Wanted | None:
    """Work out the configuration that a change leads to; None if there is nothing to uninstall.

    Raises RefusedError CONFLICT for an update of a driver that is not installed on the host.
    """
    here = wish.installed if wish else bool(entry) and driver_status.state_of(entry or {}) not in driver_status.OFF
    was = Wanted(True, wish.enabled, wish.settings) if wish and wish.installed else Wanted()
    if change.op is RolloutOp.UNINSTALL:
        left = here or bool(wish and not is_driven(entry, wish.generation, False))
        return Wanted(installed=False, enabled=False) if left else None
    if change.op is RolloutOp.UPDATE and not here:
        raise RefusedError(Reason.CONFLICT, f"{change.driver} is not installed on {host.name}: install it there first.")
    enabled = change.enabled if change.enabled is not None else change.op is RolloutOp.INSTALL or was.enabled
    return Wanted(True, enabled, was.settings if change.settings is None else change.settings)


def _is_so(wish: DriverWish | None, wanted: Wanted, entry: Mapping[str, Any] | None) -> bool:
    """Return True if this configuration is stored as the wish already, and the agent reports that it is applied."""
    if wish is None or Wanted(wish.installed, wish.enabled, wish.settings) != wanted:
        return False
    return is_driven(entry, wish.generation, wanted.runs)


def _refuse_busy(devices: Sequence[Device]) -> None:
    """Raise RefusedError CONFLICT if an exclusive command is working on any of these locked devices."""
    for device in devices:
        if device.busy_with:
            text = f"Device {device.uuid} of {device.driver} is busy (command {device.busy_with}): wait for its end."
            raise RefusedError(Reason.CONFLICT, text)


def _refuse_held(devices: Sequence[Device], change: Change, host: Host) -> None:
    """Raise RefusedError HELD if any of these locked devices is held, AWAY if that cannot be found out within
    HOLDER_CHECKS_TIMEOUT_S."""
    what = {RolloutOp.UNINSTALL: "uninstalled", RolloutOp.UPDATE: "changed"}.get(change.op, "reinstalled")
    for pk, request, instance in safety.holding([device.pk for device in devices], "uuid", "instance_uuid")[:1]:
        held = next(device for device in devices if device.pk == pk)
        text = f"Device {held.uuid} is held by request {request} of instance {instance}"
        raise RefusedError(Reason.HELD, f"{text}: {change.driver} on {host.name} cannot be {what}.")
    until = time.monotonic() + PATIENCE_S
    for device in devices:
        if time.monotonic() > until:
            raise RefusedError(Reason.AWAY, "The check whether its devices are held took too long: try again.")
        safety.refuse_unless_free(device, f"taken out of use while {change.driver} is {what}", {safety.REQUESTS})


def _tell(kept: DriverWish, wanted: Wanted, devices: Sequence[Device], by: By) -> Command:
    """Store the wish, place the `configure` command, mark the devices busy until it has ended, write an event."""
    was = Wanted(kept.installed, kept.enabled, kept.settings) if kept.pk else None
    kept.installed, kept.enabled, kept.settings = wanted.installed, wanted.enabled, wanted.settings
    told = {name: getattr(kept, name) for name in ("generation", "installed", "enabled", "settings")}
    arguments = {"driver": kept.driver, "wish": told}
    order = Order(OP, host=kept.host_id, arguments=arguments, actor=by.actor, reason=by.reason)
    (command,) = placing.place([order], by.source)
    Device.objects.filter(pk__in=[device.pk for device in devices]).update(busy_with=command.uuid)
    kept.command, kept.actor, kept.reason, kept.updated_at = command, by.actor[:255], by.reason, datetime.now(UTC)
    kept.save()
    pairs = {
        "installed": [was and was.installed, wanted.installed],
        "enabled": [was and was.enabled, wanted.enabled],
        "settings": [_shown(was.settings if was else None), _shown(wanted.settings)],
        "generation": [None, kept.generation],
    }
    changes = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    about = {"host": kept.host, "subject": (kept.uuid, str(kept)), "changes": changes, "reason": by.reason}
    conductor.record("driver.wanted", by.source, by.actor, **about)
    return command


def _shown(settings: Settings | None) -> Any:
    """Return settings as an event stores them: whole, or size and digest if they are longer than
    MAX_EVENT_SETTINGS_BYTES."""
    text = msgspec.json.encode(settings)
    return settings if len(text) <= MAX_SHOWN else f"{len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()}"
