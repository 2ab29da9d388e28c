"""Commands that list subscriptions, hand them over, and send the request to confirm a mail address again."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import options
from cyborgweb.cli.conflicts import change_based_on
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

LIST_COLUMNS = ("uuid", "name", "way", "target", "standing", "last_error")


@verb_command("subscription-list", "subscription-list --json")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def subscription_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List subscriptions: who gets messages, and which addresses still wait for confirmation."""
    cli_context.print_list(
        lambda: map(_show_confirmation, cli_context.fetch_rows("subscriptions/", limit, **filters)),
        LIST_COLUMNS,
        "There are no subscriptions.",
    )


@verb_command("subscription-resend", "subscription-resend 0e8f9e63-1b5a-4738-9fb6-eff9659e382f")
@click.argument("subscription", type=click.UUID)
@options.request_dry_run_option
@pass_cli_context
def subscription_resend(cli_context: CliContext, subscription: UUID) -> None:
    """Send the request to confirm a mail address again. The number of requests in a day is limited."""
    row = cli_context.api.post(f"subscriptions/{subscription}/resend/", {})
    click.echo(f"A request to confirm is being sent to {row['target']}.", err=True)
    print_row(_show_confirmation(row), cli_context.output)


@verb_command(
    "subscription-hand-over",
    "subscription-hand-over 0e8f9e63-1b5a-4738-9fb6-eff9659e382f 5b8d0e0f3a4c4f1c9d2e7a6b8c9d0e1f --reason 'Ann left.'",
)
@click.argument("subscription", type=click.UUID)
@click.argument("owner")
@click.option("--target", default="", help="The new URL of a webhook; needed if it is personal.")
@click.option("--reason", default="", help="Why; the event has it.")
@options.generation_option
@options.request_dry_run_option
@pass_cli_context
def subscription_hand_over(
    cli_context: CliContext, subscription: UUID, owner: str, target: str, reason: str, generation: int | None
) -> None:
    """Give a subscription another owner: an id of Keystone, or without Keystone a user's name. An ended subscription is
    active again; a mail address may have to be confirmed anew.

    The difference is shown. If somebody changes the subscription meanwhile, it stays as it is.
    """
    changes = {"owner": owner} | ({"target": target} if target else {})
    present = cli_context.api.get(f"subscriptions/{subscription}/")
    with change_based_on(present, changes, generation) as based:
        body = {**changes, "reason": reason, **based}
        row = cli_context.api.post(f"subscriptions/{subscription}/hand_over/", body)
    click.echo(f"The subscription {row['name']} is handed over to {owner}.", err=True)
    print_row(_show_confirmation(row), cli_context.output)


def _show_confirmation(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with `waiting for confirmation` as its standing while the recipient has not confirmed."""
    is_waiting = row["way"] == "email" and row["standing"] == "active" and row["confirmed_at"] is None
    return row | {"standing": "waiting for confirmation"} if is_waiting else row
