"""Recover after a restart of the agent or a reboot of the host, before the first report is made.

A command that was begun is never run again: its driver is asked for a plan, and an empty plan means that the command
was completed. What was made on a device before a reboot is made again, in the same order.
"""

from __future__ import annotations

import sqlite3

from agents import wire
from agents.host.execution.command_semantics import ACTS, Answer, acts_of, ask_of, settle
from agents.host.execution.images import Images
from agents.host.execution.plan_runner import PlanFailedError, PlanRun, Site
from agents.host.journal.command_log import Applied
from drivers.errors import DriverError


async def verdict(site: Site, images: Images, command: wire.Command, boot: str) -> Answer:
    """Find out how an interrupted command ended; change nothing on the host. `boot_id` is that of its start.

    Return *succeeded* when the driver has no steps left, after storing the effects in the command log; else *unknown*.
    The driver is not asked when it no longer runs or when the command is not an act. Raises nothing of the driver or
    the journal.
    """
    how = "the agent stopped" if boot == site.boot else "the host was rebooted"
    unknown = f"interrupted, because {how} while it ran; its outcome is unknown"
    planner = site.drivers.get(command.driver)
    if command.op not in ACTS or planner is None:
        return Answer("unknown", unknown)
    look, said = command.driver, []
    ask = ask_of(command, images.here(command.image) if command.image else None, site)
    try:
        for act in acts_of(command):
            plan = await planner.plan(act, ask)
            if plan.steps:
                return Answer("unknown", f"{unknown}: still to be done: {plan.steps[0].does}", look=look)
            said.append(plan.said)
        settle(command, ask, site.ledger, site.boot)
    except (DriverError, sqlite3.OperationalError) as error:
        return Answer("unknown", f"{unknown}: {error}", look=look)
    done = "; ".join(filter(None, said)) or "nothing is left to be done"
    return Answer("succeeded", f"interrupted, because {how} while it ran, but completed: {done}", look=look)


def lost(site: Site) -> dict[tuple[str, str], list[Applied]]:
    """Return, by (driver, device key), what was made before the last reboot and has not been restored since.

    Entries of drivers that do not run, and of acts that are not known to be completed, are left out.
    """
    found: dict[tuple[str, str], list[Applied]] = {}
    for one in site.ledger.applied():
        if one.boot not in ("", site.boot) and one.driver in site.drivers:
            found.setdefault((one.driver, one.key), []).append(one)
    return found


async def put_back(site: Site, made: list[Applied]) -> None:
    """Restore these entries of one device, in order; an entry that still holds costs no step.

    Images are not restored: PlanFailedError is raised if the device has lost its image. Raises PlanFailedError at the
    first entry that fails; the later ones are not tried.
    """
    for one in made:
        act = one.slot.partition(":")[0]
        try:
            if act == "program":
                await _still_programmed(site, one)
            else:
                performance = PlanRun(site, one.driver, one.ask, lambda *_: None)
                await performance.run(act)  # type: ignore[arg-type]
            site.ledger.still(one, site.boot)
        except PlanFailedError as ended:
            text = f"after the reboot {_what(one)} could not be restored: {ended.text}"
            raise PlanFailedError(ended.outcome, text, hand=ended.hand) from None
        except (DriverError, sqlite3.OperationalError) as error:
            raise PlanFailedError("failed", f"after the reboot {_what(one)} could not be restored: {error}") from None


async def _still_programmed(site: Site, one: Applied) -> None:
    """Raise PlanFailedError when the device has lost its image.

    The host keeps no images, so a new command has to program the device.
    """
    plan = await site.drivers[one.driver].plan("program", one.ask)
    if plan.steps:
        raise PlanFailedError("failed", "the device has lost it: program the device again")


def _what(one: Applied) -> str:
    """Name the entry in words for an error text."""
    if one.slot == "program":
        return f"the image {one.ask.image.name if one.ask.image else ''}".rstrip()
    if one.ask.uuid:
        return f"the handle {one.ask.uuid} of {one.ask.consumer}"
    return f"its {one.slot}"
