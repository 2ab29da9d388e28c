"""Tests that today's protocol equals the recorded one; see `tests.agents.wire.record_transcripts` to record it."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from agents import wire
from tests.agents.wire.record_transcripts import Line, message_schemas, recording_path

DOCUMENTATION = {"description", "title"}
PROTOCOL_CHANGED = "the protocol has changed: if that is wanted, see docs/testing.md on how to record it"


def read_recording_with_head() -> tuple[dict[str, Any], list[Line]]:
    """Return the first line of this release's recording, which describes the release, and the lines of messages."""
    head, *lines = [json.loads(text) for text in recording_path("operators_day").read_text().splitlines()]
    return head, lines


def recorded_messages(kind: str) -> list[dict[str, Any]]:
    """Return the recorded messages of a type, in their order."""
    return [line["message"] for line in read_recording_with_head()[1] if line["message"]["type"] == kind]


def without_documentation(schema: Any) -> Any:
    """Return the schema without the documentation of its classes, which is not part of the protocol."""
    if isinstance(schema, dict):
        return {key: without_documentation(value) for key, value in schema.items() if key not in DOCUMENTATION}
    return [without_documentation(value) for value in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("side", ["agent", "gateway"])
def test_C2_the_present_messages_have_the_recorded_schema(side: str) -> None:
    head, _ = read_recording_with_head()
    today = json.loads(json.dumps(message_schemas()[side]))
    assert without_documentation(today) == without_documentation(head["schema"][side]), PROTOCOL_CHANGED


def test_C2_each_recorded_message_is_decoded_and_encoded_without_a_change() -> None:
    decoders = {"agent": wire.decode_from_agent, "gateway": wire.decode_from_gateway}
    for line in read_recording_with_head()[1]:
        message = decoders[line["from"]](json.dumps(line["message"]))
        assert not isinstance(message, wire.UnknownMessage), PROTOCOL_CHANGED
        assert wire.count_unknown_fields(json.dumps(line["message"]), message) == 0, PROTOCOL_CHANGED
        assert json.loads(wire.encode_message(message)) == line["message"], PROTOCOL_CHANGED


def test_every_type_of_message_was_recorded() -> None:
    known = {kind.__name__ for kind in (*get_args(wire.FromAgent), *get_args(wire.FromGateway))}
    assert {line["message"]["type"] for line in read_recording_with_head()[1]} == known


def list_stages(number: int) -> list[int]:
    """Return the positions in the recording at which a command was sent, taken, answered and acknowledged."""
    messages = [line["message"] for line in read_recording_with_head()[1]]

    def place(kind: str, **wanted: Any) -> int:
        return next(
            at
            for at, one in enumerate(messages)
            if one["type"] == kind and all(one[name] == value for name, value in wanted.items())
        )

    taken = next(at for at, one in enumerate(messages) if one["type"] == "Taken" and number in one["numbers"])
    return [
        place("Command", number=number),
        taken,
        place("Result", number=number),
        place("Ack", of="Result", seq=number),
    ]


def test_recorded_commands_were_taken_carried_out_and_acknowledged_in_this_order() -> None:
    commands = recorded_messages("Command")
    assert {message["op"] for message in commands} >= {"install", "program", "attach", "detach", "reset"}
    for message in commands:
        assert list_stages(message["number"]) == sorted(list_stages(message["number"]))
