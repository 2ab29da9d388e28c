"""Draw a host or a device as SVG: NUMA nodes, bridges, buses, cards, and a cell for every attach handle.

The module does no input or output. `device_summaries` loads the cards, and `pci_tree` folds the tree of bridges.
Measures are in units of the drawing; colours are in `picture.css`. A state is shown by a fill, a glyph and a word in
the title, so that no reader depends on one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count, groupby, takewhile

from django.utils.safestring import SafeString

from accelerators.admin import pci_tree
from accelerators.admin.pci_tree import Branch, Bus
from accelerators.ui import badges
from accelerators.ui.badges import GLYPHS

UNITS = {
    "free": GLYPHS["calm"],
    "held": GLYPHS["good"],
    "being bound": GLYPHS["busy"],
    "reserved": "–",
    "missing": GLYPHS["warn"],
    "missing and held": GLYPHS["bad"],
}
"""Glyph of each state of an attach handle. Reserved (Placement's word): it is free, but its device is not offered."""

TONES = {
    "free": "calm",
    "held": "good",
    "being bound": "busy",
    "reserved": "calm",
    "missing": "warn",
    "missing and held": "bad",
}

WIDTH, COLUMN, GAP, PAD = 1100, 508, 20, 16
GUTTER, INSET, LEFT, RIGHT = 50, 22, 60, 14
"""Widths. GUTTER: room for the tree, left of a column of cards. INSET: added to it for each nested box of bridges.
LEFT: room for the icon in a card. RIGHT: right margin in a card."""
HEAD, AREA_HEAD, PITCH, CELL, BETWEEN, BOX = 58, 46, 24, 20, 12, 24
WHOLE = COLUMN - GUTTER
"""Width of a card if no bridges are known."""
ROWS = 4
SHOWN = ROWS * ((WHOLE - LEFT - RIGHT) // PITCH) - 2
"""Maximum number of cells on a card of a host's picture: ROWS full rows, without the two places that the number of the
hidden handles takes."""
TITLE = 34
"""Maximum number of characters of a card's model and address beside its state; longer text is cut. The card's title has
all of it."""

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
"""SVG path of the icon for each type of device, 36 units wide and high; '' is the icon of all other types."""
CELLS = "a cell for each function. The tables below contain the same data."
"""Part of the description of a picture, for readers who do not see it."""
NODE = "M5 5h14v14H5zM9 9h6v6H9zM9 2v3M15 2v3M9 19v3M15 19v3M2 9h3M2 15h3M19 9h3M19 15h3"


@dataclass(frozen=True)
class Unit:
    """An attach handle and its holder. `state` is a word of `UNITS`, `part` the id of its deployable."""

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
        """Return the text that is shown on hover and that screen readers read: name, state and holder."""
        if not self.request:
            return f"{self.name}: {self.state}"
        by = f"request {self.request[:8]} of {self.profile}, project {self.project}"
        return f"{self.name}: {self.state}, instance {self.instance or 'none yet'}, {by}"


@dataclass(frozen=True)
class Card:
    """A device as the picture shows it.

    `marks` are words with their tones, the device's state first. `counts` is the number of all its handles by state;
    `units` are those handles that get a cell of their own. `numa` is -1 if unknown, `bus` is '' if the device is not on
    PCI, and `bridges` are the PCI bridges above it, root first.
    """

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
    bridges: tuple[str, ...] = ()

    @property
    def hidden(self) -> Counter[str]:
        """Count, by state, the handles that have no cell of their own."""
        return self.counts - Counter(unit.state for unit in self.units)

    @property
    def held(self) -> int:
        """Return the number of handles that are held or being bound."""
        return sum(self.counts[state] for state in ("held", "being bound", "missing and held"))


@dataclass(frozen=True)
class Placed:
    """A card with the position of its upper left corner, relative to its area, and its width."""

    card: Card
    x: int
    y: int
    width: int = WHOLE

    @property
    def height(self) -> int:
        """Return the height of the card, which depends on its number of cells."""
        cells = len(self.card.units) + bool(self.card.hidden)
        return HEAD + PITCH * max(1, -(-cells // self.per_row)) + 8

    @property
    def per_row(self) -> int:
        """Return the number of cells that fit into one row."""
        return (self.width - LEFT - RIGHT) // PITCH


@dataclass(frozen=True)
class Hung:
    """A branch with its position: a box of bridges, or a bus with its cards.

    `x` is the position of the vertical line to which it is connected, `y` that of its own horizontal line, and `right`
    the right edge of its column.
    """

    branch: Branch
    x: int
    y: int
    right: int
    cards: tuple[Placed, ...] = ()


@dataclass(frozen=True)
class Area:
    """A NUMA node with its position, its size and its columns of branches."""

    numa: int
    x: int
    y: int
    width: int
    height: int
    columns: tuple[tuple[Hung, ...], ...]

    @property
    def placed(self) -> list[Placed]:
        """Return all cards of the NUMA node."""
        return [placed for column in self.columns for hung in column for placed in hung.cards]


def layout(cards: Iterable[Card]) -> list[Area]:
    """Place the cards of a host, one area per NUMA node; cards whose NUMA node is unknown get the last area.

    Areas are arranged in rows of two. If their number is odd, the last area is as wide as two and has up to two columns
    of cards.
    """
    known = sorted(cards, key=lambda card: (card.numa < 0, card.numa, card.bus == "", card.bus, card.place))
    nodes = [(numa, _by_bus(found)) for numa, found in groupby(known, key=lambda card: card.numa)]
    trees = [pci_tree.of(buses) for _, buses in nodes]
    gutter = GUTTER + INSET * max((branch.depth for tree in trees for branch in tree), default=0)
    areas: list[Area] = []
    top = 0
    for at in range(0, len(nodes), 2):
        row = nodes[at : at + 2]
        width = (WIDTH - GAP) // 2 if len(row) == 2 else WIDTH
        hung = [_columns(trees[at + n], buses, 3 - len(row), gutter) for n, (_, buses) in enumerate(row)]
        height = PAD + max(
            one.y + one.height for columns in hung for column in columns for branch in column for one in branch.cards
        )
        areas += [
            Area(numa, n * (width + GAP), top, width, height, columns)
            for n, ((numa, _), columns) in enumerate(zip(row, hung, strict=True))
        ]
        top += height + GAP
    return areas


def _by_bus(cards: Iterable[Card]) -> dict[Bus, list[Card]]:
    buses: dict[Bus, list[Card]] = {}
    for card in cards:
        buses.setdefault((card.bus, card.bridges), []).append(card)
    return buses


def _columns(
    tree: Sequence[Branch], buses: Mapping[Bus, Sequence[Card]], number: int, gutter: int
) -> tuple[tuple[Hung, ...], ...]:
    """Place the branches below each other in at most `number` columns of about the same height.

    A column never begins inside a box of bridges.
    """
    width = COLUMN - gutter
    sizes = [
        sum(Placed(card, 0, 0, width).height + BETWEEN for card in buses[branch.bus]) if branch.bus else BOX + BETWEEN
        for branch in tree
    ]
    columns: list[list[Hung]] = [[]]
    x, y, gone = PAD, AREA_HEAD, 0
    for n, branch in enumerate(tree):
        if branch.depth == 0 and number > len(columns) and gone:
            ends = next((m for m in range(n + 1, len(tree)) if tree[m].depth == 0), len(tree))
            if gone + sum(sizes[n:ends]) / 2 > sum(sizes) / 2:
                columns.append([])
                x, y = WIDTH - PAD - COLUMN, AREA_HEAD
        line, cards = x + 9 + INSET * branch.depth, []
        middle = y + (HEAD if branch.bus else BOX) // 2
        for card in buses[branch.bus] if branch.bus else ():
            cards.append(Placed(card, x + gutter, y, width))
            y += cards[-1].height + BETWEEN
        y += 0 if branch.bus else BOX + BETWEEN
        gone += sizes[n]
        columns[-1].append(Hung(branch, line, middle, x + COLUMN, tuple(cards)))
    return tuple(map(tuple, columns))


def host(cards: Iterable[Card], name: str) -> SafeString:
    """Draw all cards of a host as one SVG; '' if there are none."""
    areas = layout(cards)
    if not areas:
        return SafeString()
    height = max(area.y + area.height for area in areas)
    inside = "".join(_area(area) for area in areas)
    return _svg(WIDTH, height, f"The accelerators of {name}", f"Cards by NUMA node and bus; {CELLS}", inside)


def device(card: Card) -> SafeString:
    """Draw one card as an SVG."""
    placed = Placed(card, 0, 0)
    return _svg(WHOLE, placed.height, f"The parts of {card.name}", f"One card, {CELLS}", _card(placed))


def legend(cards: Iterable[Card]) -> Iterator[tuple[SafeString, str, int]]:
    """Yield, for each state of attach handles that occurs, a cell as SVG, the word and the number of handles."""
    counts = sum((card.counts for card in cards), Counter[str]())
    for state in UNITS:
        if counts[state]:
            box = f'<svg class="picture" width="{CELL}" height="{CELL}" aria-hidden="true">{_box(state, 0, 0)}</svg>'
            yield SafeString(box), state, counts[state]


def mark(state: str) -> SafeString:
    """Render the state of an attach handle as a badge, as in the lists."""
    return badges.mark(state, TONES[state])


def _svg(width: int, height: int, name: str, more: str, inside: str) -> SafeString:
    # One unit of margin on each side, so that lines on the edge are not cut.
    box = f'viewBox="-1 -1 {width + 2} {height + 2}" width="{width + 2}" height="{height + 2}"'
    svg = f'<svg class="picture" {box} role="group" aria-label="{escape(name)}">'
    return SafeString(f"{svg}<desc>{escape(more)}</desc>{inside}</svg>")


def _area(area: Area) -> str:
    cards = [placed.card for placed in area.placed]
    name = f"NUMA node {area.numa}" if area.numa >= 0 else "NUMA node unknown"
    held, handles = sum(card.held for card in cards), sum(card.counts.total() for card in cards)
    counted = f"{len(cards)} card{'' if len(cards) == 1 else 's'} · {held} of {handles} held"
    return (
        f'<g class="area" role="group" aria-label="{name}, {counted}" transform="translate({area.x} {area.y})">'
        f'<rect class="ground" width="{area.width}" height="{area.height}" rx="10"/>'
        f'<path class="node" transform="translate({PAD - 3} 12)" d="{NODE}"/>'
        f'<text class="name" x="{PAD + 32}" y="28" aria-hidden="true">{name}</text>'
        f'<text class="small end" x="{area.width - PAD}" y="28" aria-hidden="true">{counted}</text>'
        f"{_tree(area)}{''.join(map(_card, area.placed))}</g>"
    )


def _tree(area: Area) -> str:
    """Draw the lines of the tree, the boxes of bridges and the labels of buses.

    Lines go from the NUMA node to boxes and buses, from a box to everything behind it, and from a bus to its cards.
    """
    lines, shown = [], []
    for column in area.columns:
        first = column[0]
        # The second column is connected to the node as well, by a line of its own under the heading.
        start = f"M{PAD + 9} {AREA_HEAD - 9}H{first.x}" if first.x > PAD + 9 else f"M{first.x} {AREA_HEAD - 10}"
        lines.append(f"{start}V{max(hung.y for hung in column if hung.branch.depth == 0)}")
        for n, hung in enumerate(column):
            if hung.branch.bus is None:
                behind = _behind(hung, column[n + 1 :])
                last = max(one.y for one in behind if one.branch.depth == hung.branch.depth + 1)
                lines.append(f"M{hung.x} {hung.y}h12M{hung.x + INSET} {hung.y + BOX // 2}V{last}")
                shown.append(_bridges(hung, sum(len(one.cards) for one in behind)))
                continue
            left = hung.cards[0].x
            middles = [one.y + HEAD // 2 for one in hung.cards]
            lines.append(f"M{hung.x} {hung.y}H{left}")
            lines += [f"M{hung.x + 20} {hung.y}V{middle}H{left}" for middle in middles[1:]]
            shown.append(_pill(hung.branch, hung.x + 20, hung.y))
    return f'<path class="tree" d="{"".join(lines)}"/>{"".join(shown)}'


def _behind(box: Hung, following: Sequence[Hung]) -> list[Hung]:
    return list(takewhile(lambda one: one.branch.depth > box.branch.depth, following))


def _bridges(hung: Hung, cards: int) -> str:
    """Draw a box with the addresses of its bridges; of three or more only the first and the last are shown.

    The title has all addresses.
    """
    found, x = hung.branch.bridges, hung.x + 12
    name = "switch" if hung.branch.switch else f"bridge{'' if len(found) == 1 else 's'}"
    shown = found if len(found) < 3 else (found[0], "…", found[-1])
    said = f"{name}: {' › '.join(found)}, {cards} cards behind it"
    return (
        f'<g class="bridges" role="img"><title>{escape(said)}</title>'
        f'<rect x="{x}" y="{hung.y - BOX // 2}" width="{hung.right - x}" height="{BOX}" rx="6"/>'
        f'<text class="mono" x="{x + 12}" y="{hung.y + 4}">{escape(" › ".join(shown))}</text>'
        f'<text class="end" x="{hung.right - RIGHT}" y="{hung.y + 4}">{name} · {cards} cards</text></g>'
    )


def _pill(branch: Branch, x: int, y: int) -> str:
    bus = branch.bus[0] if branch.bus else ""
    said = f"PCI bus {bus}" if bus else "not on PCI"
    behind = f", behind {' › '.join(branch.bridges)}" if branch.bridges else ""
    return (
        f'<g class="bus" role="img"><title>{escape(said + behind)}</title>'
        f'<rect x="{x - 14}" y="{y - 9}" width="28" height="18" rx="9"/>'
        f'<text x="{x}" y="{y + 4}">{escape(bus.rpartition(":")[2] or "–")}</text></g>'
    )


def _card(placed: Placed) -> str:
    card, width, height = placed.card, placed.width, placed.height
    (state, tone), *others = card.marks
    said = f"{card.name}: {', '.join(word for word, _ in card.marks)}, {card.held} of {card.counts.total()} held"
    more = " ".join(f'<tspan class="{tone}">{GLYPHS[tone]} {escape(word)}</tspan>' for word, tone in others)
    shape = SHAPES.get(card.type, SHAPES[""])
    return (
        f'<g class="card {tone}{" absent" if state == "missing" else ""}" transform="translate({placed.x} {placed.y})">'
        f'<a href="{escape(card.url)}"><title>{escape(said)}</title>'
        f'<rect class="face" width="{width}" height="{height}" rx="8"/>'
        f'<path class="edge" d="M8 .5H5a4.5 4.5 0 0 0-4.5 4.5V{height - 5}a4.5 4.5 0 0 0 4.5 4.5h3z"/>'
        f'<path class="shape" transform="translate(16 11)" d="{shape}"/>'
        f'<g aria-hidden="true"><text class="name" x="{LEFT}" y="25">{escape(_cut(card.model))}</text>'
        f'<text class="small end" x="{width - RIGHT}" y="25"><tspan class="{tone}">{GLYPHS[tone]} {escape(state)}'
        f"</tspan></text>"
        f'<text class="small" x="{LEFT}" y="44">{escape(card.type)} <tspan class="mono">{escape(_cut(card.place))}'
        f'</tspan></text><text class="small end" x="{width - RIGHT}" y="44">{more}</text></g></a>'
        f"{_cells(placed)}</g>"
    )


def _cells(placed: Placed) -> str:
    card, per_row = placed.card, placed.per_row
    if not card.counts.total():
        return f'<text class="small" x="{LEFT}" y="{HEAD + 14}">no attach handles</text>'
    places = ((LEFT + PITCH * (n % per_row), HEAD + PITCH * (n // per_row)) for n in count())
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
