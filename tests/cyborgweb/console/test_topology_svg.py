"""Test the picture of a host: the places of its cards, its texts, and that it is readable and well-formed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, zip_longest
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from accelerators.admin import pci_tree, topology_svg
from accelerators.admin.topology_svg import (
    MAX_CELLS,
    PICTURE_WIDTH,
    DeviceCard,
    HandleCell,
    HandleState,
)
from accelerators.domain.states import DeviceType
from accelerators.ui.icons import DEVICE_ICONS

ANY_NAMESPACE = "{*}"


def build_card(bus: str = "0000:3b", numa: int = 0, units: int = 1, hidden: int = 0, **changes: object) -> DeviceCard:
    states = list(HandleState)
    shown = tuple(HandleCell(f"{bus}:00.{n}", states[n % len(states)], f"/handle/{n}/") for n in range(units))
    counts = Counter(unit.state for unit in shown) + Counter(free=hidden)
    values: dict[str, object] = {"name": f"L40S {bus}:00.0", "model": "L40S", "type": "GPU", "address": f"{bus}:00.0"}
    values |= {"numa": numa, "bus": bus, "url": "/device/1/", "status_badges": (("ready", "good"),)}
    return DeviceCard(**values | {"cells": shown, "handle_counts": counts} | changes)  # type: ignore[arg-type]


def list_titles(svg: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(svg).iter("title")]


def test_numa_nodes_are_drawn_in_pairs_and_the_unknown_one_last_at_full_width() -> None:
    areas = topology_svg.place_cards([build_card(numa=-1), build_card(numa=1), build_card(numa=0)])
    assert [area.numa for area in areas] == [0, 1, -1]
    assert areas[0].y == areas[1].y < areas[2].y
    assert areas[0].x + areas[0].width < areas[1].x
    assert areas[2].width == PICTURE_WIDTH
    assert "NUMA node unknown" in topology_svg.draw_host([build_card(numa=-1)], "cmp1")


def test_cards_of_one_bus_are_drawn_together_behind_one_port() -> None:
    found = [
        build_card("0000:d8"),
        build_card("0000:17"),
        build_card("0000:d8", address="0000:d8:00.1"),
        build_card(""),
    ]
    columns = topology_svg.place_cards(found)[0].columns
    buses = [[placed.card.bus for placed in hung.cards] for column in columns for hung in column]
    assert buses == [["0000:17"], ["0000:d8", "0000:d8"], [""]]
    assert {"PCI bus 0000:d8", "not on PCI"} <= set(
        list_titles(topology_svg.draw_host([build_card("0000:d8"), build_card("")], "cmp1"))
    )


ROOT_PORT, UPSTREAM_PORT = "0000:16:02.0", "0000:17:00.0"
"""A root port, and the upstream port of the switch behind it."""


def test_bridges_are_boxes_around_their_buses_and_chains_of_bridges_are_merged() -> None:
    behind_switch = [(f"0000:{n:02x}", (ROOT_PORT, UPSTREAM_PORT, f"0000:18:0{n - 0x19}.0")) for n in range(0x19, 0x1C)]
    alone, plain, off = ("0000:3b", ("0000:3a:01.0",)), ("0000:00", ()), ("", ())
    branches = pci_tree.build_tree([plain, *behind_switch, alone, off])
    assert [(one.depth, one.bus, one.bridges) for one in branches] == [
        (0, plain, ()),
        (0, None, (ROOT_PORT, UPSTREAM_PORT)),
        *((1, bus, bus[1][2:]) for bus in behind_switch),
        (0, alone, ("0000:3a:01.0",)),
        (0, off, ()),
    ]
    assert [one.switch for one in branches if one.bus is None] == [True]
    legacy = pci_tree.build_tree([("0000:41", (ROOT_PORT,)), ("0000:42", (ROOT_PORT, UPSTREAM_PORT))])
    assert (legacy[0].bus, legacy[0].switch) == (None, False)


def test_a_switch_is_drawn_with_its_name_and_the_cards_behind_it_indented() -> None:
    gpus = [
        build_card(f"0000:{n:02x}", bridges=(ROOT_PORT, UPSTREAM_PORT, f"0000:18:0{n - 0x19}.0"))
        for n in range(0x19, 0x1B)
    ]
    drawn_titles = list_titles(
        topology_svg.draw_host([*gpus, build_card("0000:3b", bridges=("0000:3a:01.0",))], "cmp1")
    )
    assert f"switch: {ROOT_PORT} › {UPSTREAM_PORT}, 2 cards behind it" in drawn_titles
    assert (
        "PCI bus 0000:19, behind 0000:18:00.0" in drawn_titles
        and "PCI bus 0000:3b, behind 0000:3a:01.0" in drawn_titles
    )
    ((*column,),) = topology_svg.place_cards(gpus)[0].columns
    assert [hung.x for hung in column] == [25, 25 + topology_svg.INSET, 25 + topology_svg.INSET]
    assert {placed.width for hung in column for placed in hung.cards} == {topology_svg.CARD_WIDTH - topology_svg.INSET}


ADDRESS = st.sampled_from([f"0000:{n:02x}:00.0" for n in range(6)])
BRIDGES = st.lists(ADDRESS, max_size=9).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["", "0000:17", "0000:3b"]), BRIDGES), max_size=12, unique=True))
def test_every_bus_occurs_once_in_the_tree_behind_all_its_bridges(buses: list[pci_tree.BusPosition]) -> None:
    branches = pci_tree.build_tree(buses)
    assert sorted(one.bus for one in branches if one.bus) == sorted(buses)
    above: list[tuple[str, ...]] = []
    for one, following in zip_longest(branches, branches[1:]):
        assert one is not None
        above[one.depth :] = [one.bridges]
        assert one.depth <= pci_tree.MAX_BOX_DEPTH and len(above) == one.depth + 1
        if one.bus:
            assert sum(above, ()) == one.bus[1]
        else:
            assert one.bridges and following and following.depth == one.depth + 1


@settings(max_examples=25)
@given(
    st.lists(
        st.builds(
            build_card,
            bus=st.sampled_from(["", "0000:17", "0000:3b", "0000:d8"]),
            numa=st.integers(-1, 3),
            units=st.sampled_from([0, 1, 16, 17, MAX_CELLS]),
            hidden=st.sampled_from([0, 200]),
            bridges=BRIDGES,
        ),
        max_size=10,
    )
)
def test_every_card_is_drawn_inside_its_area_without_overlaps(cards: list[DeviceCard]) -> None:
    areas = topology_svg.place_cards(cards)
    assert sum(len(area.placed_cards) for area in areas) == len(cards)
    for area in areas:
        assert area.x >= 0 and area.x + area.width <= PICTURE_WIDTH
        for one in area.placed_cards:
            assert one.x >= 0 and one.x + one.width <= area.width and one.y + one.height <= area.height
        for column in area.columns:
            boxes = [
                (hung.y - topology_svg.BRIDGE_BOX_HEIGHT // 2, topology_svg.BRIDGE_BOX_HEIGHT)
                for hung in column
                if hung.branch.bus is None
            ]
            drawn = sorted(boxes + [(one.y, one.height) for hung in column for one in hung.cards])
            assert all(y + high < following for (y, high), (following, _) in pairwise(drawn))
    if cards:
        ElementTree.fromstring(topology_svg.draw_host(cards, "cmp1"))


def test_each_unit_state_has_its_own_class_and_glyph_and_every_cell_is_a_link() -> None:
    svg = ElementTree.fromstring(topology_svg.draw_device(build_card(units=len(HandleState))))
    links = svg.findall(f".//{ANY_NAMESPACE}a")
    assert links[0].attrib["href"] == "/device/1/"
    cells = {
        cell.attrib["class"].removeprefix("cell "): cell for cell in svg.iter("g") if "cell " in cell.get("class", "")
    }
    assert set(cells) == {state.replace(" ", "-") for state in HandleState}
    assert len({(cell.find("text").text) for cell in cells.values()}) == len(HandleState)  # type: ignore[union-attr]
    assert [link.find("title").text for link in links[1:]] == [  # type: ignore[union-attr]
        f"0000:3b:00.{n}: {state}" for n, state in enumerate(HandleState)
    ]


def test_the_text_of_a_held_unit_names_instance_request_and_project() -> None:
    unit = HandleCell("0000:3b:00.2", "held", "/", 1, "PCI", "{}", "1a2b3c4d-…", "small", "i-1", "p-1")
    assert unit.tooltip == "0000:3b:00.2: held, instance i-1, request 1a2b3c4d of small, project p-1"


def test_functions_beyond_the_maximum_are_counted_instead_of_drawn() -> None:
    cards = [build_card(f"0000:{n:02x}", n % 2, MAX_CELLS, 256 - MAX_CELLS) for n in range(16)]
    svg = topology_svg.draw_host(cards, "cmp1")
    assert svg.count(f"+{256 - MAX_CELLS}<") == 16
    assert f"{256 - MAX_CELLS} more: {256 - MAX_CELLS} free" in list_titles(svg)
    assert max(area.height for area in topology_svg.place_cards(cards)) < 1500
    assert sum(number for *_, number in topology_svg.build_legend(cards)) == 16 * 256


def test_texts_from_drivers_are_escaped_in_the_picture() -> None:
    evil = '"><script>alert(1)</script>'
    svg = topology_svg.draw_host([build_card(model=evil, name=evil, address=evil, type=evil)], evil)
    assert "<script" not in svg
    assert evil in "".join(list_titles(svg))
    assert " style=" not in svg


def test_each_device_type_has_its_own_shape_and_unknown_types_a_plain_one() -> None:
    assert set(DEVICE_ICONS) == {kind.value for kind in DeviceType} | {""}
    assert len(set(DEVICE_ICONS.values())) == len(DEVICE_ICONS)
    assert DEVICE_ICONS[""] in topology_svg.draw_device(build_card(type="TPU"))


def test_a_host_without_cards_has_no_picture() -> None:
    assert topology_svg.draw_host([], "cmp1") == ""
