"""Read recordings of this and earlier releases, and decide whether a message has the same meaning as the recorded one.

Values that differ from run to run were replaced by placeholders when they were recorded
(`record_transcripts.replace_volatile_values`), and are replaced in each answer before it is compared. Sentences for
people may change from release to release; everything else may only grow: a peer that knows the recorded release must
find each field and each member of a list that it knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.wire.record_transcripts import TRANSCRIPTS, Line, replace_volatile_values

RECORDINGS = sorted(TRANSCRIPTS.glob("release_*_wire_*/*.jsonl"))
every_recording = pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.parent.name)
FREE_TEXT = {"agent_version", "boot_id", "log", "reason", "report", "samples", "signals", "text", "version", "writes"}
"""Names of fields whose text may change from release to release, or from run to run."""


def read_recording(path: Path) -> list[Line]:
    """Return the recorded lines, in their order: `from` and `message`."""
    _, *lines = [json.loads(text) for text in path.read_text().splitlines()]
    return lines


def encode(message: Line) -> str:
    """Return a text frame as both ends write it, without spaces."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False)


def has_meaning(recorded: Any, answer: Any, name: str = "") -> bool:
    """Return whether a peer that expects the `recorded` value finds the same meaning in `answer`."""
    if name in FREE_TEXT and isinstance(recorded, str):
        return isinstance(answer, str) and bool(answer) == bool(recorded)
    if isinstance(recorded, dict):
        return isinstance(answer, dict) and all(
            key in answer and has_meaning(value, answer[key], key) for key, value in recorded.items()
        )
    if isinstance(recorded, list):
        return isinstance(answer, list) and all(any(has_meaning(one, other) for other in answer) for one in recorded)
    return type(answer) is type(recorded) and bool(answer == recorded)


def answers_same_place(recorded: Line, answer: Line) -> bool:
    """Return whether `answer` has the type and the identifying fields of `recorded`; other fields are not compared."""
    exact = ("type", "of", "op", "code", "number", "numbers", "percent")
    return all(answer.get(name) == recorded[name] for name in exact if name in recorded)


def take_answer(recorded: Line, inbox: list[Line]) -> Line | None:
    """Remove the message that answers `recorded` from the inbox and return it, or None if it has not arrived yet.

    Raise AssertionError if it has arrived with another meaning.
    """
    found = next((one for one in inbox if answers_same_place(recorded, one)), None)
    if found is None:
        return None
    inbox.remove(found)
    assert has_meaning(recorded, replace_volatile_values(found)), (
        f"recorded: {recorded}\nnow: {replace_volatile_values(found)}"
    )
    return found
