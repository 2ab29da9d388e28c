"""Preview a request that may reach many hosts or held devices, ask the user, and send it with the preview's token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from cyborgweb.cli.exit_codes import to_printable_line
from cyborgweb.cli.options import CliContext, confirm_number
from cyborgweb.cli.output import print_rows

FORECAST_COLUMNS = ("number", "outcome", "held", "text")
OUTCOME_WORDS = {"moved": "will be done", "unchanged": "already so", "refused": "refused"}
"""Words for the predicted outcomes of a preview."""


def order_after_preview(
    cli_context: CliContext,
    path: str,
    body: Mapping[str, Any],
    question: str,
    noun: str,
    *,
    yes: bool,
    dry_run: bool,
    always_ask: bool = False,
) -> dict[str, Any] | None:
    """Send a request with POST and return its answer; with `dry_run` only print its preview, and return None.

    If the service asks for a confirmation, or with `always_ask`, its preview is printed on standard error, and the user
    must type the number of objects, which `noun` names in the plural; with `yes` nobody is asked. Raises UsageError if
    standard input is not a terminal, and CliError, also if the user types anything else.
    """
    preview = cli_context.api.preview(path, body)
    if dry_run:
        print_rows(_build_forecast_rows(preview), FORECAST_COLUMNS, cli_context.output)
        return None
    if not yes and (preview["confirm"] or always_ask):
        for row in _build_forecast_rows(preview):
            held_text = " (held)" if row["held"] else ""
            click.echo(to_printable_line(f"{row['number']} {row['outcome']}: {row['text']}{held_text}"), err=True)
        confirm_number(question, preview["total"], is_confirmed=False, noun=noun)
    token = {"token": preview["token"]} if preview["confirm"] else {}  # without it, a refusal is answered at once
    return cli_context.api.post(path, {**body, **token})


def _build_forecast_rows(preview: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the forecasts of a preview as rows, with words for their outcomes."""
    return [one | {"outcome": OUTCOME_WORDS[one["outcome"]]} for one in preview["forecast"]]
