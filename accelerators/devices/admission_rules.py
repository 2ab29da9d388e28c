"""Create, change and delete admission rules, and forecast which devices a rule would move.

Rules decide what becomes of a device that is found: inactive, ready or quarantined. A merge of reports applies them to
new devices by itself (`diff.apply_admission_rules`); a bulk action applies them to devices that were found before
(`accelerators.workflows.bulk_admission`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connection
from django.db.models import Count, Q, QuerySet

from accelerators import conductor, safety
from accelerators.domain import admission, generations
from accelerators.domain.admission import AdmissionFacts, EnabledRule
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import AdmittedState, EventSource
from accelerators.models import AdmissionRule, Device
from accelerators.runtime import database_clock

MAX_RULES = 200
"""Maximum number of rules; each device that is found is compared with all of them."""
RULE_FIELDS = ("name", "order", "host", "driver", "vendor", "model", "type", "action", "enabled")
FACT_COLUMNS = ("host__name", "driver", "vendor", "model", "type")
"""The columns of a device that are its `AdmissionFacts`."""
DECIDING_ADMISSIONS = (AdmittedState.READY, AdmittedState.QUARANTINED)
"""The admissions that change an inactive device; a rule for `inactive` leaves it as it is."""

_RULES_LOCK_KEY = 0x72756C65


def create_rule(values: Mapping[str, Any], caller: Caller, source: EventSource = EventSource.API) -> AdmissionRule:
    """Create a rule from validated values. Raises RefusedError CONFLICT if the name is in use, or there are MAX_RULES
    rules."""
    rule = AdmissionRule(**values)
    try:
        with conductor.writing():
            # An advisory lock is a PostgreSQL function: no row can be locked against the creation of another rule.
            connection.cursor().execute("SELECT pg_advisory_xact_lock(%s)", [_RULES_LOCK_KEY])
            if AdmissionRule.objects.count() >= MAX_RULES:
                raise RefusedError(RefusalReason.CONFLICT, f"There are {MAX_RULES} rules already: delete one first.")
            rule.save()
            event_changes = {field: [None, getattr(rule, field)] for field in RULE_FIELDS if getattr(rule, field) != ""}
            _record_rule_event("created", rule, event_changes, caller, source)
    except IntegrityError:
        raise _build_name_taken_error(rule.name) from None
    return rule


def edit_rule(
    uuid: UUID,
    values: Mapping[str, Any],
    caller: Caller,
    source: EventSource = EventSource.API,
    *,
    generation: int | None = None,
) -> AdmissionRule:
    """Change a rule, with an event; write nothing if `values` change nothing.

    Devices that the rule admitted keep their state. `values` must be validated. Raises RefusedError NOT_FOUND, or
    CONFLICT if the name is in use; ChangedMeanwhileError if the rule's generation is not `generation`.
    """
    try:
        with conductor.writing():
            rule = _load_rule_for_update(uuid)
            before = {field: getattr(rule, field) for field in values}
            changes = {field: [before[field], values[field]] for field in values if before[field] != values[field]}
            if changes:
                generations.refuse_if_changed(f"Admission rule {rule.name}", rule.generation, generation)
                rule.generation += 1
                for field, value in values.items():
                    setattr(rule, field, value)
                rule.updated_at = database_clock.now()
                rule.save()
                _record_rule_event("changed", rule, changes, caller, source)
    except IntegrityError:
        raise _build_name_taken_error(values.get("name", "")) from None
    return rule


def delete_rule(
    uuid: UUID, caller: Caller, source: EventSource = EventSource.API, *, generation: int | None = None
) -> None:
    """Delete a rule; devices that it admitted keep their state. Raises RefusedError NOT_FOUND, and
    ChangedMeanwhileError if the rule's generation is not `generation`."""
    with conductor.writing():
        rule = _load_rule_for_update(uuid)
        generations.refuse_if_changed(f"Admission rule {rule.name}", rule.generation, generation)
        event_changes = {field: [getattr(rule, field), None] for field in RULE_FIELDS if getattr(rule, field) != ""}
        rule.delete()
        _record_rule_event("deleted", rule, event_changes, caller, source)


@dataclass(frozen=True)
class RuleReach:
    """The inactive devices that rules would move now: their number by rule, and by host."""

    by_rule: Counter[str]
    by_host: Counter[str]

    @property
    def total(self) -> int:
        """Return the number of devices."""
        return self.by_host.total()

    @property
    def needs_confirmation(self) -> bool:
        """Return whether a person must confirm it separately: it would move a device."""
        return self.total > 0


def forecast_rule(values: Mapping[str, Any], rule: AdmissionRule | None = None) -> RuleReach:
    """Return which inactive devices a rule would move if it were created with these values, or changed to them, and the
    rules were applied. Devices that `rule` would move to the same state without the change do not count. Two
    statements; changes nothing."""
    stored = AdmissionRule.objects.filter(enabled=True).order_by("order", "id")
    before = [(row.order, row.pk, _to_enabled_rule(row)) for row in stored]
    changed = AdmissionRule(**{field: getattr(rule, field) for field in RULE_FIELDS} if rule else {})
    for field, value in values.items():
        setattr(changed, field, value)
    own = _to_enabled_rule(changed)
    after = [entry for entry in before if rule is None or entry[1] != rule.pk]
    if changed.enabled:
        after.append((changed.order, rule.pk if rule else sys.maxsize, own))
    rules_before = [one for _, _, one in before]
    own_before = next((one for _, pk, one in before if rule and pk == rule.pk), None)

    def is_moved_newly(facts: AdmissionFacts, deciding: EnabledRule) -> bool:
        """Return whether the rule decides about a device with these facts, and did not decide the same before."""
        if deciding is not own:
            return False
        decided = admission.first_matching_rule(rules_before, facts)
        return decided is None or decided is not own_before or decided.action != own.action

    ordered = sorted(after, key=lambda entry: entry[:2])
    return _compute_reach([one for _, _, one in ordered], is_moved_newly)


def _compute_reach(rules: Sequence[EnabledRule], counts: Callable[[AdmissionFacts, EnabledRule], bool]) -> RuleReach:
    """Return the devices that these rules would move, if `counts` says so for the device's facts and the deciding
    rule."""
    columns_of_devices = query_undecided_devices().order_by().values_list(*FACT_COLUMNS, "cannot_be_installed")
    reach = RuleReach(Counter(), Counter())
    for *columns, cannot_be_installed, number in columns_of_devices.annotate(number=Count("id")).iterator():
        facts = AdmissionFacts(*columns)
        rule = admission.first_matching_rule(rules, facts)
        if rule and _is_moved(rule, cannot_be_installed) and counts(facts, rule):
            reach.by_rule[rule.name] += number
            reach.by_host[facts.host] += number
    return reach


def _to_enabled_rule(row: AdmissionRule) -> EnabledRule:
    """Return a row as the rule that is compared with devices."""
    return EnabledRule(*(getattr(row, name) for name in EnabledRule.__struct_fields__))


def _is_moved(rule: EnabledRule | None, cannot_be_installed: bool) -> bool:
    """Return whether a device about which this rule decides would be moved; None is no rule. `cannot_be_installed` is
    as in `query_undecided_devices`."""
    if rule is None or rule.action not in DECIDING_ADMISSIONS:
        return False
    return not (cannot_be_installed and rule.action == AdmittedState.READY)


def query_undecided_devices() -> QuerySet[Device]:
    """Return the devices that rules may decide about: inactive, not draining, not busy with a command, held by nobody,
    and on a host that is not being removed.

    The column `cannot_be_installed` says that the driver has to install a device before it is ready, and that a guest
    may still use a released handle of it.
    """
    undecided = Device.objects.filter(state="inactive", drain_to__isnull=True, busy_with__isnull=True)
    free = undecided.filter(~safety.build_held_condition("pk"), host__removing_since__isnull=True)
    return free.annotate(cannot_be_installed=Q(to_install__gt="") & safety.build_released_condition("pk"))


def query_devices_to_move() -> QuerySet[Device]:
    """Return the inactive devices that the enabled rules would move now. Two statements, and one for the result."""
    rules, rule_by_facts = load_enabled_rules(), dict[AdmissionFacts, EnabledRule | None]()
    columns_of_devices = query_undecided_devices().order_by().values_list("id", "cannot_be_installed", *FACT_COLUMNS)
    ids = []
    for pk, cannot_be_installed, *columns in columns_of_devices.iterator():
        facts = AdmissionFacts(*columns)
        if facts not in rule_by_facts:
            rule_by_facts[facts] = admission.first_matching_rule(rules, facts)
        if _is_moved(rule_by_facts[facts], cannot_be_installed):
            ids.append(pk)
    return Device.objects.filter(id__in=ids)


def load_enabled_rules() -> tuple[EnabledRule, ...]:
    """Return the enabled rules in the order in which they are tried."""
    rules = AdmissionRule.objects.filter(enabled=True).order_by("order", "id")
    return tuple(EnabledRule(*row) for row in rules.values_list(*EnabledRule.__struct_fields__))


def _load_rule_for_update(uuid: UUID) -> AdmissionRule:
    """Lock a rule's row and return it. Raises RefusedError NOT_FOUND."""
    rule = AdmissionRule.objects.select_for_update().filter(uuid=uuid).first()
    if rule is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"There is no admission rule with uuid={uuid}.")
    return rule


def _build_name_taken_error(name: str) -> RefusedError:
    """Return the refusal for a rule's name that is in use."""
    return RefusedError(RefusalReason.CONFLICT, f"An admission rule with the name {name} already exists.")


def _record_rule_event(
    verb: str, rule: AdmissionRule, changes: dict[str, Any], caller: Caller, source: EventSource
) -> None:
    """Write the event `rule.VERB` about a rule; `changes` maps each changed field to [before, after]."""
    conductor.record_event(f"rule.{verb}", source, caller.name, subject=(rule.uuid, rule.name), changes=changes)
