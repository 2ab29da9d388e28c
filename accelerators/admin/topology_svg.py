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
from accelerators.admin.pci_tree import BusPosition, TreeBranch
from accelerators.domain.choices import Choice, Tone
from accelerators.ui import badges, icons
from accelerators.ui.badges import GLYPHS


class HandleState(Choice):
    """The state of an attach handle in a picture.

    RELEASED: its request is gone, but its host has not confirmed yet that no guest uses it. RESERVED is a term of
    Placement: nobody holds the handle, but its device is not ready or is busy with a command.
    """

    FREE = "free"
    HELD = "held", "good"
    BEING_BOUND = "being bound", "busy"
    RELEASED = "released", "warn"
    RESERVED = "reserved"
    MISSING = "missing", "warn"
    MISSING_AND_HELD = "missing and held", "bad"

    @property
    def glyph(self) -> str:
        """Return the glyph in the handle's cell: that of its tone, or its own if another state has the same tone."""
        return {HandleState.RESERVED: "–", HandleState.RELEASED: "?"}.get(self, GLYPHS[self.tone])


HELD_STATES = (HandleState.HELD, HandleState.BEING_BOUND, HandleState.MISSING_AND_HELD)
PICTURE_WIDTH, COLUMN_WIDTH, GAP, PADDING = 1100, 508, 20, 16
GUTTER, INSET, ICON_SPACE, RIGHT_MARGIN = 50, 22, 60, 14
"""Widths in pixels. GUTTER: space for the lines of the PCI tree, left of a column of cards. INSET: what each box of a
bridge adds to this space. ICON_SPACE: space for the icon in a card. RIGHT_MARGIN: right margin in a card."""
CARD_HEAD, AREA_HEAD, CELL_PITCH, CELL_SIZE, CARD_SPACING, BRIDGE_BOX_HEIGHT = 58, 46, 24, 20, 12, 24
CARD_WIDTH = COLUMN_WIDTH - GUTTER
"""Width of a card if no bridges are known."""
MAX_CELL_ROWS = 4
MAX_CELLS = MAX_CELL_ROWS * ((CARD_WIDTH - ICON_SPACE - RIGHT_MARGIN) // CELL_PITCH) - 2
"""Maximum number of cells on a card of a host's picture: MAX_CELL_ROWS full rows, without the two places that the
number of the hidden handles takes."""
MAX_TEXT_LENGTH = 34
"""Maximum number of characters of a card's model and address beside its state; longer text is cut. The card's title has
all of it."""

CELLS_DESCRIPTION = "a cell for each function. The tables below contain the same data."
"""Part of the description of a picture, for readers who do not see it."""
NUMA_NODE_ICON = "M5 5h14v14H5zM9 9h6v6H9zM9 2v3M15 2v3M9 19v3M15 19v3M2 9h3M2 15h3M19 9h3M19 15h3"


@dataclass(frozen=True)
class HandleCell:
    """An attach handle and its holder.

    `state` is a value of `HandleState`, `deployable_id` the id of its deployable. `request`, `profile`, `instance` and
    `project` are '' if no request holds the handle. `reason` is why a released handle still waits, else ''.
    """

    name: str
    state: str
    url: str
    deployable_id: int = 0
    type: str = ""
    info: str = ""
    request: str = ""
    profile: str = ""
    instance: str = ""
    project: str = ""
    reason: str = ""

    @property
    def tooltip(self) -> str:
        """Return the text that is shown on hover and that screen readers read: name, state, and holder or reason."""
        if not self.request:
            return f"{self.name}: {self.state}{', ' if self.reason else ''}{self.reason}"
        holder = f"request {self.request[:8]} of {self.profile}, project {self.project}"
        return f"{self.name}: {self.state}, instance {self.instance or 'none yet'}, {holder}"


@dataclass(frozen=True)
class DeviceCard:
    """A device as the picture shows it.

    `status_badges` are words with their tones, the device's state first. `handle_counts` is the number of all its
    handles by state; `cells` are those handles that get a cell of their own. `numa` is -1 if unknown, `bus` is '' if
    the device is not on PCI, and `bridges` are the PCI bridges above it, root first.
    """

    name: str
    model: str
    type: str
    address: str
    numa: int
    bus: str
    url: str
    status_badges: tuple[tuple[str, Tone], ...]
    cells: tuple[HandleCell, ...] = ()
    handle_counts: Counter[str] = field(default_factory=Counter)
    bridges: tuple[str, ...] = ()

    @property
    def hidden_counts(self) -> Counter[str]:
        """Count, by state, the handles that have no cell of their own."""
        return self.handle_counts - Counter(unit.state for unit in self.cells)

    @property
    def held_count(self) -> int:
        """Return the number of handles that are held or being bound."""
        return sum(self.handle_counts[state] for state in HELD_STATES)


@dataclass(frozen=True)
class PlacedCard:
    """A card with the position of its upper left corner, relative to its area, and its width."""

    card: DeviceCard
    x: int
    y: int
    width: int = CARD_WIDTH

    @property
    def height(self) -> int:
        """Return the height of the card in units of the drawing; it depends on the number of cells."""
        cells = len(self.card.cells) + bool(self.card.hidden_counts)
        return CARD_HEAD + CELL_PITCH * max(1, -(-cells // self.cells_per_row)) + 8

    @property
    def cells_per_row(self) -> int:
        """Return the number of cells that fit into one row."""
        return (self.width - ICON_SPACE - RIGHT_MARGIN) // CELL_PITCH


@dataclass(frozen=True)
class PlacedBranch:
    """A branch with its position: a box of bridges, or a bus with its cards.

    `x` is the position of the vertical line to which it is connected, `y` that of its own horizontal line, and `right`
    the right edge of its column.
    """

    branch: TreeBranch
    x: int
    y: int
    right: int
    cards: tuple[PlacedCard, ...] = ()


@dataclass(frozen=True)
class NumaArea:
    """A NUMA node with its position, its size and its columns of branches; `numa` is negative if it is unknown."""

    numa: int
    x: int
    y: int
    width: int
    height: int
    columns: tuple[tuple[PlacedBranch, ...], ...]

    @property
    def placed_cards(self) -> list[PlacedCard]:
        """Return all cards of the NUMA node."""
        return [placed for column in self.columns for hung in column for placed in hung.cards]


def place_cards(cards: Iterable[DeviceCard]) -> list[NumaArea]:
    """Place the cards of a host, one area per NUMA node; cards whose NUMA node is unknown get the last area.

    Areas are arranged in rows of two. If their number is odd, the last area is as wide as two and has up to two columns
    of cards.
    """
    sorted_cards = sorted(cards, key=lambda card: (card.numa < 0, card.numa, card.bus == "", card.bus, card.address))
    nodes = [
        (numa, _group_by_bus(node_cards)) for numa, node_cards in groupby(sorted_cards, key=lambda card: card.numa)
    ]
    trees = [pci_tree.build_tree(buses) for _, buses in nodes]
    gutter = GUTTER + INSET * max((branch.depth for tree in trees for branch in tree), default=0)
    areas: list[NumaArea] = []
    top = 0
    for start in range(0, len(nodes), 2):
        row_nodes = nodes[start : start + 2]
        width = (PICTURE_WIDTH - GAP) // 2 if len(row_nodes) == 2 else PICTURE_WIDTH
        node_columns = [
            _place_columns(trees[start + n], buses, 3 - len(row_nodes), gutter)
            for n, (_, buses) in enumerate(row_nodes)
        ]
        height = PADDING + max(
            placed_card.y + placed_card.height
            for columns in node_columns
            for column in columns
            for branch in column
            for placed_card in branch.cards
        )
        areas += [
            NumaArea(numa, n * (width + GAP), top, width, height, columns)
            for n, ((numa, _), columns) in enumerate(zip(row_nodes, node_columns, strict=True))
        ]
        top += height + GAP
    return areas


def _group_by_bus(cards: Iterable[DeviceCard]) -> dict[BusPosition, list[DeviceCard]]:
    """Return the cards by bus address and bridges, in the order in which the buses first occur."""
    buses: dict[BusPosition, list[DeviceCard]] = {}
    for card in cards:
        buses.setdefault((card.bus, card.bridges), []).append(card)
    return buses


def _place_columns(
    tree: Sequence[TreeBranch], buses: Mapping[BusPosition, Sequence[DeviceCard]], max_columns: int, gutter: int
) -> tuple[tuple[PlacedBranch, ...], ...]:
    """Place the branches below each other in at most `max_columns` columns of about the same height.

    A column never begins inside a box of bridges. `gutter` is the width left of the cards, for the tree.
    """
    width = COLUMN_WIDTH - gutter
    heights = [
        sum(PlacedCard(card, 0, 0, width).height + CARD_SPACING for card in buses[branch.bus])
        if branch.bus
        else BRIDGE_BOX_HEIGHT + CARD_SPACING
        for branch in tree
    ]
    columns: list[list[PlacedBranch]] = [[]]
    x, y, used_height = PADDING, AREA_HEAD, 0
    for n, branch in enumerate(tree):
        if branch.depth == 0 and max_columns > len(columns) and used_height:
            next_root = next((m for m in range(n + 1, len(tree)) if tree[m].depth == 0), len(tree))
            if used_height + sum(heights[n:next_root]) / 2 > sum(heights) / 2:
                columns.append([])
                x, y = PICTURE_WIDTH - PADDING - COLUMN_WIDTH, AREA_HEAD
        line_x, cards = x + 9 + INSET * branch.depth, []
        middle_y = y + (CARD_HEAD if branch.bus else BRIDGE_BOX_HEIGHT) // 2
        for card in buses[branch.bus] if branch.bus else ():
            cards.append(PlacedCard(card, x + gutter, y, width))
            y += cards[-1].height + CARD_SPACING
        y += 0 if branch.bus else BRIDGE_BOX_HEIGHT + CARD_SPACING
        used_height += heights[n]
        columns[-1].append(PlacedBranch(branch, line_x, middle_y, x + COLUMN_WIDTH, tuple(cards)))
    return tuple(map(tuple, columns))


def draw_host(cards: Iterable[DeviceCard], name: str) -> SafeString:
    """Draw all cards of a host as one SVG; return '' if there are none. Texts from drivers are escaped."""
    areas = place_cards(cards)
    if not areas:
        return SafeString()
    height = max(area.y + area.height for area in areas)
    content = "".join(_draw_area(area) for area in areas)
    return _wrap_in_svg(
        PICTURE_WIDTH,
        height,
        f"The accelerators of {name}",
        f"Cards by NUMA node and bus; {CELLS_DESCRIPTION}",
        content,
    )


def draw_device(card: DeviceCard) -> SafeString:
    """Draw one card as an SVG. Texts from drivers are escaped."""
    placed = PlacedCard(card, 0, 0)
    return _wrap_in_svg(
        CARD_WIDTH, placed.height, f"The parts of {card.name}", f"One card, {CELLS_DESCRIPTION}", _draw_card(placed)
    )


def build_legend(cards: Iterable[DeviceCard]) -> Iterator[tuple[SafeString, str, int]]:
    """Yield, for each state of attach handles that occurs, a cell as SVG, the word and the number of handles."""
    counts = sum((card.handle_counts for card in cards), Counter[str]())
    for state in HandleState:
        if counts[state]:
            cell_svg = (
                f'<svg class="picture" width="{CELL_SIZE}" height="{CELL_SIZE}" aria-hidden="true">'
                f"{_draw_cell_box(state, 0, 0)}</svg>"
            )
            yield SafeString(cell_svg), state, counts[state]


def render_handle_state(cell: HandleCell) -> SafeString:
    """Render the state of an attach handle as a badge, as in the lists, with the reason on hover if there is one."""
    return badges.render_choice(HandleState(cell.state), cell.reason)


def _wrap_in_svg(width: int, height: int, name: str, description: str, content: str) -> SafeString:
    """Return the `svg` element around `content`, which must be SVG already; `name` and `description` are escaped."""
    # One unit of margin on each side, so that lines on the edge are not cut.
    size_attributes = f'viewBox="-1 -1 {width + 2} {height + 2}" width="{width + 2}" height="{height + 2}"'
    svg = f'<svg class="picture" {size_attributes} role="group" aria-label="{escape(name)}">'
    return SafeString(f"{svg}<desc>{escape(description)}</desc>{content}</svg>")


def _draw_area(area: NumaArea) -> str:
    """Return the SVG group of one NUMA node: background, heading with the number of held handles, tree and cards."""
    cards = [placed.card for placed in area.placed_cards]
    name = f"NUMA node {area.numa}" if area.numa >= 0 else "NUMA node unknown"
    held_count, handle_count = sum(card.held_count for card in cards), sum(card.handle_counts.total() for card in cards)
    summary = f"{len(cards)} card{'' if len(cards) == 1 else 's'} · {held_count} of {handle_count} held"
    return (
        f'<g class="area" role="group" aria-label="{name}, {summary}" transform="translate({area.x} {area.y})">'
        f'<rect class="ground" width="{area.width}" height="{area.height}" rx="10"/>'
        f'<path class="node" transform="translate({PADDING - 3} 12)" d="{NUMA_NODE_ICON}"/>'
        f'<text class="name" x="{PADDING + 32}" y="28" aria-hidden="true">{name}</text>'
        f'<text class="small end" x="{area.width - PADDING}" y="28" aria-hidden="true">{summary}</text>'
        f"{_draw_tree(area)}{''.join(map(_draw_card, area.placed_cards))}</g>"
    )


def _draw_tree(area: NumaArea) -> str:
    """Draw the lines of the tree, the boxes of bridges and the labels of buses.

    Lines go from the NUMA node to boxes and buses, from a box to everything behind it, and from a bus to its cards.
    """
    lines, labels = [], []
    for column in area.columns:
        first = column[0]
        # The second column is connected to the node as well, by a line of its own under the heading.
        start = f"M{PADDING + 9} {AREA_HEAD - 9}H{first.x}" if first.x > PADDING + 9 else f"M{first.x} {AREA_HEAD - 10}"
        lines.append(f"{start}V{max(hung.y for hung in column if hung.branch.depth == 0)}")
        for n, placed_branch in enumerate(column):
            if placed_branch.branch.bus is None:
                behind = _list_branches_behind(placed_branch, column[n + 1 :])
                last_y = max(one.y for one in behind if one.branch.depth == placed_branch.branch.depth + 1)
                box_bottom = placed_branch.y + BRIDGE_BOX_HEIGHT // 2
                lines.append(f"M{placed_branch.x} {placed_branch.y}h12M{placed_branch.x + INSET} {box_bottom}V{last_y}")
                labels.append(_draw_bridge_box(placed_branch, sum(len(one.cards) for one in behind)))
                continue
            card_x = placed_branch.cards[0].x
            card_middles = [one.y + CARD_HEAD // 2 for one in placed_branch.cards]
            lines.append(f"M{placed_branch.x} {placed_branch.y}H{card_x}")
            lines += [f"M{placed_branch.x + 20} {placed_branch.y}V{middle}H{card_x}" for middle in card_middles[1:]]
            labels.append(_draw_bus_label(placed_branch.branch, placed_branch.x + 20, placed_branch.y))
    return f'<path class="tree" d="{"".join(lines)}"/>{"".join(labels)}'


def _list_branches_behind(box: PlacedBranch, following: Sequence[PlacedBranch]) -> list[PlacedBranch]:
    """Return the branches of `following`, which come after the box in its column, that are behind the box."""
    return list(takewhile(lambda one: one.branch.depth > box.branch.depth, following))


def _draw_bridge_box(placed_box: PlacedBranch, card_count: int) -> str:
    """Draw a box with the addresses of its bridges; of three or more only the first and the last are shown.

    All addresses are shown on hover.
    """
    addresses, x = placed_box.branch.bridges, placed_box.x + 12
    name = "switch" if placed_box.branch.switch else f"bridge{'' if len(addresses) == 1 else 's'}"
    shown_addresses = addresses if len(addresses) < 3 else (addresses[0], "…", addresses[-1])
    tooltip = f"{name}: {' › '.join(addresses)}, {card_count} cards behind it"
    return (
        f'<g class="bridges" role="img"><title>{escape(tooltip)}</title>'
        f'<rect x="{x}" y="{placed_box.y - BRIDGE_BOX_HEIGHT // 2}" width="{placed_box.right - x}"'
        f' height="{BRIDGE_BOX_HEIGHT}" rx="6"/>'
        f'<text class="mono" x="{x + 12}" y="{placed_box.y + 4}">{escape(" › ".join(shown_addresses))}</text>'
        f'<text class="end" x="{placed_box.right - RIGHT_MARGIN}" y="{placed_box.y + 4}">'
        f"{name} · {card_count} cards</text></g>"
    )


def _draw_bus_label(branch: TreeBranch, x: int, y: int) -> str:
    """Draw the label of a bus at this position, with the bus address and its bridges on hover; "–" if not on PCI."""
    bus = branch.bus[0] if branch.bus else ""
    bus_text = f"PCI bus {bus}" if bus else "not on PCI"
    bridges_text = f", behind {' › '.join(branch.bridges)}" if branch.bridges else ""
    return (
        f'<g class="bus" role="img"><title>{escape(bus_text + bridges_text)}</title>'
        f'<rect x="{x - 14}" y="{y - 9}" width="28" height="18" rx="9"/>'
        f'<text x="{x}" y="{y + 4}">{escape(bus.rpartition(":")[2] or "–")}</text></g>'
    )


def _draw_card(placed: PlacedCard) -> str:
    """Return the SVG group of a card, as a link to the device: icon, model, type, address, badges and cells."""
    card, width, height = placed.card, placed.width, placed.height
    (state, tone), *other_badges = card.status_badges
    status_text = ", ".join(word for word, _ in card.status_badges)
    tooltip = f"{card.name}: {status_text}, {card.held_count} of {card.handle_counts.total()} held"
    other_badges_svg = " ".join(
        f'<tspan class="{tone}">{GLYPHS[tone]} {escape(word)}</tspan>' for word, tone in other_badges
    )
    icon = icons.get_icon_path(card.type)
    return (
        f'<g class="card {tone}{" absent" if state == "missing" else ""}" transform="translate({placed.x} {placed.y})">'
        f'<a href="{escape(card.url)}"><title>{escape(tooltip)}</title>'
        f'<rect class="face" width="{width}" height="{height}" rx="8"/>'
        f'<path class="edge" d="M8 .5H5a4.5 4.5 0 0 0-4.5 4.5V{height - 5}a4.5 4.5 0 0 0 4.5 4.5h3z"/>'
        f'<path class="shape" transform="translate(16 11)" d="{icon}"/>'
        f'<g aria-hidden="true"><text class="name" x="{ICON_SPACE}" y="25">{escape(_truncate(card.model))}</text>'
        f'<text class="small end" x="{width - RIGHT_MARGIN}" y="25">'
        f'<tspan class="{tone}">{GLYPHS[tone]} {escape(state)}</tspan></text>'
        f'<text class="small" x="{ICON_SPACE}" y="44">{escape(card.type)} '
        f'<tspan class="mono">{escape(_truncate(card.address))}'
        f'</tspan></text><text class="small end" x="{width - RIGHT_MARGIN}" y="44">{other_badges_svg}</text></g></a>'
        f"{_draw_cells(placed)}</g>"
    )


def _draw_cells(placed: PlacedCard) -> str:
    """Return the cells of a card's handles and, if some have no cell, their number; a text if there are none."""
    card, per_row = placed.card, placed.cells_per_row
    if not card.handle_counts.total():
        return f'<text class="small" x="{ICON_SPACE}" y="{CARD_HEAD + 14}">no attach handles</text>'
    positions = ((ICON_SPACE + CELL_PITCH * (n % per_row), CARD_HEAD + CELL_PITCH * (n // per_row)) for n in count())
    cells = [_draw_cell(unit, *place) for unit, place in zip(card.cells, positions, strict=False)]
    if hidden := card.hidden_counts:
        tooltip = f"{hidden.total()} more: " + ", ".join(f"{number} {state}" for state, number in hidden.items())
        cells.append(_draw_hidden_count(card.url, tooltip, hidden.total(), *next(positions)))
    return "".join(cells)


def _draw_cell(cell: HandleCell, x: int, y: int) -> str:
    """Return the SVG of one handle's cell, as a link to its holder or to the handle, with its tooltip."""
    return f'<a href="{escape(cell.url)}"><title>{escape(cell.tooltip)}</title>{_draw_cell_box(cell.state, x, y)}</a>'


def _draw_cell_box(state: str, x: int, y: int) -> str:
    """Return the SVG of a cell without link: a square in the style of `state` (a `HandleState`) with its glyph."""
    css_class = state.replace(" ", "-")
    return (
        f'<g class="cell {css_class}">'
        f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{CELL_SIZE - 1}" height="{CELL_SIZE - 1}" rx="4"/>'
        f'<text x="{x + CELL_SIZE // 2}" y="{y + 14}" aria-hidden="true">{HandleState(state).glyph}</text></g>'
    )


def _draw_hidden_count(url: str, tooltip: str, number: int, x: int, y: int) -> str:
    """Return the SVG of the number of handles without a cell, such as "+12", as a link with a tooltip."""
    return (
        f'<a href="{escape(url)}"><title>{escape(tooltip)}</title>'
        f'<text class="small rest" x="{x + 2}" y="{y + 14}">+{number}</text></a>'
    )


def _truncate(text: str) -> str:
    """Return the text, cut to MAX_TEXT_LENGTH characters with "…" at the end."""
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[: MAX_TEXT_LENGTH - 1]}…"
