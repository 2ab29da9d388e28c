"""Describe what was ordered before the user interrupted a verb, and how to follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cyborgweb.cli.connection import ApiClient

MAX_NAMED_CHANGES = 3
SHOWING_VERB_BY_COLLECTION = {
    "commands": "command-show {} --wait",
    "rollouts": "rollout-show {} --wait",
    "attachments": "attachment-show {}",
    "bulk_actions": "bulk-show {} --wait",
    "devices": "device-show {}",
}
"""The verb that shows the outcome of a change, by the collection of the API that the change was sent to."""
OPEN_COMMANDS_VERB = "command-list --open"


def describe_interruption(api: ApiClient) -> str:
    """Return one sentence or several: what the server has accepted, how to look at it, and what may have happened to a
    request that was not answered yet.

    At most MAX_NAMED_CHANGES changes are named one by one.
    """
    sentences = ["Interrupted."]
    shown_changes = list(_list_showing_commands(api))
    if shown_changes:
        named = "; ".join(shown_changes[:MAX_NAMED_CHANGES])
        omitted = len(shown_changes) - MAX_NAMED_CHANGES
        rest = f"; and {omitted} more: {api.spell_verb(OPEN_COMMANDS_VERB)}" if omitted > 0 else ""
        sentences.append(
            f"{len(shown_changes)} {'change was' if len(shown_changes) == 1 else 'changes were'} accepted and "
            f"{'goes' if len(shown_changes) == 1 else 'go'} on. To look again: {named}{rest}."
        )
    if api.unanswered_change:
        sentences.append(
            f"The request to /api/{api.unanswered_change} was not answered yet: the change may have been made all the"
            " same; check before you repeat it."
        )
    elif not shown_changes:
        sentences.append("Nothing was ordered.")
    return " ".join(sentences)


def _list_showing_commands(api: ApiClient) -> Iterator[str]:
    """Yield, for each change that the server has accepted, the command line that shows what became of it."""
    for path, answer in api.answered_changes:
        for collection, uuid in _list_changed_objects(path, answer):
            verb, _, arguments = SHOWING_VERB_BY_COLLECTION[collection].partition(" ")
            yield f"{api.spell_verb(verb)} {arguments.format(uuid)}"


def _list_changed_objects(path: str, answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the collection and the uuid of each object that an answer is about and that a verb shows."""
    if answer.get("bulk_action"):
        yield "bulk_actions", answer["bulk_action"]
        return
    if isinstance(answer.get("results"), list):  # of a change of several devices: a command for each of them
        yield from (("commands", result["command"]) for result in answer["results"] if result.get("command"))
        return
    collection = "commands" if "device_name" in answer else path.partition("/")[0]
    if collection in SHOWING_VERB_BY_COLLECTION and answer.get("uuid"):
        yield collection, answer["uuid"]
