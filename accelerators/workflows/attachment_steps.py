"""The steps of an attachment that the database takes: requests made, bound, taken back.

Called by the job `attachments` (`placement_sync.jobs.attachments`). It fails whole or not at all. Each step is one
transaction with what is recorded of it; who is asked outside is asked before anything is locked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from accelerators import conductor
from accelerators.domain import groups
from accelerators.domain.caller import ADMIN, Caller, request_id
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import RequestState
from accelerators.models import AcceleratorRequest, Attachment, DeviceProfile
from accelerators.models.attachments import AttachmentState
from accelerators.requests import binding, profiles
from accelerators.requests.binding import Bind
from accelerators.requests.candidates import Choice
from accelerators.workflows.attachments import KIND, Moved, advance, choice, handles, host_of, looked_up, refuse_mixed

BATCH = 50
REMEMBERED = timedelta(days=30)
"""Attachments are kept so long after their end; their events stay."""
LATE = timedelta(minutes=10)
"""What was begun so long ago is not under way any more."""
SERVICE = "service"

_S = AttachmentState

LOST = """
SELECT a.id FROM accelerators_attachment a WHERE a.state = 'attached' AND cardinality(a.requests) > (
  SELECT count(*) FROM accelerators_acceleratorrequest q
  WHERE q.uuid = ANY(a.requests) AND q.state = 'Bound' AND q.instance_uuid = a.instance)
ORDER BY a.id LIMIT %(count)s::bigint
"""


def take_up(row: Attachment) -> None:
    """asked → chosen: the requests are made, in the instance's project. Raises Refused, and nothing was made."""
    host = host_of(looked_up(str(row.instance)))
    with conductor.writing():
        chosen = choice(row, host)
        requests = binding.create(row.profile or _of_class(chosen, _service(row)), _service(row))
        if len(requests) != len(chosen.providers):
            raise Refused(Reason.AWAY, f"Profile {row.profile} is being changed: try again.")
        shares = {rp: {"resource_class": name, "amount": amount} for rp, (name, amount) in chosen.shares.items()}
        made = {"requests": requests, "providers": list(chosen.providers), "shares": shares, "host": host.name}
        advance(row, _S.ATTACHING, "chosen", f"{len(requests)} requests on {host.name}", **made)


def bind(row: Attachment) -> None:
    """claimed → attached, or binding while the host has to do something first. Raises Refused: it is to be undone.

    What Nova is told, `binding` sees to.
    """
    host = host_of(looked_up(str(row.instance)))
    if host.name != row.host:
        raise Refused(Reason.CONFLICT, f"Instance {row.instance} has moved from {row.host} to {host.name} meanwhile.")
    wanted = [
        Bind(str(request), row.host, str(provider), str(row.instance), row.project_id)
        for request, provider in zip(row.requests, row.providers, strict=True)
    ]
    binding.bind(wanted, _service(row), beside=True)
    # Another may have been bound since this was chosen.
    refuse_mixed(row, {handle.attach_type for handle in handles(row)})
    follow(row)


def follow(row: Attachment) -> bool:
    """Look how its requests are: attached when all are Bound. False: their host is at it yet. Raises Refused."""
    found = {request.uuid: request for request in AcceleratorRequest.objects.filter(uuid__in=row.requests)}
    states = {request.state for request in found.values() if request.instance_uuid == row.instance}
    failed = next((request.fault for request in found.values() if request.state == RequestState.BIND_FAILED), None)
    if failed is not None:
        raise Refused(Reason.CONFLICT, failed or "its bind failed")
    if len(found) < len(row.requests) or not states <= {RequestState.BOUND, RequestState.BIND_STARTED}:
        raise Refused(Reason.CONFLICT, "Its requests were taken away while they were being bound.")
    if states == {RequestState.BOUND}:
        advance(row, _S.ATTACHED, "bound", attached_at=datetime.now(UTC))
        return True
    if row.step != "binding":
        advance(row, _S.ATTACHING, "binding", f"{row.host} prepares it")
    return False


def undo(row: Attachment, fault: str) -> None:
    """It cannot be attached: take back what was done of it."""
    advance(row, _S.UNDOING, "", fault, fault=fault)


def fail(row: Attachment, fault: str) -> None:
    """It cannot be attached, and nothing was done of it."""
    advance(row, _S.FAILED, "", fault, fault=fault, ended_at=datetime.now(UTC))


def free(row: Attachment) -> None:
    """Its requests are unbound and deleted, as far as they are there; what was made on the host is ordered back."""
    with conductor.writing():
        there = AcceleratorRequest.objects.filter(uuid__in=row.requests).order_by("id")
        uuids = [str(uuid) for uuid in there.values_list("uuid", flat=True)]
        try:
            if uuids:
                binding.delete(uuids, _service(row))
        except Refused:  # somebody else deletes them in this very moment
            raise Moved from None
        advance(row, _S(row.state), "freed", f"{len(uuids)} requests")


def end(row: Attachment, text: str = "") -> None:
    """All is taken back."""
    ended = _S.DETACHED if row.state == _S.DETACHING else _S.FAILED
    advance(row, ended, "", text, ended_at=datetime.now(UTC))


def long_given_up(row: Attachment) -> bool:
    """Whether it is being taken back for so long that whatever was tried before has happened, or never will."""
    began = next(one["at"] for one in row.steps if one["step"] == row.state)
    return datetime.fromisoformat(began) < datetime.now(UTC) - LATE


def others(row: Attachment) -> dict[str, int]:
    """Provider → how much of it the instance's other requests stand for, Nova's and other attachments'."""
    held = AcceleratorRequest.objects.filter(instance_uuid=row.instance, attach_handle__isnull=False)
    there = held.filter(device_rp_uuid__in=row.providers).exclude(uuid__in=row.requests)
    halves: dict[str, int] = {}
    for provider, group in there.values_list("device_rp_uuid", "group"):
        # A Xilinx FPGA is asked for twice and claimed once (`groups.plan`).
        halves[str(provider)] = halves.get(str(provider), 0) + (1 if group.get(groups.XILINX) == "required" else 2)
    return {provider: -(-count // 2) for provider, count in halves.items()}


def watch() -> bool:
    """What was attached and whose requests others took away is to be detached; True when there was any."""
    lost = [id for (id,) in conductor.cursor().execute(LOST, {"count": BATCH}).fetchall()]
    if lost:
        with conductor.writing():
            for row in Attachment.objects.filter(id__in=lost, state=_S.ATTACHED).order_by("id").select_for_update():
                text = "its requests were taken away: the instance is deleted or shelved"
                advance(row, _S.DETACHING, "", text, fault=text)
                conductor.intend(KIND, {str(row.uuid): {}})
    return bool(lost)


def forget(now: datetime | None = None) -> None:
    """Delete some of those that ended long ago; their events stay."""
    old = Attachment.objects.filter(ended_at__lt=(now or datetime.now(UTC)) - REMEMBERED).order_by("ended_at")
    if uuids := list(old.values_list("pk", flat=True)[:BATCH]):
        with conductor.writing():
            Attachment.objects.filter(pk__in=uuids).delete()
            conductor.forgot("attachment", len(uuids), REMEMBERED)


@contextmanager
def asked_for(row: Attachment) -> Iterator[None]:
    """Events bear the id of the request that asked for it."""
    token = request_id.set(row.request_id)
    try:
        yield
    finally:
        request_id.reset(token)


def _of_class(chosen: Choice, who: Caller) -> str:
    """The profile behind a device that was asked for by itself: one of its class, made when it is needed first."""
    ((name, _),) = chosen.shares.values()
    profile, wanted = f"attach-{name}", [{f"resources:{name}": "1"}]
    if not DeviceProfile.objects.filter(name=profile).exists():
        try:
            text = "One of its class, for devices that are attached by themselves."
            profiles.create(profile, groups.check_groups(wanted), text, None, who)
        except groups.GroupError as error:
            raise Refused(Reason.INVALID, f"Class {name} cannot be asked for: {error}") from None
    if DeviceProfile.objects.get(name=profile).groups != wanted:
        raise Refused(Reason.CONFLICT, f"Profile {profile} asks for something else than one {name}: rename it.")
    return profile


def _service(row: Attachment) -> Caller:
    """On behalf of who asked, in the instance's project."""
    return Caller(row.actor, "", frozenset({ADMIN, SERVICE}), row.project_id, service=True)
