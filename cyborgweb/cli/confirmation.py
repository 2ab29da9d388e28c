"""Preview a request that may reach many hosts or held devices, ask the user, and send it with the preview's token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from cyborgweb.cli.exit_codes import CliError, ExitCode, to_printable_line
from cyborgweb.cli.options import CliContext, can_be_confirmed, confirm, confirm_number
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
    method: str = "POST",
    stores_draft: bool = False,
    empty_text: str = "",
) -> dict[str, Any] | None:
    """Send a request and return its answer; with `dry_run` only print its preview, and return None.

    `empty_text` is printed on standard error instead of a preview in which nothing would be done.

    If the service asks for a confirmation, or with `always_ask`, its preview is printed on standard error, and the user
    must type the number of objects, which `noun` names in the plural; with `yes` nobody is asked. A service of an older
    release that has no preview of this request is sent the request at once, or after a question with `always_ask`.
    If the service `stores_draft` for a preview of this request, it stores none that will not be confirmed.

    Raises UsageError if standard input is not a terminal, and CliError, also if the user types anything else.
    """
    store_draft = choose_draft_storage(yes, dry_run, always_ask) if stores_draft else ""
    preview = fetch_preview(cli_context, path, body, is_required=dry_run, method=method, store_draft=store_draft)
    if preview is None:
        if always_ask:
            confirm(question, yes)
        return cli_context.api.send_change(method, path, json=body)
    if dry_run:
        print_rows(build_forecast_rows(preview), FORECAST_COLUMNS, cli_context.output, empty_text)
        return None
    is_asked = not yes and (preview["confirm"] or always_ask)
    if is_asked:
        print_forecast(preview)
        confirm_number(question, preview["total"], is_confirmed=False, noun=noun)
    # Without the token, a refusal is answered at once; with it, exactly what was shown is done.
    is_token_sent = preview["token"] and (preview["confirm"] or (is_asked and stores_draft))
    confirmation = {"token": preview["token"]} if is_token_sent else get_generation(preview)
    return cli_context.api.send_change(method, path, json={**confirmation, **body})


def choose_draft_storage(yes: bool, dry_run: bool, always_ask: bool) -> str:
    """Return when the service is to store a draft for a preview: only if its token will be used."""
    if dry_run or not can_be_confirmed(yes):
        return "never"
    return "always" if always_ask and not yes else "when_needed"


def fetch_preview(
    cli_context: CliContext,
    path: str,
    body: Mapping[str, Any],
    is_required: bool,
    method: str = "POST",
    store_draft: str = "",
) -> dict[str, Any] | None:
    """Return the preview of a change; None if the service is of an older release, which has no preview of it.

    Raises CliError, also instead of None if the preview `is_required`.
    """
    preview = cli_context.api.preview_if_known(path, body, method, store_draft)
    if preview is None and is_required:
        text = "The service is of an older release: it has no preview of this. Nothing was changed."
        raise CliError(ExitCode.REFUSED, text)
    return preview


def print_forecast(preview: Mapping[str, Any]) -> None:
    """Print the forecasts of a preview on standard error, a line for each."""
    for row in build_forecast_rows(preview):
        held_text = " (held)" if row["held"] else ""
        click.echo(to_printable_line(f"{row['number']} {row['outcome']}: {row['text']}{held_text}"), err=True)


def get_generation(preview: Mapping[str, Any]) -> dict[str, int]:
    """Return the field `generation` for a change of a driver on a single host, from its preview; {} for others."""
    steps = list(preview.get("steps", []))
    return {"generation": steps[0]["generation"]} if steps else {}


def build_forecast_rows(preview: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the forecasts of a preview as rows, with words for their outcomes."""
    return [one | {"outcome": OUTCOME_WORDS[one["outcome"]]} for one in preview["forecast"]]
