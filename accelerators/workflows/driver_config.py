"""Order a driver on one host to be installed, changed or uninstalled: check the change, store it, and place a command.

The wanted configuration of a driver is stored as a `DriverWish`; the command `configure` sends it to the host's agent.
A driver whose devices are held is not changed, and while a driver is being changed nothing is bound to its devices.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder, Obstacle
from accelerators.domain import driver_status, generations, setting_edits
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.setting_edits import NO_EDITS, SettingEdits
from accelerators.domain.states import DeviceOutcome, DriverState, EventSource, RolloutOp
from accelerators.models import Command, Device, DriverWish, Host, Rollout
from accelerators.runtime import database_clock
from accelerators.workflows import bulk_commands, driver_settings
from drivers.inventory import WORD

CONFIGURE_OP = "configure"
MAX_SETTINGS_BYTES, MAX_DEPTH = 64 * 1024, 8
MAX_EVENT_SETTINGS_BYTES = 4096
"""Bytes of JSON up to which an event stores settings whole; of longer ones it stores the size and the SHA-256."""
SECRET_KEY_PATTERN = re.compile(r"passw|secret|token|credential|(private|api|access)[-_. ]?key", re.IGNORECASE)
"""Keys of settings that look like secrets: such settings are refused."""
WantedSettings = Mapping[str, Any]


@dataclass(frozen=True)
class DriverChange:
    """A change of a driver. None in `enabled` leaves that as it is. `settings` replaces all settings; `edits` changes
    single ones.

    As an exception, `op` INSTALL enables the driver if `enabled` is None. UNINSTALL allows none of the three.
    """

    op: RolloutOp
    driver: str
    enabled: bool | None = None
    settings: WantedSettings | None = None
    edits: SettingEdits = NO_EDITS

    @cached_property
    def settings_error(self) -> str:
        """Return why a driver of this product cannot use `settings`, '' if it can, or if there are none.

        They are checked once, however many hosts the change is for.
        """
        return "" if self.settings is None else driver_settings.find_settings_error(self.driver, self.settings)

    @cached_property
    def _edit_results(self) -> dict[bytes, EditResult]:
        """The results of the edits, by the digest of the settings before them."""
        return {}

    def edit_settings(self, settings: WantedSettings) -> EditResult:
        """Return the result of the edits on these settings. Equal settings are edited and checked once, however many
        hosts have them."""
        digest = hashlib.sha256(msgspec.json.encode(settings)).digest()
        if digest not in self._edit_results:
            self._edit_results[digest] = EditResult(self, settings)
        return self._edit_results[digest]


class EditResult:
    """The settings to which the edits of a change lead. `refusal` says why they are not allowed, '' if they are."""

    def __init__(self, change: DriverChange, before: WantedSettings) -> None:
        self._driver = change.driver
        self.settings: WantedSettings = {}
        self.refusal = ""
        try:
            self.settings = setting_edits.apply_edits(before, change.edits)
            check_settings(self.settings)
        except RefusedError as refused:
            self.refusal = refused.text

    @cached_property
    def settings_error(self) -> str:
        """Return why a driver of this product cannot use these settings, '' if it can."""
        return driver_settings.find_settings_error(self._driver, self.settings)


@dataclass(frozen=True)
class WantedDriver:
    """The wanted configuration of a driver on a host. If `settings` is None, those in the host's own file apply."""

    installed: bool = True
    enabled: bool = True
    settings: WantedSettings | None = None

    @property
    def should_run(self) -> bool:
        """Return True if the driver is wanted to run."""
        return self.installed and self.enabled


class ChangeOrigin(NamedTuple):
    """The origin of a change: the actor who orders it, the reason, and the interface (`source`)."""

    actor: str
    reason: str
    source: EventSource


def build_change(rollout: Rollout) -> DriverChange:
    """Return the change that a rollout makes on each host."""
    edits = SettingEdits(**rollout.edits) if rollout.edits else NO_EDITS
    return DriverChange(RolloutOp(rollout.op), rollout.driver, rollout.enabled, rollout.settings, edits)


def check_driver_change(change: DriverChange) -> DriverChange:
    """Check a change and return it. Raises RefusedError INVALID if it makes no sense or its settings are not allowed.

    Only the form of the driver's name is checked, not whether such a driver exists.
    Settings are not allowed if they are too large, nested too deep, hold something that looks like a secret, or values
    that JSON or the database cannot represent, or name `acts`, which only the host's own configuration may set.
    """
    if not re.fullmatch(WORD, change.driver) or len(change.driver) > 64:
        raise RefusedError(RefusalReason.INVALID, "Give the driver's name; GET /api/drivers/ lists the drivers.")
    if change.op is RolloutOp.UNINSTALL and (change.enabled is not None or change.settings is not None or change.edits):
        raise RefusedError(
            RefusalReason.INVALID, "Uninstalling takes neither settings nor enabled, because it deletes both."
        )
    if change.op is RolloutOp.UPDATE and change.enabled is None and change.settings is None and not change.edits:
        raise RefusedError(RefusalReason.INVALID, "Say what to change: enabled, settings or edits.")
    if change.settings is not None and change.edits:
        raise RefusedError(RefusalReason.INVALID, "Send either settings, which replace all, or edits, not both.")
    if change.settings is not None:
        check_settings(change.settings)
    if change.edits:
        setting_edits.check_edits(change.edits)
        check_settings(setting_edits.apply_edits({}, change.edits))
    return change


def check_settings(settings: WantedSettings) -> None:
    """Raise RefusedError INVALID if these settings are not allowed; `check_driver_change` describes which ones are."""
    if "acts" in settings:
        text = "acts: only CYBORG_DRIVER_SETTINGS on the host itself decides which acts are allowed there."
        raise RefusedError(RefusalReason.INVALID, text)
    if _measure_settings(settings) > MAX_SETTINGS_BYTES:
        raise RefusedError(RefusalReason.INVALID, f"Settings are at most {MAX_SETTINGS_BYTES} bytes of JSON.")
    _check_settings(settings)


def _measure_settings(settings: WantedSettings) -> int:
    """Return the size of the settings in bytes of JSON.

    Values that JSON cannot represent are counted as text here; `_check_settings` refuses them later and names their
    place. Raises RefusedError INVALID if the settings are nested too deep for Python, or hold a number that is too
    long.
    """
    try:
        text = json.dumps(settings, ensure_ascii=False, separators=(",", ":"), default=str, skipkeys=True)
    except (RecursionError, ValueError):  # ValueError: an integer of thousands of digits
        text = f"Settings may be nested at most {MAX_DEPTH} levels deep, and their numbers must fit into 64 bits."
        raise RefusedError(RefusalReason.INVALID, text) from None
    return len(text.encode(errors="replace"))


def _check_settings(value: Any, path: str = "settings", depth: int = 0) -> None:
    """Check settings recursively. Raises RefusedError INVALID with the path of the first value that is not allowed."""
    path = path[:200]
    if depth > MAX_DEPTH:
        raise RefusedError(RefusalReason.INVALID, f"{path}: settings may be nested at most {MAX_DEPTH} levels deep.")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if SECRET_KEY_PATTERN.search(key):
                text = f"{path}.{key[:64]} looks like a secret, and settings are shown and journaled: put it into"
                raise RefusedError(
                    RefusalReason.INVALID, f"{text} a file on the host, and set that path under another name."
                )
            _check_settings(inner, f"{path}.{key}", depth + 1)
            _check_settings(key, f"{path}.{key}", depth)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_settings(inner, f"{path}[{number}]", depth + 1)
    elif isinstance(value, str) and not _is_storable(value):
        raise RefusedError(RefusalReason.INVALID, f"{path!r} holds characters that cannot be stored.")
    elif not isinstance(value, str | int | float | None):
        raise RefusedError(RefusalReason.INVALID, f"{path}: JSON has no {type(value).__name__}; give it as text.")
    elif isinstance(value, int | float) and not abs(value) <= 2**63:  # of floats, too: jsonb returns them as integers
        raise RefusedError(RefusalReason.INVALID, f"{path}: the number is out of range.")


def _is_storable(text: str) -> bool:
    """Return True if PostgreSQL can store this text: no NUL character, and valid Unicode."""
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:  # the text holds half of a surrogate pair
        return False


def ask_holders_for_change(host: Host, change: DriverChange) -> safety.HolderAnswers:
    """Ask all holder checks about the devices of a running driver that this change would affect.

    Call it before a transaction is opened, and give the answers to `order_driver_change`. Nothing is asked if nothing
    would be changed, or if the change will be refused anyway, as far as the database tells. The driver's code is loaded
    here if it is needed, so that `order_driver_change` does not import it while it holds locks.
    """
    driver_settings.find_own_driver(change.driver)
    wish = DriverWish.objects.filter(host=host, driver=change.driver).select_related("command").first()
    host = Host.objects.get(pk=host.pk)
    entry = host.drivers.get(change.driver)
    devices = list(Device.objects.filter(host=host, driver=change.driver).select_related("host"))
    try:
        wanted = _resolve_wanted(change, wish, entry, f"on {host.name}")
        if wanted is None or _is_in_effect(wish, wanted, entry) or not _is_running(entry):
            return safety.NO_ANSWERS
        _refuse_if_being_changed(wish, host)
        command_queue.refuse_if_unreachable(host, may_wait=False)
        _refuse_if_devices_busy(devices)
        _refuse_if_devices_held(devices, change, host, safety.find_known_holders(devices))
    except RefusedError:
        return safety.NO_ANSWERS
    return safety.ask_holders(devices)


def _is_running(entry: Mapping[str, Any] | None) -> bool:
    """Return True if the agent reports this driver, and not as disabled or absent."""
    return bool(entry) and driver_status.driver_state_of(entry or {}) not in driver_status.OFF_STATES


def order_driver_change(
    host: Host,
    change: DriverChange,
    origin: ChangeOrigin,
    answers: safety.HolderAnswers,
    generation: int | None = None,
) -> Command | None:
    """Store a change of a driver on this host and place the `configure` command; returns the command.

    The change must have passed `check_driver_change`. Returns None if nothing has to be changed. Locks the host and the
    driver's devices; the devices are busy until the command has ended. Raises RefusedError: CONFLICT if the driver to
    be updated is not installed, another change of it or an exclusive command on one of its devices is under way, the
    agent takes no commands or is down (AgentDownError), or the host has no agent; IN_USE, naming the holder, if a
    device of a running driver is held; UNAVAILABLE if the `answers` of `ask_holders_for_change` do not tell whether a
    device is held. Raises ChangedMeanwhileError if the wanted configuration has another generation than `generation`,
    unless it is as wanted already.
    """
    with conductor.writing():
        host = Host.objects.select_for_update(no_key=True).get(pk=host.pk)
        wish = DriverWish.objects.filter(host=host, driver=change.driver).select_related("command").first()
        entry = host.drivers.get(change.driver)
        wanted = _resolve_wanted(change, wish, entry, f"on {host.name}")
        if wanted is None or _is_in_effect(wish, wanted, entry):
            return None
        present = wish.generation if wish else 0
        generations.refuse_if_changed(f"{change.driver} on {host.name}", present, generation, [host.name])
        _refuse_if_being_changed(wish, host)
        command_queue.refuse_if_unreachable(host, may_wait=False)
        devices = conductor.lock_devices(Device.objects.filter(host=host, driver=change.driver))
        _refuse_if_devices_busy(devices)
        if _is_running(entry):
            _refuse_if_devices_held(devices, change, host, safety.find_holders(devices, answers))
        wish_to_store = wish or DriverWish(host=host, driver=change.driver, generation=0)
        wish_to_store.generation = max(wish_to_store.generation, (entry or {}).get("generation", 0)) + 1
        return _store_wish_and_place_command(wish_to_store, wanted, devices, origin)


def forecast_change(
    host: Host,
    change: DriverChange,
    wish: DriverWish | None,
    obstacle: Obstacle | None,
    *,
    is_busy: bool,
    is_held: bool,
    is_released: bool,
) -> tuple[DeviceOutcome, str]:
    """Predict what `order_driver_change` would do on this host, with a text that does not name the host.

    `wish` has its command loaded; `obstacle` is that of the host in `command_queue.explain_unreachable`; `is_busy` and
    `is_held` say whether a device of the driver is, and `is_released` whether a guest may still use a released handle
    of one. The holder checks and the agent are not asked. This function sends no statement.
    """
    entry = host.drivers.get(change.driver)
    try:
        wanted = _resolve_wanted(change, wish, entry, "there")
    except RefusedError as refused:
        return DeviceOutcome.REFUSED, refused.text
    if wanted is None:
        return DeviceOutcome.UNCHANGED, "it is not installed there"
    if _is_in_effect(wish, wanted, entry):
        return DeviceOutcome.UNCHANGED, "it is configured like this already"
    participle = {RolloutOp.INSTALL: "installed", RolloutOp.UNINSTALL: "uninstalled"}.get(change.op, "changed")
    release_text = bulk_commands.describe_release(participle, "one of its devices")
    refusals = (
        (wish and wish.command and wish.command.ended_at is None, "it is being changed"),
        (obstacle, obstacle.nameless_text if obstacle else ""),
        (is_busy, "one of its devices is busy with a command"),
        (is_held and _is_running(entry), "one of its devices is held"),
        (is_released and _is_running(entry), release_text),
    )
    if refusal := next((text for applies, text in refusals if applies), ""):
        return DeviceOutcome.REFUSED, refusal
    return DeviceOutcome.MOVED, f"it is {participle}"


def is_reported_as_wanted(entry: Mapping[str, Any] | None, generation: int, should_run: bool) -> bool:
    """Return True if the agent reports the driver as it is wanted.

    `entry` is the driver's entry in `Host.drivers`, None if the agent has not reported the driver. The reported
    generation must be `generation`, and the driver must be ok if it should run (`should_run`), otherwise disabled or
    absent.
    """
    if entry is None or entry.get("generation", 0) != generation:
        return False
    state = driver_status.driver_state_of(entry)
    return state == DriverState.OK if should_run else state in driver_status.OFF_STATES


def _resolve_wanted(
    change: DriverChange, wish: DriverWish | None, entry: Mapping[str, Any] | None, place: str
) -> WantedDriver | None:
    """Work out the configuration that a change leads to; None if there is nothing to uninstall.

    `place` says in the texts of refusals where the driver is: "on " and the name of the host, or "there".
    Raises RefusedError: CONFLICT for an update of a driver that is not installed on the host, and for edits of settings
    that stand in the host's own file, because they are not known here; INVALID for edits that do not fit the settings,
    and for settings that the driver cannot use.
    """
    is_installed = wish.installed if wish else _is_running(entry)
    before = WantedDriver(True, wish.enabled, wish.settings) if wish and wish.installed else WantedDriver()
    if change.op is RolloutOp.UNINSTALL:
        has_to_uninstall = is_installed or bool(wish and not is_reported_as_wanted(entry, wish.generation, False))
        return WantedDriver(installed=False, enabled=False) if has_to_uninstall else None
    if change.op is RolloutOp.UPDATE and not is_installed:
        raise RefusedError(RefusalReason.CONFLICT, f"{change.driver} is not installed {place}: install it there first.")
    enabled = change.enabled if change.enabled is not None else change.op is RolloutOp.INSTALL or before.enabled
    source: DriverChange | EditResult = change
    settings = before.settings if change.settings is None else change.settings
    if change.edits:
        source = _edit_settings(change, before.settings if is_installed else {}, place)
        settings = source.settings
    is_new = settings is not None and settings != before.settings
    if is_new and driver_settings.is_checked_here(change.driver, entry) and source.settings_error:
        raise RefusedError(RefusalReason.INVALID, source.settings_error)
    return WantedDriver(True, enabled, settings)


def _edit_settings(change: DriverChange, settings: WantedSettings | None, place: str) -> EditResult:
    """Return the result of the change's edits; None stands for the settings of the host's own file.

    Raises RefusedError CONFLICT for None, INVALID if the edits do not fit, or if the result is not allowed.
    """
    if settings is None:
        text = f"{change.driver} {place} runs with the settings of the host's own file, which are not known here"
        raise RefusedError(RefusalReason.CONFLICT, f"{text}: send all its settings once, then change single ones.")
    edited = change.edit_settings(settings)
    if edited.refusal:
        raise RefusedError(RefusalReason.INVALID, edited.refusal)
    return edited


def _is_in_effect(wish: DriverWish | None, wanted: WantedDriver, entry: Mapping[str, Any] | None) -> bool:
    """Return True if this configuration is stored as the wanted one, and the agent reports that it is applied."""
    if wish is None or WantedDriver(wish.installed, wish.enabled, wish.settings) != wanted:
        return False
    return is_reported_as_wanted(entry, wish.generation, wanted.should_run)


def _refuse_if_being_changed(wish: DriverWish | None, host: Host) -> None:
    """Raise RefusedError CONFLICT if a command that changes the driver is under way."""
    if wish and wish.command and wish.command.ended_at is None:
        text = f"{wish.driver} on {host.name} is being changed (command {wish.command.uuid}): wait for its end."
        raise RefusedError(RefusalReason.CONFLICT, text)


def _refuse_if_devices_busy(devices: Sequence[Device]) -> None:
    """Raise RefusedError CONFLICT if an exclusive command is working on any of these locked devices."""
    for device in devices:
        if device.busy_with:
            text = f"Device {device.uuid} of {device.driver} is busy (command {device.busy_with}): wait for its end."
            raise RefusedError(RefusalReason.CONFLICT, text)


def _refuse_if_devices_held(
    devices: Sequence[Device], change: DriverChange, host: Host, holders: safety.DeviceHolders
) -> None:
    """Raise RefusedError IN_USE if any of these devices is held, UNAVAILABLE if the holders of one are unknown."""
    participle = {RolloutOp.UNINSTALL: "uninstalled", RolloutOp.UPDATE: "changed"}.get(change.op, "reinstalled")
    for pk, request, instance in safety.query_requests_of_devices(
        [device.pk for device in devices], "uuid", "instance_uuid"
    )[:1]:
        held_device = next(device for device in devices if device.pk == pk)
        text = f"Device {held_device.uuid} is held by request {request} of instance {instance}"
        raise RefusedError(RefusalReason.IN_USE, f"{text}: {change.driver} on {host.name} cannot be {participle}.")
    holders.refuse_unless_all_free(dict.fromkeys(devices, f"taken out of use while {change.driver} is {participle}"))


def _store_wish_and_place_command(
    wish: DriverWish, wanted: WantedDriver, devices: Sequence[Device], origin: ChangeOrigin
) -> Command:
    """Store the wanted configuration, place the `configure` command, mark the devices busy with it, write an event.

    The devices must be locked. Returns the command.
    """
    before = WantedDriver(wish.installed, wish.enabled, wish.settings) if wish.pk else None
    wish.installed, wish.enabled, wish.settings = wanted.installed, wanted.enabled, wanted.settings
    wish_argument = {name: getattr(wish, name) for name in ("generation", "installed", "enabled", "settings")}
    arguments = {"driver": wish.driver, "wish": wish_argument}
    order = CommandOrder(CONFIGURE_OP, host=wish.host_id, arguments=arguments, actor=origin.actor, reason=origin.reason)
    (command,) = command_queue.place_commands([order], origin.source)
    Device.objects.filter(pk__in=[device.pk for device in devices]).update(busy_with=command.uuid)
    wish.command, wish.actor, wish.reason, wish.updated_at = (
        command,
        origin.actor[:255],
        origin.reason,
        database_clock.now(),
    )
    wish.save()
    pairs = {
        "installed": [before and before.installed, wanted.installed],
        "enabled": [before and before.enabled, wanted.enabled],
        "settings": [_shorten_settings(before.settings if before else None), _shorten_settings(wanted.settings)],
        "generation": [None, wish.generation],
    }
    changes = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    conductor.record_event(
        "driver.wanted",
        origin.source,
        origin.actor,
        host=wish.host,
        subject=(wish.uuid, str(wish)),
        changes=changes,
        reason=origin.reason,
    )
    return command


def _shorten_settings(settings: WantedSettings | None) -> Any:
    """Return settings as an event stores them: whole, or size and digest if they are longer than
    MAX_EVENT_SETTINGS_BYTES."""
    text = msgspec.json.encode(settings)
    return (
        settings
        if len(text) <= MAX_EVENT_SETTINGS_BYTES
        else f"{len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()}"
    )
