"""Refuse destructive acts on a device that somebody holds (promise S1).

Our own requests, and handles that a guest may still use, are read from the database (`find_known_holders`). Other
services that may know holders (Placement, Nova) register a HolderCheck. They are asked before anything is locked, and
only if the act is not refused anyway (`ask_holders`), about many devices at once and within HOLDER_CHECKS_TIMEOUT_S in
all. When the devices are locked, `find_holders` reads our own tables, and uses an answer only if nothing has changed
since the question was made. If a check could not answer, the act is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any
from uuid import UUID

from django.db.models import BooleanField, Exists, F, Func, IntegerField, OuterRef, Q, QuerySet, TextField, Value
from django.db.models.expressions import RawSQL

from accelerators.domain import driver_status
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, HandleType
from accelerators.models import AcceleratorRequest, Device, ReleasedHandle
from accelerators.runtime.registry import Registry
from drivers.plan import get_affected_prefix

HOLDER_CHECKS_TIMEOUT_S = 10.0
"""Seconds that all holder checks together may take for all devices of one request or of one step of a job."""
HOLDER_CHECK_ATTEMPTS = 3
"""How often a job asks about the same devices before it gives up, if it stays unknown whether they are held. A device
may change while services are asked, and then the next answer counts."""
HOLDER_CHECK_PAUSE_S, LONGEST_HOLDER_CHECK_PAUSE_S = 12.0, 60.0
"""Seconds before a job asks again; the pause doubles with each attempt. The first one is longer than the time for which
a service that was away is not asked (`placement_sync.jobs.holder_checks.BACK_OFF_S`)."""
HOLDER_PATHS = ("deployable__device", "attach_handle__deployable__device")
"""The paths from a request to the device that it holds."""
MAX_HOLDERS_NAMED = 5
NO_TIME_LEFT = "there was no time left to ask: try again"
NOT_ASKED = "the device has changed since it was asked for: try again"


@dataclass(frozen=True)
class HolderCheckResult:
    """The answer of a holder check for one device.

    `holders` describes each known holder in words; `unknown` is the reason if the check could not find out about all.
    Both may be given. If both are empty, nobody holds the device.
    """

    holders: tuple[str, ...] = ()
    unknown: str = ""


@dataclass(frozen=True)
class HolderCheck:
    """Another service that may know who holds a device.

    `load_questions` returns what the service has to be asked about each device, by the device's id: a value that is
    equal to an earlier one if nothing relevant has changed. It reads only the database, with a constant number of
    statements, and leaves out devices that need no question. `ask` asks the service about the devices, in the given
    order, and returns the answers, by the device's id, within about the given number of seconds. A device that it
    leaves out counts as unknown. `ask` is called while no transaction is open and nothing is locked.
    """

    load_questions: Callable[[Collection[Device]], Mapping[int, Hashable]]
    ask: Callable[[Mapping[int, Any], float], Mapping[int, HolderCheckResult]]


@dataclass(frozen=True)
class HolderAnswer:
    """The answer of a holder check to one question, and the generation that the device had then."""

    generation: int
    question: Hashable
    result: HolderCheckResult


@dataclass(frozen=True)
class HolderAnswers:
    """The answers of all holder checks, by the name of the check and the device's id."""

    answers: Mapping[tuple[str, int], HolderAnswer] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceHolders:
    """The holders of some locked devices: the results of all checks, by the device's id and the check's name."""

    results: Mapping[int, Mapping[str, HolderCheckResult]]

    def refuse_unless_free(self, device: Device, act: str) -> None:
        """Raise RefusedError unless nobody holds the device, and all checks could answer.

        The reason is IN_USE, with the holders, or UNAVAILABLE, with the check that could not answer. `act` completes
        "it cannot be ..." in the message.
        """
        self.refuse_if_held(device, act)
        for name, result in self.results[device.pk].items():
            if result.unknown:
                raise RefusedError(
                    RefusalReason.UNAVAILABLE,
                    f"It is unknown whether device {device.uuid} is held ({name}: {result.unknown}).",
                )

    def refuse_if_held(self, device: Device, act: str) -> None:
        """Raise RefusedError IN_USE if a holder of the device is known; `act` as in `refuse_unless_free`."""
        if holders := [holder for result in self.results[device.pk].values() for holder in result.holders]:
            raise RefusedError(
                RefusalReason.IN_USE, f"Device {device.uuid} is held by {', '.join(holders)}: it cannot be {act}."
            )

    def refuse_unless_all_free(self, acts: Mapping[Device, str]) -> None:
        """Do the same as `refuse_unless_free` for several devices, each with its `act`; a known holder of any of them
        is named before a check that could not answer."""
        for refuse in (self.refuse_if_held, self.refuse_unless_free):
            for device, act in acts.items():
                refuse(device, act)


NO_ANSWERS = HolderAnswers()
RELEASES = "releases"
"""Name of the result about guests that may still use a released handle."""
HOLDS_ADDRESS = """accelerators_device.id = ANY(%s) AND accelerators_acceleratorrequest.claim
  && accelerators_whole_function(accelerators_device.host_id, accelerators_device.address)"""
"""Condition: the request holds the function at the address of one of these devices, or a part of it."""
IS_RELEASED_OF_DEVICE = """accelerators_device.id = ANY(%s) AND (
  accelerators_deployable.device_id = accelerators_device.id OR accelerators_releasedhandle.claim
  && accelerators_whole_function(accelerators_device.host_id, accelerators_device.address))"""
"""Condition: the released handle is one of these devices', or claims the function at the address of one of them, or a
part of it."""
HOLDER_CHECKS: Registry[HolderCheck] = Registry("holder check")
"""Services that may know who holds a device. `ask_holders` asks all of them."""


def ask_holders(devices: Collection[Device], *, despite_releases: bool = False) -> HolderAnswers:
    """Ask all holder checks about these devices, for HOLDER_CHECKS_TIMEOUT_S at most in all, and return the answers.

    Call it before a transaction is opened or anything is locked, and give the answers to `find_holders` under the lock.
    Services are not asked about devices that our own tables show as held, or about which an earlier check has answered
    that they are held, or could not answer: these cannot be free. The time that is left is shared by the checks that
    are left. With `despite_releases`, services are asked about devices with released handles, too. `host` of the
    devices must be loaded.
    """
    give_up_at = time.monotonic() + HOLDER_CHECKS_TIMEOUT_S
    answers: dict[tuple[str, int], HolderAnswer] = {}
    if not devices or not HOLDER_CHECKS:
        return HolderAnswers(answers)
    by_id = {device.pk: device for device in devices}
    held = {
        pk
        for pk, results in _find_own_holders(by_id).items()
        if any(result.holders for name, result in results.items() if not (despite_releases and name == RELEASES))
    }
    left = [device for device in devices if device.pk not in held]
    for number, (name, check) in enumerate(HOLDER_CHECKS.items()):
        questions = check.load_questions(left)
        seconds = (give_up_at - time.monotonic()) / (len(HOLDER_CHECKS) - number)
        results = check.ask(questions, seconds) if questions and seconds > 0 else {}
        for pk, question in questions.items():
            result = results.get(pk, HolderCheckResult(unknown=NO_TIME_LEFT))
            answers[name, pk] = HolderAnswer(by_id[pk].generation, question, result)
        left = [device for device in left if _is_still_free(answers.get((name, device.pk)))]
    return HolderAnswers(answers)


def _is_still_free(answer: HolderAnswer | None) -> bool:
    """Return True unless this answer of a check, None if it had nothing to ask, names a holder or is unknown."""
    return answer is None or answer.result == HolderCheckResult()


def find_holders(
    devices: Collection[Device], answers: HolderAnswers, requests: Mapping[int, Sequence[str]] | None = None
) -> DeviceHolders:
    """Return the holders of these devices, by our own tables and by the answers that `ask_holders` collected before.

    Call it inside the transaction that locked the devices' rows: a bind needs a shared lock on them. An answer counts
    only if the device's generation and the question are still the same; otherwise it is unknown who holds the device.
    `requests` are those of `find_requests_of_devices`; without them, it is called. The number of statements is
    constant.
    """
    results = _find_own_holders([device.pk for device in devices], requests)
    for name, check in HOLDER_CHECKS.items():
        questions = check.load_questions(devices)
        for device in devices:
            answer, question = answers.answers.get((name, device.pk)), questions.get(device.pk)
            if question is None:
                continue
            is_valid = answer and (answer.generation, answer.question) == (device.generation, question)
            results[device.pk][name] = answer.result if answer and is_valid else HolderCheckResult(unknown=NOT_ASKED)
    return DeviceHolders(results)


def find_known_holders(
    devices: Collection[Device], requests: Mapping[int, Sequence[str]] | None = None
) -> DeviceHolders:
    """Return who holds these devices by our own tables alone, before other services are asked. Locks nothing.

    `requests` are those of `find_requests_of_devices`; without them, it is called. Costs one statement with them, else
    two, and none without devices.
    """
    return DeviceHolders(_find_own_holders([device.pk for device in devices], requests))


def _find_own_holders(
    devices: Collection[int], requests: Mapping[int, Sequence[str]] | None = None
) -> dict[int, dict[str, HolderCheckResult]]:
    """Return the holders of these devices that our own tables know: requests, and guests that may still use a released
    handle. See `find_known_holders`."""
    requests = find_requests_of_devices(devices) if requests is None else requests
    releases: dict[int, list[str]] = {pk: [] for pk in devices}
    for pk, release in find_releases_of_devices(devices) if devices else ():
        releases[pk].append(f"a guest, perhaps: {release.description}")
    return {
        pk: {
            "requests": HolderCheckResult(tuple(requests[pk][:MAX_HOLDERS_NAMED])),
            RELEASES: HolderCheckResult(tuple(releases[pk][:MAX_HOLDERS_NAMED])),
        }
        for pk in devices
    }


def find_requests_of_device(device: Device) -> tuple[str, ...]:
    """Return up to MAX_HOLDERS_NAMED requests that hold a handle of the device or are being bound to it.

    Reads rows without locking them.
    """
    rows = query_requests_of_devices([device.pk], "uuid", "instance_uuid")[:MAX_HOLDERS_NAMED]
    return tuple(_describe_request(uuid, instance) for _, uuid, instance in rows)


def find_requests_of_devices(devices: Collection[int]) -> dict[int, list[str]]:
    """Return all requests that hold a handle of each of these devices or are being bound to it, by device id.

    Reads rows without locking them. Costs one statement, and none without devices.
    """
    requests: dict[int, list[str]] = {pk: [] for pk in devices}
    for pk, uuid, instance in query_requests_of_devices(devices, "uuid", "instance_uuid") if devices else ():
        requests[pk].append(_describe_request(uuid, instance))
    return requests


def _describe_request(uuid: UUID, instance: UUID | None) -> str:
    """Return a request as a refusal names it."""
    return f"request {uuid} of instance {instance}"


def find_releases_of_devices(devices: Collection[int]) -> list[tuple[int, ReleasedHandle]]:
    """Return the released PCI handles of these devices that their hosts have not confirmed as unused; one statement.

    A function at a device's PCI address, or a part of it, that was released through another device also counts: it is
    the same hardware. Each handle stands behind the id of the device of `devices` that it concerns, and may stand there
    more than once. Handles that are made on the host are left out: the agent knows them, refuses destructive acts while
    they exist, and carries out the commands of a device in their order, so that the detach comes first.
    """
    releases = ReleasedHandle.objects.filter(handle__attach_type=HandleType.PCI)
    of_devices = releases.select_related("handle__deployable").extra(
        tables=["accelerators_device"], where=[IS_RELEASED_OF_DEVICE], params=[list(devices)]
    )
    concerned = RawSQL("accelerators_device.id", (), output_field=IntegerField())
    return [(release.concerned_device, release) for release in of_devices.annotate(concerned_device=concerned)]


def _query_holding_requests() -> QuerySet[AcceleratorRequest]:
    """Query the requests that hold a unit or are being bound to one."""
    return AcceleratorRequest.objects.filter(state__in=["BindStarted", "Bound"])


def build_held_condition(device: str) -> Q:
    """Return the condition that `query_requests_of_devices` finds a request for the device, also one that holds the
    same hardware through another device.

    `device` is the path from the queried rows to the device; "pk" if the rows are devices.
    """
    holding_requests = _query_holding_requests()
    conditions = [holding_requests.filter(**{path: OuterRef(device)}) for path in HOLDER_PATHS]
    conditions.append(holding_requests.filter(_claims_address_of(device)))
    return reduce(or_, (Q(Exists(requests)) for requests in conditions))


def build_released_condition(device: str) -> Q:
    """Return the condition that `find_releases_of_devices` finds a released handle for the device: a guest may still
    use the device, although no request holds it. `device` is as for `build_held_condition`."""
    releases = ReleasedHandle.objects.filter(handle__attach_type=HandleType.PCI)
    of_device = releases.filter(handle__deployable__device=OuterRef(device))
    return Q(Exists(of_device)) | Q(Exists(releases.filter(_claims_address_of(device))))


def _claims_address_of(device: str) -> Func:
    """Return the condition, for a subquery, that a row claims the function at the device's address or a part of it."""
    prefix = "" if device == "pk" else f"{device}__"
    return Func(
        OuterRef(f"{prefix}host_id"),
        OuterRef(f"{prefix}address"),
        template="claim && accelerators_whole_function(%(expressions)s)",
        output_field=BooleanField(),
    )


def query_requests_of_devices(devices: Collection[int], *columns: str) -> QuerySet[Any, Any]:
    """Query the requests that hold a handle of these devices or are being bound to them (BindStarted, Bound).

    A request that holds the function at a device's PCI address, or a part of it, through another device also counts:
    it is the same hardware. Each row is the device id followed by `columns`. The query is a UNION, because with OR
    PostgreSQL would scan all requests.
    """
    holding_requests = _query_holding_requests().order_by()
    by_deployable, by_handle = (
        holding_requests.filter(**{f"{path}__in": devices}).values_list(path, *columns) for path in HOLDER_PATHS
    )
    by_address = holding_requests.extra(tables=["accelerators_device"], where=[HOLDS_ADDRESS], params=[list(devices)])
    return by_deployable.union(
        by_handle, by_address.annotate(device=RawSQL("accelerators_device.id", ())).values_list("device", *columns)
    )


def affects_others(device: Device, act: str) -> bool:
    """Return whether the driver declares that `act` on this device affects other devices. `device.host` must be
    loaded."""
    return _get_affected_prefix(device, act) is not None


def _get_affected_prefix(device: Device, act: str) -> str | None:
    """Return the beginning of the addresses of the devices that `act` on this device affects; None if it affects no
    other."""
    scope = driver_status.get_declared_scope(device.host.drivers.get(device.driver, {}), act)
    return get_affected_prefix(scope, device.address)


def find_affected_siblings(device: Device, act: str) -> list[Device]:
    """Return the other devices of the host that `act` on this device affects, by their ids; retired ones are left out.

    Costs one statement, and none if the driver declares that the act affects the device alone. `device.host` must be
    loaded.
    """
    prefix = _get_affected_prefix(device, act)
    if prefix is None:
        return []
    others = Device.objects.filter(host=device.host_id).exclude(pk=device.pk).exclude(state=DeviceState.RETIRED)
    return list((others.filter(address__startswith=prefix) if prefix else others).order_by("id"))


def find_affected_outside(selected: QuerySet[Device], act: str) -> list[Device]:
    """Return the devices that are not selected, and that `act` on the selected ones affects, by their ids.

    Retired devices are left out; `host` is loaded. Costs two statements, whatever the size of the selection, and one if
    no driver of these devices declares that the act affects more than the device.
    """
    path = (Value("declares"), Value("affects"), Value(act))
    scope = Func(F("host__drivers"), F("driver"), *path, function="jsonb_extract_path_text", output_field=TextField())
    declared = (
        selected.order_by().annotate(scope=scope).filter(scope__isnull=False).values_list("host_id", "scope", "address")
    )
    prefixes: dict[int, set[str]] = {}
    for host_id, scope_name, address in declared:
        if (prefix := get_affected_prefix(scope_name, address)) is not None:
            prefixes.setdefault(host_id, set()).add(prefix)
    if not prefixes:
        return []
    others = Device.objects.filter(host__in=prefixes).exclude(pk__in=selected.order_by().values("pk"))
    return [
        device
        for device in others.exclude(state=DeviceState.RETIRED).select_related("host").order_by("id")
        if (device.address or "").startswith(tuple(prefixes[device.host_id]))
    ]
