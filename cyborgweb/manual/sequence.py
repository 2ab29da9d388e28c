"""Render a Mermaid sequence diagram as SVG, so that the manual's pictures need no script.

It supports only what `docs/` uses: participants, numbered messages, `opt` … `end`. Anything else raises ValueError.
"""

from __future__ import annotations

import re
from html import escape

DIAGRAM_WIDTH, HEAD_HEIGHT, STEP_HEIGHT, BOX_GAP = 940, 44, 46, 26
LETTER_WIDTH = 6.4
"""Average width of a letter in user units."""
PARTICIPANT_LINE = re.compile(r"participant (\w+) as (.+)")
MESSAGE_LINE = re.compile(r"(\w+)--?(?:>>|x)(\w+): (.+)")


def render_svg(source: str, name: str) -> str:
    """Return the diagram as SVG; `name` is its accessible name. Raises ValueError for a line that is not supported."""
    participants: dict[str, str] = {}
    elements: list[str] = []
    open_boxes: list[tuple[int, str]] = []
    number, y = 0, HEAD_HEIGHT + 34
    for line in map(str.strip, source.strip().splitlines()):
        if found := PARTICIPANT_LINE.fullmatch(line):
            participants[found[1]] = found[2]
        elif found := MESSAGE_LINE.fullmatch(line):
            number += 1
            elements.append(
                _draw_message(
                    number, _participant_x(participants, found[1]), _participant_x(participants, found[2]), y, found[3]
                )
            )
            y += STEP_HEIGHT
        elif line.startswith("opt "):
            open_boxes.append((y - 18, line.removeprefix("opt ")))
            y += BOX_GAP
        elif line == "end":
            top, condition = open_boxes.pop()
            elements.insert(0, _draw_box(top, y - 22, condition))
            y += 6
        elif line not in ("sequenceDiagram", "autonumber"):
            raise ValueError(f"the manual cannot draw {line!r}")
    lines = "".join(_draw_participant(_participant_x(participants, key), word, y) for key, word in participants.items())
    return (
        f'<svg class="sequence" viewBox="0 0 {DIAGRAM_WIDTH} {y + 4}" role="img" aria-label="{escape(name)}">'
        f"<desc>{escape(', '.join(participants.values()))}. The table below explains each step.</desc>"
        f"{lines}{''.join(elements)}</svg>"
    )


def _participant_x(participants: dict[str, str], key: str) -> int:
    pitch = (DIAGRAM_WIDTH - 110) // max(1, len(participants) - 1)
    return 55 + pitch * list(participants).index(key)


def _draw_participant(x: int, word: str, bottom: int) -> str:
    return (
        f'<path class="line" d="M{x} {HEAD_HEIGHT}V{bottom}"/>'
        f'<rect class="who" x="{x - 50}" y="8" width="100" height="32" rx="6"/>'
        f'<text class="name" x="{x}" y="29" text-anchor="middle">{escape(word)}</text>'
    )


def _draw_message(number: int, start: int, end: int, y: int, label: str) -> str:
    if start == end:
        path, arrow_head, at = f"M{start} {y}h26v14H{start + 3}", f"M{start + 9} {y + 10}l-7 4 7 4", start + 34
    else:
        step = 1 if end > start else -1
        path, arrow_head, at = f"M{start} {y}H{end}", f"M{end - 8 * step} {y - 4}L{end - step} {y}l{-7 * step} 4", start
    left = min(start, end) + 15 if start != end else at
    text_x = (
        min(left, DIAGRAM_WIDTH - 6 - int(len(label) * LETTER_WIDTH))
        if start != end or left + len(label) * LETTER_WIDTH > DIAGRAM_WIDTH
        else left
    )
    text_y = y - 7 if start != end or text_x != left else y + 11
    return (
        f'<path class="arrow" d="{path}{arrow_head}"/><circle class="dot" cx="{start}" cy="{y}" r="9"/>'
        f'<text class="number" x="{start}" y="{y + 4}" text-anchor="middle">{number}</text>'
        f'<text class="said" x="{text_x}" y="{text_y}">{escape(label)}</text>'
    )


def _draw_box(top: int, bottom: int, condition: str) -> str:
    return (
        f'<rect class="maybe" x="3" y="{top}" width="{DIAGRAM_WIDTH - 6}" height="{bottom - top}" rx="6"/>'
        f'<text class="when" x="12" y="{top + 16}">if {escape(condition)}</text>'
    )
