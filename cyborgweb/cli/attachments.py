"""Commands that attach accelerators to an instance that already runs, and detach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import bulk, completion, names, options
from cyborgweb.cli.confirmation import order_after_preview
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.following import WorkProgress, follow_until_ended
from cyborgweb.cli.many_targets import show_and_exit
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

LIST_COLUMNS = ("uuid", "state", "instance", "profile", "device", "host", "by", "fault")
GONE_STATES = ("detached", "failed")
"""States of an attachment that holds nothing any more; `failed` means that it was undone before it was attached."""
ENDED_STATES = ("attached", *GONE_STATES)
OPEN_STATES = ("asked", "attaching", "attached", *bulk.ATTACHMENTS.changing_states)
UNPLUG_ADVICE = "Unplug the accelerators from the guest first."
USUAL_STEPS = 4
"""The usual number of steps of an attachment, from which the progress bar computes a percentage."""


@verb_command(
    "attach-instance",
    "attach-instance 6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --profile gpu-small",
)
@click.argument("instance", type=click.UUID)
@click.option(
    "--profile",
    shell_complete=completion.complete_profiles,
    help="Attach what this device profile asks for; its name or uuid.",
)
@click.option("--device", shell_complete=completion.complete_devices, help="Attach a unit of this device.")
@options.reason_option
@options.wait_option
@options.request_dry_run_option
@pass_cli_context
def attach_instance(
    cli_context: CliContext, instance: UUID, profile: str | None, device: str | None, reason: str, wait: bool
) -> None:
    """Attach accelerators to an instance. They are claimed, bound and prepared; if a step fails, all steps are undone.

    Nova does not plug them into a running guest. The answer says what remains to be done, with the necessary data.
    """
    if bool(profile) == bool(device):
        raise click.UsageError("Select what to attach: give --profile or --device.")
    uuid = names.resolve_device(cli_context.api, device) if device else None
    body = options.drop_empty({"instance": str(instance), "profile": profile, "device": uuid, "reason": reason})
    attachment = cli_context.api.post("attachments/", body)
    if wait:
        attachment = _follow_attachment(cli_context, attachment, "attach")
    print_row(attachment, cli_context.output)
    if attachment["state"] in ("undoing", *GONE_STATES):
        raise CliError(ExitCode.REFUSED, attachment["fault"] or f"The attachment is {attachment['state']}.")


@verb_command("detach-instance", "detach-instance 6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --yes")
@click.argument("instance", type=click.UUID)
@click.option(
    "--attachment", type=click.UUID, help="Only this attachment; if there are several, give this option or --all."
)
@click.option("--all", "every", is_flag=True, help="Everything that attach-instance attached to the instance.")
@options.dry_run_option
@options.yes_option
@options.reason_option
@options.wait_option
@pass_cli_context
def detach_instance(
    cli_context: CliContext, instance: UUID, attachment: UUID | None, every: bool, **detach_options: Any
) -> None:
    """Detach accelerators that attach-instance attached. Accelerators that Nova attached at boot stay until the
    instance is deleted.

    Several attachments are detached by one job of the service.
    """
    attachments = list(cli_context.api.iterate_rows("attachments/", 1000, instance=str(instance)))
    open_uuids = [
        row["uuid"] for row in attachments if row["state"] in OPEN_STATES and attachment in (None, UUID(row["uuid"]))
    ]
    if not open_uuids:
        raise CliError(ExitCode.NOT_FOUND, f"Instance {instance} has nothing that attach-instance attached.")
    if len(open_uuids) > 1 and not every:
        raise click.UsageError(f"It has the attachments {', '.join(open_uuids)}: give --attachment UUID, or --all.")
    _detach(cli_context, bulk.Selection(bulk.ATTACHMENTS, (*open_uuids,)), **detach_options)


@verb_command(
    "attachment-detach",
    "attachment-detach 0e8f9e63-1b5a-4738-9fb6-eff9659e382f --yes\n"
    "attachment-detach --filter host=cmp1.example --filter state=attached --dry-run",
)
@bulk.selection_options(bulk.ATTACHMENTS, "host=cmp1 or state=attached")
@pass_cli_context
def attachment_detach(
    cli_context: CliContext,
    named: Sequence[str],
    filters: Sequence[str],
    retried: UUID | None,
    **detach_options: Any,
) -> None:
    """Detach attachments. One that is not attached yet is undone.

    Name them by uuid, or write - to read uuids from standard input. Several attachments are detached by one job of the
    service; you are asked to type their number first. A filter leaves out those that have ended or are being detached.
    """
    _detach(cli_context, bulk.Selection(bulk.ATTACHMENTS, (*named,), (*filters,), retried), **detach_options)


@verb_command("attachment-list", "attachment-list --state attached")
@click.option("--instance", type=click.UUID, help="Only of this instance.")
@click.option("--state", type=click.Choice((*OPEN_STATES, *GONE_STATES)), multiple=True, help="In this state.")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def attachment_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List attachments, the newest first. Accelerators that Nova attached at boot are not listed."""
    cli_context.print_list(
        lambda: cli_context.fetch_rows("attachments/", limit, **filters), LIST_COLUMNS, "No attachments."
    )


@verb_command("attachment-show", "attachment-show 0e8f9e63-1b5a-4738-9fb6-eff9659e382f")
@click.argument("attachment", type=click.UUID)
@pass_cli_context
def attachment_show(cli_context: CliContext, attachment: UUID) -> None:
    """Show an attachment with its steps, and with what remains to be done so that the guest sees the device."""
    print_row(cli_context.api.get(f"attachments/{attachment}/"), cli_context.output)


def _detach(
    cli_context: CliContext, selection: bulk.Selection, *, dry_run: bool, yes: bool, reason: str, wait: bool
) -> None:
    """Order the detachment of the selected attachments and show one row for each; with `wait`, follow them until they
    have ended.

    A single attachment that is named is one request; several are one bulk action (`bulk.apply_action_to_many`). The
    preview is printed before, and the user must type the number of attachments, unless `yes` is set; with `dry_run`
    nothing else happens. Raises CliError, and UsageError if standard input is not a terminal. Exits with the rows'
    common code if that is not DONE.
    """
    body = options.drop_empty({"reason": reason})
    if not selection.is_one_object:
        how = bulk.BulkOptions(yes, dry_run, wait, always_ask=True, advice=UNPLUG_ADVICE)
        rows = bulk.apply_action_to_many(cli_context, "detach", selection, body, how)
        if rows:
            show_and_exit(rows, bulk.ATTACHMENTS.columns, cli_context.output)
        return
    (uuid,) = selection.kind.resolve(cli_context.api, selection.named)
    question = f"Detach {uuid}? {UNPLUG_ADVICE}"
    current = order_after_preview(
        cli_context,
        f"attachments/{uuid}/detach/",
        body,
        question,
        selection.kind.plural,
        yes=yes,
        dry_run=dry_run,
        always_ask=True,
    )
    if current is not None:
        if wait:
            current = _follow_attachment(cli_context, current, "detach", GONE_STATES)
        row = {"target": uuid, "outcome": "done", **bulk.describe_attachment(current)}
        show_and_exit([row], bulk.ATTACHMENTS.columns, cli_context.output)


def _follow_attachment(
    cli_context: CliContext, attachment: dict[str, Any], action: str, end_states: tuple[str, ...] = ENDED_STATES
) -> dict[str, Any]:
    """Follow an attachment until its state is one of `end_states`; return it as the API shows it then.

    Raises CliError in the same cases as `follow_until_ended`.
    """
    current = attachment

    def poll() -> WorkProgress:
        """Fetch the attachment again and return its progress, which is computed from the number of its steps."""
        nonlocal current
        current = cli_context.api.get(f"attachments/{attachment['uuid']}/")
        has_ended = current["state"] in end_states
        steps_done = min(len(current["steps"]), USUAL_STEPS)
        step_text = current["waits"] or (current["steps"][-1]["text"] if current["steps"] else "")
        return WorkProgress(
            100 if has_ended else 90 * steps_done / USUAL_STEPS, f"{current['state']} {step_text}".strip(), has_ended
        )

    follow_until_ended(action, f"{cli_context.api.spell_verb('attachment-show')} {attachment['uuid']}", poll)
    return current
