"""A host as a picture: NUMA nodes, PCI buses, cards, and a cell for every attach handle. Pure: structs in, SVG out.

Called by the pages of hosts and devices with what `admin.cards` read. Measures are in units of the drawing,
colours in `picture.css`. A state is a fill, a glyph and a word in the title, so that none of them is needed alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count, groupby

from django.utils.safestring import SafeString

from accelerators.admin import marks
from accelerators.admin.marks import GLYPHS

UNITS = {
    "free": GLYPHS["calm"],
    "held": GLYPHS["good"],
    "being bound": GLYPHS["busy"],
    "reserved": "–",
    "missing": GLYPHS["warn"],
    "missing and held": GLYPHS["bad"],
}
"""What an attach handle can be, with its glyph. Reserved: free, but its device is not offered (Placement's word)."""

TONES = {
    "free": "calm",
    "held": "good",
    "being bound": "busy",
    "reserved": "calm",
    "missing": "warn",
    "missing and held": "bad",
}

WIDTH, COLUMN, GAP, PAD = 1100, 508, 20, 16
GUTTER, LEFT, RIGHT = 50, 60, 14
"""The tree's room beside a column of cards; in a card, the icon's and the margin's."""
HEAD, AREA_HEAD, PITCH, CELL, BETWEEN = 58, 46, 24, 20, 12
PER_ROW = (COLUMN - GUTTER - LEFT - RIGHT) // PITCH
ROWS = 4
SHOWN = ROWS * PER_ROW - 2
"""So many cells on a card, among many; where the rest is counted takes the place of two."""
TITLE = 34
"""So many letters of a card's model fit beside its state; the title has all."""

SHAPES = {
    "GPU": "M3 9h30v18H3zM6 27v4M10 27v4M14 27v4M18 27v4M12 12.5a5.5 5.5 0 1 0 .01 0M24 12.5a5.5 5.5 0 1 0 .01 0"
    "M12 16.5a1.5 1.5 0 1 0 .01 0M24 16.5a1.5 1.5 0 1 0 .01 0",
    "FPGA": "M8 8h20v20H8zM13 3v5M18 3v5M23 3v5M13 28v5M18 28v5M23 28v5M3 13h5M3 18h5M3 23h5M28 13h5M28 18h5M28 23h5"
    "M12 12h5v5h-5zM19 12h5v5h-5zM12 19h5v5h-5zM19 19h5v5h-5z",
    "NIC": "M3 7h30v19H3zM7 26v4M11 26v4M15 26v4M7 21v-7h2v-2h4v2h2v7zM21 21v-7h2v-2h4v2h2v7z",
    "QAT": "M8 16h20v15H8zM12 16v-4a6 6 0 0 1 12 0v4M18 21a2 2 0 1 0 .01 0M18 25v3",
    "SSD": "M3 10h30v16H3zM7 14h7v8H7zM17 14h7v8h-7zM28 14v1M28 18v1M28 22v1",
    "AICHIP": "M8 8h20v20H8zM13 3v5M18 3v5M23 3v5M13 28v5M18 28v5M23 28v5M3 13h5M3 18h5M3 23h5M28 13h5M28 18h5M28 23h5"
    "M13 13l5 5 5-5M13 23l5-5 5 5M18 16.5a1.5 1.5 0 1 0 .01 0",
    "": "M3 9h30v17H3zM6 26v5M10 26v5M14 26v5M18 26v5M22 26v5",
}
"""One shape per type of device, 36 wide and high; '' for what is not here."""
NODE = "M5 5h14v14H5zM9 9h6v6H9zM9 2v3M15 2v3M9 19v3M15 19v3M2 9h3M2 15h3M19 9h3M19 15h3"


@dataclass(frozen=True)
class Unit:
    """An attach handle and who holds it; its state is a word of `UNITS`, `part` the id of its deployable."""

    name: str
    state: str
    url: str
    part: int = 0
    type: str = ""
    info: str = ""
    request: str = ""
    profile: str = ""
    instance: str = ""
    project: str = ""

    @property
    def said(self) -> str:
        """What is shown on hover and read aloud."""
        if not self.request:
            return f"{self.name}: {self.state}"
        by = f"request {self.request[:8]} of {self.profile}, project {self.project}"
        return f"{self.name}: {self.state}, instance {self.instance or 'none yet'}, {by}"


@dataclass(frozen=True)
class Card:
    """A device. `marks` are words with their tones, the state first; `counts` of all its handles by state, of which
    `units` are those to be shown one by one. `numa` -1: unknown; `bus` '': not on PCI."""

    name: str
    model: str
    type: str
    place: str
    numa: int
    bus: str
    url: str
    marks: tuple[tuple[str, str], ...]
    units: tuple[Unit, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def hidden(self) -> Counter[str]:
        """Those that are not shown one by one."""
        return self.counts - Counter(unit.state for unit in self.units)

    @property
    def held(self) -> int:
        """How many of its handles somebody has, or is getting."""
        return sum(self.counts[state] for state in ("held", "being bound", "missing and held"))

    @property
    def height(self) -> int:
        """Of its drawing."""
        cells = len(self.units) + bool(self.hidden)
        return HEAD + PITCH * max(1, -(-cells // PER_ROW)) + 8


@dataclass(frozen=True)
class Placed:
    """A card and where its upper left corner is, relative to its area."""

    card: Card
    x: int
    y: int

    @property
    def middle(self) -> int:
        """Where its branch comes in."""
        return self.y + HEAD // 2


@dataclass(frozen=True)
class Area:
    """A NUMA node and where it is; `buses` has the cards behind each port."""

    numa: int
    x: int
    y: int
    width: int
    height: int
    buses: tuple[tuple[Placed, ...], ...]

    @property
    def cards(self) -> list[Card]:
        """All of them."""
        return [placed.card for bus in self.buses for placed in bus]


def layout(cards: Iterable[Card]) -> list[Area]:
    """NUMA nodes side by side in pairs, one that is left over as wide as two; the unknown last."""
    known = sorted(cards, key=lambda card: (card.numa < 0, card.numa, card.bus == "", card.bus, card.place))
    nodes = [(numa, list(found)) for numa, found in groupby(known, key=lambda card: card.numa)]
    areas: list[Area] = []
    top = 0
    for at in range(0, len(nodes), 2):
        row = nodes[at : at + 2]
        width = (WIDTH - GAP) // 2 if len(row) == 2 else WIDTH
        placed = [_columns(found, 1 if len(row) == 2 else 2) for _, found in row]
        height = max(one.y + one.card.height for buses in placed for bus in buses for one in bus) + PAD
        areas += [
            Area(numa, n * (width + GAP), top, width, height, buses)
            for n, ((numa, _), buses) in enumerate(zip(row, placed, strict=True))
        ]
        top += height + GAP
    return areas


def _columns(cards: Sequence[Card], number: int) -> tuple[tuple[Placed, ...], ...]:
    """The buses below each other, broken into so many columns of about the same height."""
    buses = [list(found) for _, found in groupby(cards, key=lambda card: card.bus)]
    whole = sum(card.height + BETWEEN for card in cards)
    placed: list[tuple[Placed, ...]] = []
    x, y, gone = PAD, AREA_HEAD, 0
    for bus in buses:
        size = sum(card.height + BETWEEN for card in bus)
        if number == 2 and x == PAD and placed and gone + size / 2 > whole / 2:
            x, y = WIDTH - PAD - COLUMN, AREA_HEAD
        here = []
        for card in bus:
            here.append(Placed(card, x + GUTTER, y))
            y += card.height + BETWEEN
        gone += size
        placed.append(tuple(here))
    return tuple(placed)


def host(cards: Iterable[Card], name: str) -> SafeString:
    """All of a host's cards as one SVG; '' without any."""
    areas = layout(cards)
    if not areas:
        return SafeString()
    height = max(area.y + area.height for area in areas)
    return _svg(WIDTH, height, f"The accelerators of {name}", "".join(_area(area) for area in areas))


def device(card: Card) -> SafeString:
    """One card as an SVG."""
    return _svg(COLUMN - GUTTER, card.height, f"The parts of {card.name}", _card(Placed(card, 0, 0)))


def legend(cards: Iterable[Card]) -> Iterator[tuple[SafeString, str, int]]:
    """For every state that occurs: a cell as SVG, the word, how many."""
    counts = sum((card.counts for card in cards), Counter[str]())
    for state in UNITS:
        if counts[state]:
            box = f'<svg class="picture" width="{CELL}" height="{CELL}" aria-hidden="true">{_box(state, 0, 0)}</svg>'
            yield SafeString(box), state, counts[state]


def mark(state: str) -> SafeString:
    """The word of `UNITS` with its glyph, as the lists have their marks."""
    return marks.mark(state, TONES[state])


def _svg(width: int, height: int, name: str, inside: str) -> SafeString:
    # Half a unit around it: lines on the edge are whole.
    box = f'viewBox="-1 -1 {width + 2} {height + 2}" width="{width + 2}" height="{height + 2}"'
    svg = f'<svg class="picture" {box} role="group" aria-label="{escape(name)}">{inside}</svg>'
    return SafeString(svg)


def _area(area: Area) -> str:
    cards = area.cards
    name = f"NUMA node {area.numa}" if area.numa >= 0 else "NUMA node unknown"
    held, handles = sum(card.held for card in cards), sum(card.counts.total() for card in cards)
    counted = f"{len(cards)} card{'' if len(cards) == 1 else 's'} · {held} of {handles} held"
    return (
        f'<g class="area" role="group" aria-label="{name}, {counted}" transform="translate({area.x} {area.y})">'
        f'<rect class="ground" width="{area.width}" height="{area.height}" rx="10"/>'
        f'<path class="node" transform="translate({PAD - 3} 12)" d="{NODE}"/>'
        f'<text class="name" x="{PAD + 32}" y="28" aria-hidden="true">{name}</text>'
        f'<text class="small end" x="{area.width - PAD}" y="28" aria-hidden="true">{counted}</text>'
        f"{_tree(area)}{''.join(_card(placed) for bus in area.buses for placed in bus)}</g>"
    )


def _tree(area: Area) -> str:
    """From the node to every bus, from a bus to its cards."""
    lines, pills = [], []
    for left, column in groupby(area.buses, key=lambda bus: bus[0].x):
        x, buses = left - GUTTER + 9, list(column)
        # A second column hangs from the node as the first does, by a line of its own under the heading.
        start = f"M{PAD + 9} {AREA_HEAD - 9}H{x}" if left > PAD + GUTTER else f"M{x} {AREA_HEAD - 10}"
        lines.append(f"{start}V{buses[-1][0].middle}")
        for bus in buses:
            lines.append(f"M{x} {bus[0].middle}H{left}")
            lines += [f"M{x + 20} {bus[0].middle}V{one.middle}H{left}" for one in bus[1:]]
            pills.append(_pill(bus[0].card.bus, x + 20, bus[0].middle))
    return f'<path class="tree" d="{"".join(lines)}"/>{"".join(pills)}'


def _pill(bus: str, x: int, y: int) -> str:
    said = f"PCI bus {bus}" if bus else "not on PCI"
    return (
        f'<g class="bus"><title>{escape(said)}</title><rect x="{x - 14}" y="{y - 9}" width="28" height="18" rx="9"/>'
        f'<text x="{x}" y="{y + 4}">{escape(bus.rpartition(":")[2] or "–")}</text></g>'
    )


def _card(placed: Placed) -> str:
    card, width = placed.card, COLUMN - GUTTER
    (state, tone), *others = card.marks
    said = f"{card.name}: {', '.join(word for word, _ in card.marks)}, {card.held} of {card.counts.total()} held"
    more = " ".join(f'<tspan class="{tone}">{GLYPHS[tone]} {escape(word)}</tspan>' for word, tone in others)
    shape = SHAPES.get(card.type, SHAPES[""])
    return (
        f'<g class="card {tone}{" absent" if state == "missing" else ""}" transform="translate({placed.x} {placed.y})">'
        f'<a href="{escape(card.url)}"><title>{escape(said)}</title>'
        f'<rect class="face" width="{width}" height="{card.height}" rx="8"/>'
        f'<path class="edge" d="M8 .5H5a4.5 4.5 0 0 0-4.5 4.5V{card.height - 5}a4.5 4.5 0 0 0 4.5 4.5h3z"/>'
        f'<path class="shape" transform="translate(16 11)" d="{shape}"/>'
        f'<g aria-hidden="true"><text class="name" x="{LEFT}" y="25">{escape(_cut(card.model))}</text>'
        f'<text class="small end" x="{width - RIGHT}" y="25"><tspan class="{tone}">{GLYPHS[tone]} {escape(state)}'
        f"</tspan></text>"
        f'<text class="small" x="{LEFT}" y="44">{escape(card.type)} <tspan class="mono">{escape(_cut(card.place))}'
        f'</tspan></text><text class="small end" x="{width - RIGHT}" y="44">{more}</text></g></a>'
        f"{_cells(card)}</g>"
    )


def _cells(card: Card) -> str:
    if not card.counts.total():
        return f'<text class="small" x="{LEFT}" y="{HEAD + 14}">no attach handles</text>'
    places = ((LEFT + PITCH * (n % PER_ROW), HEAD + PITCH * (n // PER_ROW)) for n in count())
    cells = [_cell(unit, *place) for unit, place in zip(card.units, places, strict=False)]
    if hidden := card.hidden:
        said = f"{hidden.total()} more: " + ", ".join(f"{number} {state}" for state, number in hidden.items())
        cells.append(_more(card.url, said, hidden.total(), *next(places)))
    return "".join(cells)


def _cell(unit: Unit, x: int, y: int) -> str:
    return f'<a href="{escape(unit.url)}"><title>{escape(unit.said)}</title>{_box(unit.state, x, y)}</a>'


def _box(state: str, x: int, y: int) -> str:
    kind = state.replace(" ", "-")
    return (
        f'<g class="cell {kind}"><rect x="{x + 0.5}" y="{y + 0.5}" width="{CELL - 1}" height="{CELL - 1}" rx="4"/>'
        f'<text x="{x + CELL // 2}" y="{y + 14}" aria-hidden="true">{UNITS[state]}</text></g>'
    )


def _more(url: str, said: str, number: int, x: int, y: int) -> str:
    return (
        f'<a href="{escape(url)}"><title>{escape(said)}</title>'
        f'<text class="small rest" x="{x + 2}" y="{y + 14}">+{number}</text></a>'
    )


def _cut(text: str) -> str:
    return text if len(text) <= TITLE else f"{text[: TITLE - 1]}…"
