"""Commands that show which addresses of Nova are trusted, confirm one, and withdraw that."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import options
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

LIST_COLUMNS = ("uuid", "address", "trusted", "unknown_instances", "proven_at", "confirmed_at", "confirmed_by")


@verb_command("nova-list", "nova-list --json")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def nova_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List the addresses of Nova that were used, and whether their answer 404 for an instance is believed."""
    cli_context.print_list(
        lambda: cli_context.fetch_rows("nova_endpoints/", limit, **filters),
        LIST_COLUMNS,
        "Nova was not asked about instances yet.",
    )


@verb_command("nova-confirm", "nova-confirm 0e8f9e63-1b5a-4738-9fb6-eff9659e382f --yes")
@click.argument("endpoint", type=click.UUID)
@options.yes_option
@options.reason_option
@options.request_dry_run_option
@pass_cli_context
def nova_confirm(cli_context: CliContext, endpoint: UUID, yes: bool, reason: str) -> None:
    """Confirm that an address is the Nova of this cloud. Requests of instances that it does not know are deleted."""
    row = cli_context.api.get(f"nova_endpoints/{endpoint}/")
    options.confirm(
        f"Is {row['address']} the Nova of this cloud? Requests of instances that it does not know are deleted.", yes
    )
    confirmed = cli_context.api.post(f"nova_endpoints/{endpoint}/confirm/", options.drop_empty({"reason": reason}))
    if row["trusted"]:
        click.echo(f"Already trusted, nothing changed: {row['address']}", err=True)
    else:
        click.echo(
            f"Confirmed: {row['address']}. From now on, requests of instances that it does not know are deleted"
            " (in about two minutes). To stop this, withdraw the confirmation.",
            err=True,
        )
    print_row(confirmed, cli_context.output)


@verb_command("nova-withdraw", "nova-withdraw 0e8f9e63-1b5a-4738-9fb6-eff9659e382f --yes")
@click.argument("endpoint", type=click.UUID)
@options.yes_option
@options.reason_option
@options.request_dry_run_option
@pass_cli_context
def nova_withdraw(cli_context: CliContext, endpoint: UUID, yes: bool, reason: str) -> None:
    """Withdraw the confirmation of an address of Nova. Requests that were deleted meanwhile stay deleted."""
    row = cli_context.api.get(f"nova_endpoints/{endpoint}/")
    options.confirm(f"Withdraw the confirmation of {row['address']}?", yes)
    withdrawn = cli_context.api.post(f"nova_endpoints/{endpoint}/withdraw/", options.drop_empty({"reason": reason}))
    if withdrawn["trusted"]:
        click.echo(f"It has shown an instance that held a request, so it stays trusted: {row['address']}", err=True)
    elif not row["trusted"]:
        click.echo(f"It was not confirmed, nothing changed: {row['address']}", err=True)
    print_row(withdrawn, cli_context.output)
