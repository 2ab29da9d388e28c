"""Commands that list subscriptions, and send the request to confirm a mail address again."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import options
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row, print_rows

LIST_COLUMNS = ("uuid", "name", "way", "target", "standing", "last_error")


@verb_command("subscription-list", "subscription-list --json")
@options.limit_option
@pass_cli_context
def subscription_list(cli_context: CliContext, limit: int) -> None:
    """List subscriptions: who gets messages, and which addresses still wait for confirmation."""
    rows = [_show_confirmation(row) for row in cli_context.fetch_rows("subscriptions/", limit)]
    print_rows(rows, LIST_COLUMNS, cli_context.output, "There are no subscriptions.")


@verb_command("subscription-resend", "subscription-resend 0e8f9e63-1b5a-4738-9fb6-eff9659e382f")
@click.argument("subscription", type=click.UUID)
@pass_cli_context
def subscription_resend(cli_context: CliContext, subscription: UUID) -> None:
    """Send the request to confirm a mail address again. The number of requests in a day is limited."""
    row = cli_context.api.post(f"subscriptions/{subscription}/resend/", {})
    click.echo(f"A request to confirm is being sent to {row['target']}.", err=True)
    print_row(_show_confirmation(row), cli_context.output)


def _show_confirmation(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with `waiting for confirmation` as its standing while the recipient has not confirmed."""
    is_waiting = row["way"] == "email" and row["standing"] == "active" and row["confirmed_at"] is None
    return row | {"standing": "waiting for confirmation"} if is_waiting else row
