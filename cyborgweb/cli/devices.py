"""Commands that list and show devices and change their state, and agent-list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import bulk, completion, names, options
from cyborgweb.cli.confirmation import order_after_preview
from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.following import WorkProgress, follow_until_ended
from cyborgweb.cli.many_targets import show_and_exit
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

DEVICE_STATES = ("inactive", "installing", "ready", "maintenance", "failed", "quarantined", "missing", "retired")
DEVICE_HEALTH = ("ok", "degraded", "failed", "unknown")
DEVICE_COLUMNS = ("uuid", "state", "status", "type", "name", "address", "host=host.name", "driver", "backend", "held")
MAX_HISTORY = 10
ACTION_COLUMNS: tuple[str, ...] = ("uuid=target", "outcome", "state", "host", "address", "text")
JOIN_TOKEN_COLUMNS = ("id", "host", "created_by", "created_at", "expires_at", "used_at")
AGENT_COLUMNS = ("host=host.name", "state", "seen_at", "version", "address", "barred_reason")
AGENT_STATES = ("up", "late", "down", "revoked", "clone")


@verb_command("device-list", "device-list --host cmp1.example --state inactive")
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--state", type=click.Choice(DEVICE_STATES), multiple=True, help="In this state; can be repeated.")
@click.option(
    "--health", "status", type=click.Choice(DEVICE_HEALTH), multiple=True, help="With this health; can be repeated."
)
@click.option("--type", "kind", help="Only of this type: GPU, FPGA, NIC, …")
@click.option("--vendor", help="Only of this vendor, as its driver reports it: 10de.")
@click.option("--name", help='Only with these words in the name of the hardware: --name "nvidia a100".')
@click.option("--serial", help="Only with exactly this serial number.")
@click.option("--driver", shell_complete=completion.complete_drivers, help="Only of this driver.")
@click.option(
    "--draining/--not-draining",
    default=None,
    help="Only devices that wait for their last request to end, or only the others.",
)
@click.option(
    "--stale/--fresh", default=None, help="Only devices whose host or driver does not report, or only the others."
)
@click.option("--quiet", is_flag=True, help="Print only uuids, one per line, as input for another command.")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def device_list(cli_context: CliContext, limit: int, kind: str | None, quiet: bool, **filters: Any) -> None:
    """List devices. Each row is one card, with its state and the number of its units that are held."""
    fields = "uuid" if quiet else None

    def fetch() -> list[dict[str, Any]]:
        """Fetch the devices that the filters select. Servers of older releases send no name."""
        rows = cli_context.fetch_rows("devices/", limit, **filters, type=kind, fields=fields)
        return [{"name": row.get("model")} | row for row in rows]

    if quiet:
        click.echo("".join(f"{row['uuid']}\n" for row in fetch()), nl=False)
    else:
        cli_context.print_list(fetch, DEVICE_COLUMNS, "No devices.")


@verb_command("device-show", "device-show 3f1c\ndevice-show cmp1.example/0000:3b:00.0")
@click.argument("device", shell_complete=completion.complete_devices)
@click.option(
    "--history/--no-history",
    default=False,
    show_default=True,
    help=f"Show its latest {MAX_HISTORY} commands and {MAX_HISTORY} events, too.",
)
@pass_cli_context
def device_show(cli_context: CliContext, device: str, history: bool) -> None:
    """Show a device. Includes its state with the reason, time and person, and the actions that are possible."""
    uuid = names.resolve_device(cli_context.api, device)
    row = cli_context.api.get(f"devices/{uuid}/")
    if history:
        commands = {"device": uuid, "fields": "uuid,op,state,text,created_at"}
        events = {"subject": uuid, "fields": "at,action,actor,reason"}
        row["latest_commands"] = list(cli_context.api.iterate_rows("commands/", MAX_HISTORY, **commands))
        row["latest_events"] = list(cli_context.api.iterate_rows("events/", MAX_HISTORY, **events))
    print_row(row, cli_context.output)


DASH_HELP = """Name devices, or write - to read their names from standard input. Several devices are changed by one job
of the service; you are asked to type their number first if they are on several hosts, or if held devices would be
changed, also if it is a single one."""


@verb_command(
    "device-ready",
    'device-ready 3f1c 77ab --reason "burnt in"\ndevice-ready --filter host=cmp1 --filter state=inactive --dry-run',
    "Offer devices to instances. If a device must be prepared on its host first, --wait waits for that."
    f"\n\n{DASH_HELP}",
)
@bulk.add_device_options
@pass_cli_context
def device_ready(cli_context: CliContext, **selection_options: Any) -> None:
    """Apply `enable` to the devices; with `wait`, wait until they are installed."""
    _apply_action(cli_context, "enable", {}, **selection_options)


def _make_action_verb(name: str, action: str, text: str, example: str) -> click.Command:
    """Return the verb that applies `action` to devices, without any options but those of the selection.

    `text` is the first paragraph of its help.
    """

    @verb_command(name, example, f"{text}\n\n{DASH_HELP}")
    @bulk.add_device_options
    @pass_cli_context
    def apply_action(cli_context: CliContext, **selection_options: Any) -> None:
        """Apply `action` to the devices, show a row for each, and exit with the rows' common code if it is not DONE."""
        _apply_action(cli_context, action, {}, **selection_options)

    return apply_action


device_maintain = _make_action_verb(
    "device-maintain",
    "disable",
    "Stop offering devices. Instances keep the units that they hold.",
    'device-maintain 3f1c --reason "new firmware"',
)
device_quarantine = _make_action_verb(
    "device-quarantine",
    "quarantine",
    "Stop offering devices that cannot be trusted. Instances keep the units that they hold.",
    'device-quarantine 3f1c --reason "smoke"',
)
device_release = _make_action_verb(
    "device-release",
    "release",
    "End the quarantine of devices. They are in maintenance then.",
    "device-release 3f1c",
)
device_reinstate = _make_action_verb(
    "device-reinstate",
    "reinstate",
    "Take retired devices back into use. They are inactive then.",
    "device-reinstate 3f1c",
)


@verb_command(
    "device-drain",
    'device-drain 3f1c --then retired --reason "end of lease"',
    "Stop offering devices, and change their state when they are free. Nobody is evicted.\n\n--wait waits until"
    " the drain of each device has begun, and not until the devices are free: `device-list --draining --watch` shows"
    " those that are not free yet. The rows show how many requests still hold each device; the state given in --then"
    f" applies when the last of them ends.\n\n{DASH_HELP}",
)
@bulk.add_device_options
@click.option(
    "--then",
    type=click.Choice(["maintenance", "retired"]),
    default="maintenance",
    show_default=True,
    help="State of the devices when they are free.",
)
@pass_cli_context
def device_drain(cli_context: CliContext, then: str, **selection_options: Any) -> None:
    """Apply `drain` to the devices, with the state `then` for the time when they are free."""
    _apply_action(cli_context, "drain", {"then": then}, **selection_options)


@verb_command(
    "device-retire",
    'device-retire 3f1c --yes --reason "broken fan"',
    "Take devices out of use permanently. Refused while a device is offered, or while a request holds it."
    f"\n\n{DASH_HELP}",
)
@bulk.add_device_options
@pass_cli_context
def device_retire(cli_context: CliContext, **selection_options: Any) -> None:
    """Apply `retire` to the devices, after a confirmation in any case."""
    _apply_action(cli_context, "retire", {}, question="Retire {} permanently?", **selection_options)


@verb_command(
    "device-admit",
    "device-admit --dry-run\ndevice-admit --filter host=cmp1",
    "Apply the admission rules to inactive devices, as if they were found now: the first rule that matches a device"
    " decides its state. Without devices and filters, the service chooses the devices that a rule would move; it"
    " refuses the command if there are none. A device is refused if a request holds it, or if the rules about it change"
    " after the preview."
    f"\n\n{DASH_HELP}",
)
@bulk.add_device_options
@pass_cli_context
def device_admit(
    cli_context: CliContext,
    named: Sequence[str],
    filters: Sequence[str],
    retried: UUID | None,
    reason: str,
    dry_run: bool,
    yes: bool,
    wait: bool,
) -> None:
    """Apply the admission rules to the selected devices, and show a row for each."""
    selection = bulk.Selection(bulk.DEVICES, (*named,), (*filters,), retried, may_be_left_out=True)
    body = options.drop_empty({"reason": reason})
    rows = bulk.apply_action_to_many(cli_context, "admit", selection, body, bulk.BulkOptions(yes, dry_run, wait))
    if rows:
        show_and_exit(rows, bulk.DEVICES.columns, cli_context.output)


@verb_command("agent-list", "agent-list --state down")
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--state", type=click.Choice(AGENT_STATES), help="Only in this state.")
@click.option("--version", help="Only with this version.")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def agent_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List agents. Each row has the host, the agent's state, when it was last seen, and its version."""
    cli_context.print_list(lambda: cli_context.fetch_rows("agents/", limit, **filters), AGENT_COLUMNS, "No agents.")


def _act_on_agent(cli_context: CliContext, host: str, action: str, body: dict[str, str]) -> None:
    """Apply an action to the agent of a host, given the host's name or uuid, and show the agent."""
    uuid = names.resolve_host(cli_context.api, host)
    row = cli_context.api.post(f"agents/{uuid}/{action}/", body)
    print_row(row, cli_context.output)


@verb_command("agent-admit", "agent-admit cmp1.example")
@click.argument("host")
@options.request_dry_run_option
@pass_cli_context
def agent_admit(cli_context: CliContext, host: str) -> None:
    """Let the agent of a host connect again that was barred because two machines used its key."""
    _act_on_agent(cli_context, host, "admit", {})


@verb_command("agent-rotate", "agent-rotate cmp1.example")
@click.argument("host")
@options.request_dry_run_option
@pass_cli_context
def agent_rotate(cli_context: CliContext, host: str) -> None:
    """Ask the agent of a host for a new key, now or when it connects next."""
    _act_on_agent(cli_context, host, "rotate", {})


@verb_command("agent-revoke", "agent-revoke cmp1.example --reason stolen")
@click.argument("host")
@options.reason_option
@options.yes_option
@options.request_dry_run_option
@pass_cli_context
def agent_revoke(cli_context: CliContext, host: str, reason: str, yes: bool) -> None:
    """Revoke the agent of a host: its connections end, and its key and open join tokens become invalid."""
    options.confirm(f"Revoke the agent of {host}?", yes)
    _act_on_agent(cli_context, host, "revoke", {"reason": reason})


@verb_command("join-token", "join-token cmp1.example --hours 2")
@click.argument("host")
@click.option("--address", default="", help="Where the agent reaches the conductor; by default its TLS listener.")
@click.option("--hours", type=click.IntRange(1, 8760), default=24, show_default=True, help="How long it is valid.")
@options.request_dry_run_option
@pass_cli_context
def join_token(cli_context: CliContext, host: str, address: str, hours: int) -> None:
    """Make the token with which the agent of a host joins. It cannot be shown again."""
    print_row(
        cli_context.api.post("join_tokens/", {"host": host, "hours": hours, "address": address}), cli_context.output
    )


@verb_command("join-token-list", "join-token-list --host cmp1.example")
@click.option("--host", help="Only of this host.")
@click.option("--used/--unused", default=None, help="Only tokens that an agent has used, or only the others.")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def join_token_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List join tokens, without their secrets."""
    cli_context.print_list(
        lambda: cli_context.fetch_rows("join_tokens/", limit, **filters), JOIN_TOKEN_COLUMNS, "No join tokens."
    )


@verb_command("join-token-delete", "join-token-delete 12")
@click.argument("id", type=int)
@options.request_dry_run_option
@pass_cli_context
def join_token_delete(cli_context: CliContext, id: int) -> None:
    """Withdraw a join token, given its id. An agent that has joined with it stays enrolled."""
    cli_context.api.delete(f"join_tokens/{id}/")


@verb_command("host-remove", "host-remove cmp9.example --reason decommissioned")
@click.argument("host", shell_complete=completion.complete_hosts)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@options.reason_option
@options.yes_option
@pass_cli_context
def host_remove(cli_context: CliContext, host: str, dry_run: bool, reason: str, yes: bool) -> None:
    """Remove a decommissioned host with its devices, its providers in Placement and its agent's key.

    This is refused while a request or an allocation exists. Events are kept, and the name may join again. The deletion
    begins after CYBORG_HOST_REMOVAL_DELAY_S seconds (of the server); until then, host-removal-cancel undoes the order.
    """
    address = f"hosts/{names.resolve_host(cli_context.api, host)}/remove/"
    preview = cli_context.api.post(address, {"dry_run": True})
    if not dry_run:
        if preview["refused"]:
            raise CliError(ExitCode.REFUSED, preview["refused"])
        name, devices, providers = (preview[column] for column in ("host", "devices", "providers"))
        options.confirm_name(f"Remove host {name} with {devices} devices and {providers} providers?", name, yes)
        preview = cli_context.api.post(address, {"confirm": name, "reason": reason})
    print_row(preview, cli_context.output)


@verb_command("host-removal-cancel", "host-removal-cancel cmp9.example --reason 'wrong host'")
@click.argument("host", shell_complete=completion.complete_hosts)
@options.reason_option
@options.request_dry_run_option
@pass_cli_context
def host_removal_cancel(cli_context: CliContext, host: str, reason: str) -> None:
    """Cancel the removal of a host. Its devices get their former states back.

    This is refused if the host is not being removed, and once the deletion has begun.
    """
    address = f"hosts/{names.resolve_host(cli_context.api, host)}/cancel_removal/"
    print_row(cli_context.api.post(address, options.drop_empty({"reason": reason})), cli_context.output)


def _apply_action(
    cli_context: CliContext,
    action: str,
    body: dict[str, str],
    *,
    named: Sequence[str],
    filters: Sequence[str],
    retried: UUID | None,
    dry_run: bool,
    yes: bool,
    reason: str,
    wait: bool,
    question: str = "",
) -> None:
    """Apply an action to the selected devices, show a row for each, and exit with the rows' common code if it is not
    DONE. `body` is sent with the action.

    A single device that is named is changed at once, after a confirmation if requests hold it, and a refusal raises
    CliError; several are one bulk action (`bulk.apply_action_to_many`). With a `question`, which has a place for the
    name, the user is asked in any case.
    """
    selection = bulk.Selection(bulk.DEVICES, (*named,), (*filters,), retried)
    body = options.drop_empty(body | {"reason": reason})
    if selection.is_one_object and not dry_run:
        if question:
            options.confirm(question.format(named[0]), yes)
        uuid = names.resolve_device(cli_context.api, named[0])
        held_question = f"Requests hold {named[0]}: apply {action} to it?"
        shown = order_after_preview(
            cli_context, f"devices/{uuid}/{action}/", body, held_question, "devices", yes=yes, dry_run=False
        )
        assert shown is not None, "only a dry run has no answer"
        location = {"target": shown["uuid"], "host": shown["host"]["name"], "address": shown["address"]}
        changes = bulk.describe_device(shown)
        if wait and shown["state"] in bulk.DEVICES.changing_states:
            changes = bulk.describe_installed_device(_wait_until_installed(cli_context.api, shown))
        rows, columns = [{"outcome": "done"} | location | changes], ACTION_COLUMNS
    else:
        how = bulk.BulkOptions(yes, dry_run, wait, always_ask=bool(question))
        rows, columns = bulk.apply_action_to_many(cli_context, action, selection, body, how), bulk.DEVICES.columns
    if rows:
        show_and_exit(rows, columns, cli_context.output)


def _wait_until_installed(api: ApiClient, device: dict[str, Any]) -> dict[str, Any]:
    """Wait until a device is no longer `installing`, and return it as the API shows it then.

    Raises CliError in the same cases as `follow_until_ended`.
    """
    current = device

    def poll() -> WorkProgress:
        """Fetch the device again, and return the progress of the command that installs it."""
        nonlocal current
        current = api.get(f"devices/{device['uuid']}/")
        if current["state"] not in bulk.DEVICES.changing_states:
            return WorkProgress(100, current["state"], has_ended=True)
        if not current["busy_with"]:
            return WorkProgress(0, current["state"], has_ended=False)
        command = api.get(f"commands/{current['busy_with'].rstrip('/').rpartition('/')[2]}/")
        return WorkProgress(command["percent"], command["progress"] or command["state"], has_ended=False)

    follow_until_ended("install", f"{api.spell_verb('device-show')} {device['uuid']}", poll)
    return current
