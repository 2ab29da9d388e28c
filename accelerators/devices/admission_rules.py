"""Create, change and delete admission rules, and apply them to devices that were found before the rules were made.

Rules decide what becomes of a device that is found: inactive, ready or quarantined. A merge of reports applies them to
new devices by itself (`diff.admit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connection
from django.db.models import QuerySet

from accelerators import conductor
from accelerators.devices.lifecycle import SLICE, Step, locked, standing, store
from accelerators.domain import admission
from accelerators.domain.actions import Action, decide
from accelerators.domain.admission import Facts, Rule
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import Admission, Source
from accelerators.inventory import merge_sql as sql
from accelerators.models import AdmissionRule, Device

MOST = 200
"""Maximum number of rules; each device that is found is compared with all of them."""
FIELDS = ("name", "order", "host", "driver", "vendor", "model", "type", "action", "enabled")
ACTIONS = {Admission.READY: Action.ENABLE, Admission.QUARANTINED: Action.QUARANTINE}
"""The action that a rule takes on an inactive device; a rule for `inactive` leaves it as it is."""

_LOCK = 0x72756C65


def create(values: Mapping[str, Any], caller: Caller, source: Source = Source.API) -> AdmissionRule:
    """Create a rule from validated values. Raises RefusedError CONFLICT if the name is in use, or there are MAX_RULES
    rules."""
    rule = AdmissionRule(**values)
    try:
        with conductor.writing():
            connection.cursor().execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            if AdmissionRule.objects.count() >= MOST:
                raise RefusedError(Reason.CONFLICT, f"There are {MOST} rules already: delete one first.")
            rule.save()
            shown = {field: [None, getattr(rule, field)] for field in FIELDS if getattr(rule, field) != ""}
            _record("created", rule, shown, caller, source)
    except IntegrityError:
        raise _taken(rule.name) from None
    return rule


def edit(uuid: UUID, values: Mapping[str, Any], caller: Caller, source: Source = Source.API) -> AdmissionRule:
    """Change a rule; devices that it admitted keep their state. Raises RefusedError UNKNOWN; CONFLICT for a name in
    use."""
    try:
        with conductor.writing():
            rule = _locked(uuid)
            before = {field: getattr(rule, field) for field in values}
            changes = {field: [before[field], values[field]] for field in values if before[field] != values[field]}
            if changes:
                for field, value in values.items():
                    setattr(rule, field, value)
                rule.updated_at = datetime.now(UTC)
                rule.save()
                _record("changed", rule, changes, caller, source)
    except IntegrityError:
        raise _taken(values.get("name", "")) from None
    return rule


def delete(uuid: UUID, caller: Caller, source: Source = Source.API) -> None:
    """Delete a rule; devices that it admitted keep their state. Raises RefusedError UNKNOWN."""
    with conductor.writing():
        rule = _locked(uuid)
        shown = {field: [getattr(rule, field), None] for field in FIELDS if getattr(rule, field) != ""}
        rule.delete()
        _record("deleted", rule, shown, caller, source)


def _undecided() -> QuerySet[Device]:
    """Return the devices that rules may decide about: inactive, not draining, and not busy with a command."""
    return Device.objects.filter(state="inactive", drain_to__isnull=True, busy_with__isnull=True)


def preview() -> Counter[str]:
    """Count, by the rule's name, the inactive devices that `apply_rules` would move now. Two statements; changes
    nothing."""
    rules = _enabled()
    found = _undecided().values_list("host__name", "driver", "vendor", "model", "type").iterator()
    decided = (admission.first(rules, Facts(*facts)) for facts in found)
    return Counter(rule.name for rule in decided if rule and rule.action in ACTIONS)


def apply(caller: Caller) -> Iterator[int]:
    """Apply the rules to every inactive device, in slices; yield the number of devices that each slice moved.

    Each slice is one transaction, so slices that are done stay done if the caller stops. The actor of each event is the
    rule; its reason names the caller.
    """
    last = 0
    while True:
        ids = list(_undecided().filter(id__gt=last).order_by("id").values_list("id", flat=True)[:SLICE])
        if not ids:
            return
        last = ids[-1]
        with conductor.writing():
            rules = _enabled()
            steps = [
                step for device in locked(_undecided().filter(id__in=ids)) if (step := _step(rules, device, caller))
            ]
            store(steps, Source.RULE)
        yield len(steps)


def _step(rules: tuple[Rule, ...], device: Device, caller: Caller) -> Step | None:
    """Return the change that the first matching rule makes to an inactive device; None if it stays as it is."""
    rule = admission.first(rules, Facts(device.host.name, device.driver, device.vendor, device.model, device.type))
    action = ACTIONS.get(Admission(rule.action)) if rule else None
    if rule is None or action is None:
        return None
    now = standing(device)
    reason = f"admitted by rule {rule.name}, applied by {caller.name}"
    return Step(device, now, decide(action, now), rule.name, reason, rule.by)


def _enabled() -> tuple[Rule, ...]:
    """Return the enabled rules in the order in which they are tried."""
    with connection.cursor() as cursor:
        cursor.execute(sql.RULES)
        return admission.decode(cursor.fetchone()[0])


def _locked(uuid: UUID) -> AdmissionRule:
    """Load and lock a rule. Raises RefusedError UNKNOWN."""
    found = AdmissionRule.objects.select_for_update().filter(uuid=uuid).first()
    if found is None:
        raise RefusedError(Reason.UNKNOWN, f"There is no admission rule with uuid={uuid}.")
    return found


def _taken(name: str) -> RefusedError:
    """Return the refusal for a rule's name that is in use."""
    return RefusedError(Reason.CONFLICT, f"An admission rule with the name {name} already exists.")


def _record(what: str, rule: AdmissionRule, changes: dict[str, Any], caller: Caller, source: Source) -> None:
    """Write the event `rule.<what>`."""
    conductor.record(f"rule.{what}", source, caller.name, subject=(rule.uuid, rule.name), changes=changes)
