"""Render a Mermaid sequence diagram as SVG, so that the manual's pictures need no script.

It supports only what `docs/` uses: participants, numbered messages, `opt` … `end`. Anything else raises ValueError.
"""

from __future__ import annotations

import re
from html import escape

WIDTH, HEAD, STEP, GAP = 940, 44, 46, 26
LETTER = 6.4
"""Average width of a letter in user units."""
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)--?(?:>>|x)(\w+): (.+)")


def svg(source: str, name: str) -> str:
    """Return the diagram as SVG; `name` is its accessible name. Raises ValueError for a line that is not supported."""
    people: dict[str, str] = {}
    drawn: list[str] = []
    open_boxes: list[tuple[int, str]] = []
    number, y = 0, HEAD + 34
    for line in map(str.strip, source.strip().splitlines()):
        if found := PARTICIPANT.fullmatch(line):
            people[found[1]] = found[2]
        elif found := MESSAGE.fullmatch(line):
            number += 1
            drawn.append(_message(number, _x(people, found[1]), _x(people, found[2]), y, found[3]))
            y += STEP
        elif line.startswith("opt "):
            open_boxes.append((y - 18, line.removeprefix("opt ")))
            y += GAP
        elif line == "end":
            top, said = open_boxes.pop()
            drawn.insert(0, _box(top, y - 22, said))
            y += 6
        elif line not in ("sequenceDiagram", "autonumber"):
            raise ValueError(f"the manual cannot draw {line!r}")
    lines = "".join(_person(_x(people, key), word, y) for key, word in people.items())
    return (
        f'<svg class="sequence" viewBox="0 0 {WIDTH} {y + 4}" role="img" aria-label="{escape(name)}">'
        f"<desc>{escape(', '.join(people.values()))}. The table below explains each step.</desc>"
        f"{lines}{''.join(drawn)}</svg>"
    )


def _x(people: dict[str, str], key: str) -> int:
    pitch = (WIDTH - 110) // max(1, len(people) - 1)
    return 55 + pitch * list(people).index(key)


def _person(x: int, word: str, bottom: int) -> str:
    return (
        f'<path class="line" d="M{x} {HEAD}V{bottom}"/><rect class="who" x="{x - 50}" y="8" width="100" height="32"'
        f' rx="6"/><text class="name" x="{x}" y="29" text-anchor="middle">{escape(word)}</text>'
    )


def _message(number: int, start: int, end: int, y: int, said: str) -> str:
    if start == end:
        way, tip, at = f"M{start} {y}h26v14H{start + 3}", f"M{start + 9} {y + 10}l-7 4 7 4", start + 34
    else:
        step = 1 if end > start else -1
        way, tip, at = f"M{start} {y}H{end}", f"M{end - 8 * step} {y - 4}L{end - step} {y}l{-7 * step} 4", start
    left = min(start, end) + 15 if start != end else at
    text = min(left, WIDTH - 6 - int(len(said) * LETTER)) if start != end or left + len(said) * LETTER > WIDTH else left
    height = y - 7 if start != end or text != left else y + 11
    return (
        f'<path class="arrow" d="{way}{tip}"/><circle class="dot" cx="{start}" cy="{y}" r="9"/>'
        f'<text class="number" x="{start}" y="{y + 4}" text-anchor="middle">{number}</text>'
        f'<text class="said" x="{text}" y="{height}">{escape(said)}</text>'
    )


def _box(top: int, bottom: int, said: str) -> str:
    return (
        f'<rect class="maybe" x="3" y="{top}" width="{WIDTH - 6}" height="{bottom - top}" rx="6"/>'
        f'<text class="when" x="12" y="{top + 16}">if {escape(said)}</text>'
    )
