"""What is wanted of a driver on a host: checked, kept, and told to the host's agent by a command, `configure`.

Called by `rollouts`. A driver whose devices are held is not touched, and while it is changed nothing is bound to them.
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
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import DriverState, RolloutOp, Source
from accelerators.models import Command, Device, DriverWish, Host
from drivers.inventory import WORD

OP = "configure"
MAX_SETTINGS, MAX_DEPTH = 64 * 1024, 8
MAX_SHOWN = 4096
"""Characters of settings that an event holds as they are; of longer ones it has the digest."""
SECRET = re.compile(r"passw|secret|token|credential|(private|api|access)[-_. ]?key", re.IGNORECASE)
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """What is asked of a driver. `enabled` and `settings` None: as they are."""

    op: RolloutOp
    driver: str
    enabled: bool | None = None
    settings: Settings | None = None


@dataclass(frozen=True)
class Wanted:
    """What a wish comes to."""

    installed: bool = True
    enabled: bool = True
    settings: Settings | None = None

    @property
    def runs(self) -> bool:
        """Whether the driver is to run."""
        return self.installed and self.enabled


class By(NamedTuple):
    """Who wants it, and why."""

    actor: str
    reason: str
    source: Source


def check(change: Change) -> Change:
    """The same, once it makes sense. Raises Refused INVALID."""
    if not re.fullmatch(WORD, change.driver) or len(change.driver) > 64:
        raise Refused(Reason.INVALID, "Say which driver, by its name; GET /api/drivers/ lists them.")
    if change.op is RolloutOp.UNINSTALL and (change.enabled is not None or change.settings is not None):
        raise Refused(Reason.INVALID, "Uninstalling takes neither settings nor enabled: both are forgotten with it.")
    if change.op is RolloutOp.UPDATE and change.enabled is None and change.settings is None:
        raise Refused(Reason.INVALID, "Say what is to be other than it is: enabled, settings, or both.")
    if change.settings is not None:
        if "acts" in change.settings:
            text = "acts: which acts are allowed on a host only that host's own CYBORG_DRIVER_SETTINGS can say."
            raise Refused(Reason.INVALID, text)
        if _size(change.settings) > MAX_SETTINGS:
            raise Refused(Reason.INVALID, f"Settings are at most {MAX_SETTINGS} bytes of JSON.")
        _check_settings(change.settings)
    return change


def _size(settings: Settings) -> int:
    """Bytes of JSON, also of what JSON has no word for: `_check_settings` says where that stands."""
    try:
        text = json.dumps(settings, ensure_ascii=False, separators=(",", ":"), default=str, skipkeys=True)
    except (RecursionError, ValueError):  # a number of thousands of digits
        text = f"Settings are nested at most {MAX_DEPTH} deep, and their numbers are of 64 bits."
        raise Refused(Reason.INVALID, text) from None
    return len(text.encode(errors="replace"))


def _check_settings(value: Any, path: str = "settings", depth: int = 0) -> None:
    path = path[:200]
    if depth > MAX_DEPTH:
        raise Refused(Reason.INVALID, f"{path}: settings are nested at most {MAX_DEPTH} deep.")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if SECRET.search(key):
                text = f"{path}.{key[:64]} looks like a secret: settings are shown and journaled, so put it into"
                raise Refused(Reason.INVALID, f"{text} a file on the host, and its path here under another name.")
            _check_settings(inner, f"{path}.{key}", depth + 1)
            _check_settings(key, f"{path}.{key}", depth)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_settings(inner, f"{path}[{number}]", depth + 1)
    elif isinstance(value, str) and not _storable(value):
        raise Refused(Reason.INVALID, f"{path!r} holds characters that cannot be stored.")
    elif not isinstance(value, str | int | float | None):
        raise Refused(Reason.INVALID, f"{path}: JSON has no {type(value).__name__}; say it as text.")
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > 2**63):
        raise Refused(Reason.INVALID, f"{path}: no such number can be told.")


def _storable(text: str) -> bool:
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def order(host: Host, change: Change, by: By) -> Command | None:
    """Have a driver of this host be as `change` says; None when it is so already.

    Raises Refused: CONFLICT, when there is nothing to change, another change or an act on a device is under way, or the
    agent takes no commands; HELD, by whom, while a request holds a device of the driver; AWAY, when a witness cannot be
    asked, or all of them together take longer than PATIENCE_S.
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
            raise Refused(Reason.CONFLICT, text)
        placing.reachable(host)
        devices = conductor.locked(Device.objects.filter(host=host, driver=change.driver))
        _refuse_busy(devices)
        if entry and driver_status.state_of(entry) not in driver_status.OFF:
            _refuse_held(devices, change, host)
        kept = wish or DriverWish(host=host, driver=change.driver, generation=0)
        kept.generation = max(kept.generation, (entry or {}).get("generation", 0)) + 1
        return _tell(kept, wanted, devices, by)


def is_driven(entry: Mapping[str, Any] | None, generation: int, runs: bool) -> bool:
    """Whether what was seen of a driver is what is wanted."""
    if entry is None or entry.get("generation", 0) != generation:
        return False
    state = driver_status.state_of(entry)
    return state == DriverState.OK if runs else state in driver_status.OFF


def _wanted(change: Change, wish: DriverWish | None, entry: Mapping[str, Any] | None, host: Host) -> Wanted | None:
    """What is to be so afterwards; None when there is nothing to uninstall."""
    here = wish.installed if wish else bool(entry) and driver_status.state_of(entry or {}) not in driver_status.OFF
    was = Wanted(True, wish.enabled, wish.settings) if wish and wish.installed else Wanted()
    if change.op is RolloutOp.UNINSTALL:
        left = here or bool(wish and not is_driven(entry, wish.generation, False))
        return Wanted(installed=False, enabled=False) if left else None
    if change.op is RolloutOp.UPDATE and not here:
        raise Refused(Reason.CONFLICT, f"{change.driver} is not installed on {host.name}: install it there first.")
    enabled = change.enabled if change.enabled is not None else change.op is RolloutOp.INSTALL or was.enabled
    return Wanted(True, enabled, was.settings if change.settings is None else change.settings)


def _is_so(wish: DriverWish | None, wanted: Wanted, entry: Mapping[str, Any] | None) -> bool:
    if wish is None or Wanted(wish.installed, wish.enabled, wish.settings) != wanted:
        return False
    return is_driven(entry, wish.generation, wanted.runs)


def _refuse_busy(devices: Sequence[Device]) -> None:
    """Raises Refused while any of the driver's devices, locked, is worked on."""
    for device in devices:
        if device.busy_with:
            text = f"Device {device.uuid} of {device.driver} is busy (command {device.busy_with}): wait for its end."
            raise Refused(Reason.CONFLICT, text)


def _refuse_held(devices: Sequence[Device], change: Change, host: Host) -> None:
    """Raises Refused while any of the driver's devices, locked, is held."""
    what = {RolloutOp.UNINSTALL: "uninstalled", RolloutOp.UPDATE: "changed"}.get(change.op, "set up anew")
    for pk, request, instance in safety.holding([device.pk for device in devices], "uuid", "instance_uuid")[:1]:
        held = next(device for device in devices if device.pk == pk)
        text = f"Device {held.uuid} is held by request {request} of instance {instance}"
        raise Refused(Reason.HELD, f"{text}: {change.driver} on {host.name} cannot be {what}.")
    until = time.monotonic() + PATIENCE_S
    for device in devices:
        if time.monotonic() > until:
            raise Refused(Reason.AWAY, "Whether its devices are held was not found out in time: try again.")
        safety.refuse_unless_free(device, f"left by {change.driver} ({what})", {safety.REQUESTS})


def _tell(kept: DriverWish, wanted: Wanted, devices: Sequence[Device], by: By) -> Command:
    """Keep the wish, and order it; the devices are busy until it has ended."""
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
    text = msgspec.json.encode(settings)
    return settings if len(text) <= MAX_SHOWN else f"{len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()}"
