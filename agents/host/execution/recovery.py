"""Recover after a restart of the agent or a reboot of the host, before the first report is made.

A command that was begun is never run again: its driver is asked for a plan, and an empty plan means that the command
was completed. Objects that commands had made on a device before a reboot are made again, in the same order.
"""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import msgspec

from agents import wire
from agents.host.execution import preflight
from agents.host.execution.command_semantics import (
    ACTS,
    ExecutionResult,
    build_ask,
    describe_program,
    list_acts,
    record_effects,
)
from agents.host.execution.images import ImageCache
from agents.host.execution.plan_runner import HostContext, PlanFailedError, PlanRun, plan_act
from agents.host.journal.command_log import AppliedEffect
from drivers.errors import DriverError
from drivers.isolation.threads import run_in_thread
from drivers.plan import Act, Lifetime


async def determine_interrupted_result(
    context: HostContext, images: ImageCache, command: wire.Command, boot_id: str
) -> ExecutionResult:
    """Find out how an interrupted command ended; change nothing on the host.

    `boot_id` is the host's boot id at the time when the command began.

    Return *succeeded* when the driver has no steps left, after storing the effects in the command log; else *unknown*.
    The driver is not asked when it no longer runs or when the command is not an act. Errors of the driver and of the
    journal are caught; then the result is *unknown*.
    """
    cause = "the agent stopped" if boot_id == context.boot_id else "the host was rebooted"
    unknown_text = f"interrupted, because {cause} while it ran; its outcome is unknown"
    planner = context.drivers.get(command.driver)
    if command.op not in ACTS or planner is None:
        return ExecutionResult("unknown", unknown_text)
    driver, summaries = command.driver, []
    lifetime: Lifetime = "volatile"
    machine = context.machine_for(driver)
    ask = build_ask(command, images.to_driver_image(command.image) if command.image else None, context)
    try:
        for act in list_acts(command):
            plan = await plan_act(planner, act, ask)
            if plan.steps:
                return ExecutionResult(
                    "unknown", f"{unknown_text}: still to be done: {plan.steps[0].does}", rescan_driver=driver
                )
            detached = await run_in_thread(
                lambda act=act: preflight.check_detached(machine, act, ask)  # type: ignore[misc]
            )
            summaries.append(plan.said or detached)
            if act == "program":
                lifetime = plan.lifetime
        record_effects(command, ask, context.command_log, context.boot_id, lifetime)
    except (DriverError, sqlite3.OperationalError) as error:
        return ExecutionResult("unknown", f"{unknown_text}: {error}", rescan_driver=driver)
    summary = "; ".join(filter(None, summaries)) or "nothing is left to be done"
    return ExecutionResult(
        "succeeded",
        f"interrupted, because {cause} while it ran, but completed: {summary}",
        describe_program(command, context.boot_id, lifetime),
        rescan_driver=driver,
    )


def find_lost_effects(context: HostContext) -> dict[tuple[str, str], list[AppliedEffect]]:
    """Return, by (driver, device key), what was made before the last reboot and has not been restored since.

    Entries of drivers that do not run, and of acts that are not known to be completed, are left out.
    """
    lost_effects: dict[tuple[str, str], list[AppliedEffect]] = {}
    for effect in context.command_log.list_effects():
        if effect.boot_id not in ("", context.boot_id) and effect.driver in context.drivers:
            lost_effects.setdefault((effect.driver, effect.key), []).append(effect)
    return lost_effects


def locate_effect(context: HostContext, effect: AppliedEffect) -> AppliedEffect:
    """Return the entry with the PCI address at which its device was last reported; unchanged if it is not reported.

    A reboot may give a card another address. Its key is the same if it has a serial number that no other function has.
    """
    device = context.find_device(effect.driver, effect.key)
    if device is None or not device.address or not effect.ask.address:
        return effect
    return replace(effect, ask=msgspec.structs.replace(effect.ask, address=device.address))


async def restore_effects(context: HostContext, effects: list[AppliedEffect]) -> None:
    """Restore these entries of one device, in order, where the device was last reported. An entry whose effect still
    exists on the host needs no step.

    Images are not restored: the host keeps none, and the conductor has the device programmed again for the next request
    that needs it. PlanFailedError is raised if the device has lost its image while handles of it are attached. Raises
    PlanFailedError at the first entry that fails; the later ones are not tried.
    """
    for effect in (locate_effect(context, one) for one in effects):
        act = effect.slot.partition(":")[0]
        try:
            if act == "program":
                await _end_or_keep_program(context, effect)
            else:
                await _restore_effect(context, effect, act)  # type: ignore[arg-type]
                context.command_log.confirm_effect(effect, context.boot_id)
        except PlanFailedError as failure:
            text = f"after the reboot {_describe_effect(effect)} could not be restored: {failure.text}"
            raise PlanFailedError(failure.outcome, text, stuck_writer=failure.stuck_writer) from None
        except (DriverError, sqlite3.OperationalError) as error:
            raise PlanFailedError(
                "failed", f"after the reboot {_describe_effect(effect)} could not be restored: {error}"
            ) from None


async def _restore_effect(context: HostContext, effect: AppliedEffect, act: Act) -> None:
    """Carry out the act again. Raises PlanFailedError if it fails and its effect does not exist either.

    Nova may make a mediated device again at the same moment; then the driver has no steps left afterwards.
    """
    try:
        await PlanRun(context, effect.driver, effect.ask, lambda *_: None).run(act)
    except PlanFailedError as failure:
        if failure.stuck_writer is not None or (await context.drivers[effect.driver].plan(act, effect.ask)).steps:
            raise


async def _end_or_keep_program(context: HostContext, effect: AppliedEffect) -> None:
    """Remove the entry of an image, which ended with the reboot, unless handles of the device are attached.

    Then the driver is asked: the entry is kept if the device still has the image. Raises PlanFailedError if it has not,
    because an instance would get a device without its function. An image in flash, which an older release may have
    noted, needs no entry. Raises DriverError and sqlite3.OperationalError.
    """
    driver, key = effect.driver, effect.key
    if context.command_log.list_attachments(driver, key):
        plan = await context.drivers[driver].plan("program", effect.ask)
        if plan.steps and plan.lifetime == "volatile":
            raise PlanFailedError(
                "failed", "the device has lost it: detach its handles, then it is programmed for the next request"
            )
        if plan.lifetime == "volatile":
            context.command_log.confirm_effect(effect, context.boot_id)
            return
    context.command_log.remove_effects(driver, key, effect.slot)


def _describe_effect(effect: AppliedEffect) -> str:
    """Return the entry as a phrase for an error text, such as "the handle UUID of CONSUMER"."""
    if effect.slot == "program":
        return f"the image {effect.ask.image.name if effect.ask.image else ''}".rstrip()
    if effect.ask.uuid:
        return f"the handle {effect.ask.uuid} of {effect.ask.consumer}"
    return f"its {effect.slot}"
