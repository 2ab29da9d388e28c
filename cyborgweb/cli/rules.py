"""Commands for admission rules, which decide the state of a device when it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from cyborgweb.cli import options
from cyborgweb.cli.confirmation import order_after_preview
from cyborgweb.cli.conflicts import show_conflict
from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

DEVICE_TYPES = ("GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD")
ADMISSIONS = ("ready", "inactive", "quarantined")
MOVES_NO_DEVICE_TEXT = "The rule would move none of the devices that are inactive now."
RULE_COLUMNS = ("order", "name", "enabled", "action", "host", "driver", "vendor", "model", "type")


@verb_command("rule-list", "rule-list --action ready")
@click.option("--action", type=click.Choice(ADMISSIONS), help="Only rules that give devices this state.")
@click.option("--enabled/--disabled", default=None, help="Only rules that are in force, or only the others.")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def rule_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List admission rules in the order in which they are tried. The first one that matches a device decides."""
    cli_context.print_list(
        lambda: cli_context.fetch_rows("rules/", limit, **filters),
        RULE_COLUMNS,
        "No admission rules: devices that are found are inactive.",
    )


def add_rule_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the name of a rule, the options that describe it and those of its confirmation; return the decorated
    function."""
    pattern = "; * stands for any text, ? for one character. Without it, or empty, every one matches."
    reported = "as its driver reports it, for example {}; * and ? are wildcards, as in --host."
    for option in reversed(
        (
            click.argument("rule"),
            click.option("--order", type=click.IntRange(0), help="The rule with the lowest number is tried first."),
            click.option("--host", help=f"Name of the host{pattern}"),
            click.option("--driver", help="Name of the driver, as a pattern, too."),
            click.option("--vendor", help=f"The vendor, {reported.format('10de')}"),
            click.option("--model", help=f"The model, {reported.format('20b5')}"),
            click.option("--type", type=click.Choice(["", *DEVICE_TYPES]), help="The type of the device."),
            click.option("--enabled/--disabled", default=None, help="Whether the rule is in force."),
            click.option("--dry-run", is_flag=True, help="Only print how many inactive devices it would move."),
            options.yes_option,
        )
    ):
        function = option(function)
    return function


@verb_command("rule-create", "rule-create hall3 --host 'new-*.hall3.example' --driver pci_driver --action ready")
@add_rule_options
@click.option("--action", type=click.Choice(ADMISSIONS), required=True, help="The state of devices that match.")
@pass_cli_context
def rule_create(cli_context: CliContext, rule: str, yes: bool, dry_run: bool, **values: Any) -> None:
    """Create an admission rule. It decides about devices that are found from now on.

    If it matches devices that are inactive now, you are asked to type their number; device-admit applies it to them.
    """
    body = {"name": rule} | _drop_missing(values)
    question = f"Create the rule {rule}? It matches devices that are inactive now."
    created = order_after_preview(
        cli_context,
        "rules/",
        body,
        question,
        "devices",
        yes=yes,
        dry_run=dry_run,
        empty_text=MOVES_NO_DEVICE_TEXT,
    )
    if created is not None:
        print_row(created, cli_context.output)


@verb_command("rule-set", "rule-set hall3 --disabled\nrule-set hall3 --host 'new-0?.hall3.example'")
@add_rule_options
@click.option("--action", type=click.Choice(ADMISSIONS), help="The state of devices that match.")
@click.option("--rename", "name", help="The new name of the rule.")
@options.generation_option
@pass_cli_context
def rule_set(
    cli_context: CliContext, rule: str, yes: bool, dry_run: bool, generation: int | None, **values: Any
) -> None:
    """Change an admission rule; what is not named stays. Devices that it has admitted keep their state.

    The difference is shown. If it matches further devices that are inactive now, you are asked to type their number. If
    somebody changes the rule meanwhile, it stays as it is.
    """
    changes = _drop_missing(values)
    if not changes:
        raise click.UsageError("Select what to change.")
    present = find_rule(cli_context.api, rule)
    body = changes | {"generation": options.choose_generation(present, generation)}
    question = f"Change the rule {rule}? It matches further devices that are inactive now."
    with show_conflict(lambda current: (current, present | changes), present):
        changed = order_after_preview(
            cli_context,
            f"rules/{present['uuid']}/",
            body,
            question,
            "devices",
            yes=yes,
            dry_run=dry_run,
            method="PATCH",
            empty_text=MOVES_NO_DEVICE_TEXT,
        )
    if changed is not None:
        print_row(changed, cli_context.output)


@verb_command("rule-delete", "rule-delete hall3 --yes")
@click.argument("rule")
@options.generation_option
@options.yes_option
@options.request_dry_run_option
@pass_cli_context
def rule_delete(cli_context: CliContext, rule: str, generation: int | None, yes: bool) -> None:
    """Delete an admission rule. Devices that it has admitted keep their state.

    The rule is shown. If somebody changes it meanwhile, it is not deleted.
    """
    present = find_rule(cli_context.api, rule)
    with show_conflict(lambda current: (current, {}), present):
        options.confirm(f"Delete the admission rule {rule}?", yes)
        query = {"generation": options.choose_generation(present, generation)}
        cli_context.api.send_change("DELETE", f"rules/{present['uuid']}/", params=query)


def find_rule(api: ApiClient, name: str) -> dict[str, Any]:
    """Return the admission rule with this name. Raises CliError NOT_FOUND."""
    for row in api.iterate_rows("rules/", 1, name=name):
        return row
    text = f"There is no admission rule {name!r}: `{api.spell_verb('rule-list')}` lists all rules."
    raise CliError(ExitCode.NOT_FOUND, text)


def _drop_missing(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the options that were given; an empty text is kept, because it removes a pattern."""
    return {name: value for name, value in values.items() if value is not None}
