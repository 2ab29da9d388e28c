"""The one rule that decides whether a device is offered: its units can be bound, and Placement shows them as available.

A device is offered while its state is `ready` and its health is not `failed`. A failure ends when the driver reports
`ok` or `degraded` again; `unknown` does not end a failure, because it does not show that the device works. A unit that
a request holds is not affected: only free units leave the offer.

The rule exists as a function (`is_offered`), as SQL (`IS_OFFERED_SQL`), and as a condition for device queries
(`accelerators.models.devices.build_offered_condition`). All three are made from OFFERED_STATE and WITHHELD_HEALTH.
"""

from __future__ import annotations

from accelerators.domain.states import DeviceState, Health
from drivers.inventory import MAX_TEXT

OFFERED_STATE = DeviceState.READY
"""The only state in which a device is offered."""
WITHHELD_HEALTH = Health.FAILED
"""The only health with which a device is not offered, whatever its state."""
IS_OFFERED_SQL = f"d.state = '{OFFERED_STATE.value}' AND d.status <> '{WITHHELD_HEALTH.value}'"
"""SQL condition that is true if the device with the table alias `d` is offered."""
UNREADABLE_NOTE = " (its driver cannot read its health now)"
"""Text that is added to the reason of a failure while the driver reports `unknown`."""


def is_offered(state: str, health: str) -> bool:
    """Return whether a device in this state (`DeviceState`) and with this health (`Health`) is offered."""
    return state == OFFERED_STATE and health != WITHHELD_HEALTH


def describe_withheld_health(health: str) -> str:
    """Return why a device with this health is not offered, and when it will be; '' if its health does not prevent it.

    The text is one clause without a full stop. It says nothing about the hardware, because tenants see it, too.
    """
    if health != WITHHELD_HEALTH:
        return ""
    return (
        f"the health of its device is {WITHHELD_HEALTH}: it is offered again when its driver reports"
        f" {Health.OK} or {Health.DEGRADED}"
    )


def combine_health(stored: tuple[str, str], reported: tuple[str, str]) -> tuple[str, str]:
    """Return the health of a device and its reason, as they are to be stored.

    `stored` and `reported` are pairs of a health and its reason. `reported` is returned, except that `unknown` does not
    end a failure: then the device stays failed with the stored reason, to which `UNREADABLE_NOTE` is added. The stored
    reason is shortened for this if the text would have more than MAX_TEXT characters.
    """
    (stored_health, stored_reason), (reported_health, _) = stored, reported
    if stored_health != WITHHELD_HEALTH or reported_health != Health.UNKNOWN:
        return reported
    reason = stored_reason.removesuffix(UNREADABLE_NOTE)[: MAX_TEXT - len(UNREADABLE_NOTE)]
    return stored_health, reason + UNREADABLE_NOTE
