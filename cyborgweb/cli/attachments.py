"""Commands that attach accelerators to an instance that already runs, and detach them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import names, options
from cyborgweb.cli.following import Progress, follow
from cyborgweb.cli.options import Asked, pass_asked, verb
from cyborgweb.cli.outcomes import each, finish
from cyborgweb.cli.output import show_one
from cyborgweb.cli.problems import CliError, Exit

DETACHED = ("attachment", "outcome", "state", "text")
GONE = ("detached", "failed")
"""States of an attachment that holds nothing any more; `failed` means that it was undone before it was attached."""
ENDED = ("attached", *GONE)
OPEN = ("asked", "attaching", "attached", "undoing", "detaching")
STEPS = 4
"""The usual number of steps of an attachment, from which the progress bar computes a percentage."""


@verb(
    "attach-instance",
    "attach-instance 6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --profile gpu-small",
)
@click.argument("instance", type=click.UUID)
@click.option("--profile", help="Attach what this device profile asks for; its name or uuid.")
@click.option("--device", help="Attach a unit of this device.")
@options.because
@options.waits
@pass_asked
def attach_instance(
    asked: Asked, instance: UUID, profile: str | None, device: str | None, reason: str, wait: bool
) -> None:
    """Attach accelerators to an instance. They are claimed, bound and prepared; if a step fails, all steps are undone.

    Nova does not plug them into a running machine. The answer says what remains to be done, with the necessary data.
    """
    if bool(profile) == bool(device):
        raise click.UsageError("Select what to attach: give --profile or --device.")
    uuid = names.device(asked.api, device) if device else None
    body = options.said({"instance": str(instance), "profile": profile, "device": uuid, "reason": reason})
    attachment = asked.api.post("attachments/", body)
    if wait:
        attachment = _followed(asked, attachment, "attach")
    show_one(attachment, asked.output)
    if attachment["state"] in ("undoing", *GONE):
        raise CliError(Exit.REFUSED, attachment["fault"] or f"The attachment is {attachment['state']}.")


@verb("detach-instance", "detach-instance 6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --yes")
@click.argument("instance", type=click.UUID)
@click.option(
    "--attachment", type=click.UUID, help="Only this attachment; if there are several, give this option or --all."
)
@click.option("--all", "every", is_flag=True, help="Everything that attach-instance attached to the instance.")
@options.yes
@options.because
@options.waits
@pass_asked
def detach_instance(
    asked: Asked, instance: UUID, attachment: UUID | None, every: bool, yes: bool, reason: str, wait: bool
) -> None:
    """Detach what attach-instance attached. What Nova attached at boot stays until the instance is deleted."""
    there = list(asked.api.rows("attachments/", 1000, instance=str(instance)))
    found = [row["uuid"] for row in there if row["state"] in OPEN and attachment in (None, UUID(row["uuid"]))]
    if not found:
        raise CliError(Exit.NOT_FOUND, f"Instance {instance} has nothing that attach-instance attached.")
    if len(found) > 1 and not every:
        raise click.UsageError(f"It has the attachments {', '.join(found)}: give --attachment UUID, or --all.")
    options.sure(f"Detach {', '.join(found)}? Unplug the accelerators from the machine first.", yes)

    def act(uuid: str) -> dict[str, Any]:
        now = asked.api.post(f"attachments/{uuid}/detach/", options.said({"reason": reason}))
        if wait:
            now = _followed(asked, now, "detach", GONE)
        return {"attachment": uuid, "state": now["state"], "text": now["fault"]}

    finish([{"attachment": row.get("target"), **row} for row in each(found, act)], DETACHED, asked.output)


def _followed(asked: Asked, attachment: dict[str, Any], what: str, ends: tuple[str, ...] = ENDED) -> dict[str, Any]:
    now = attachment

    def look() -> Progress:
        nonlocal now
        now = asked.api.get(f"attachments/{attachment['uuid']}/")
        ended = now["state"] in ends
        done = min(len(now["steps"]), STEPS)
        said = now["waits"] or (now["steps"][-1]["text"] if now["steps"] else "")
        return Progress(100 if ended else 90 * done / STEPS, f"{now['state']} {said}".strip(), ended)

    follow(what, f"cyborg accelerator-list --instance {attachment['instance']}, or {attachment['url']}", look)
    return now
