"""Test registries: names, order, refusals and replacement for tests. The architecture page must list all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accelerators.runtime.registry import RegistrationError, Registry

ROOT = Path(__file__).parents[3]
PRODUCT_FILES = [
    path
    for package in ("accelerators", "agents", "placement_sync", "cyborgweb", "drivers")
    for path in (ROOT / package).rglob("*.py")
]


@pytest.fixture
def shapes() -> Registry[int]:
    """Return a registry of shapes; each entry is the shape's number of corners."""
    registry: Registry[int] = Registry("shape")
    registry.register("triangle", 3)
    registry.register("square", 4)
    registry.register("pentagon", 5)
    return registry


def test_entries_are_found_by_name_and_listed_in_the_order_of_registration(shapes: Registry[int]) -> None:
    assert [*shapes.items()] == [("triangle", 3), ("square", 4), ("pentagon", 5)]
    assert (shapes["square"], shapes.get("circle"), "circle" in shapes, len(shapes)) == (4, None, False, 3)


def test_an_unknown_name_is_answered_with_the_known_ones(shapes: Registry[int]) -> None:
    with pytest.raises(KeyError, match="no shape 'circle' is registered; registered are: triangle, square, pentagon"):
        shapes["circle"]


def test_a_name_is_registered_once_but_the_same_entry_again_is_accepted(shapes: Registry[int]) -> None:
    shapes.register("square", 4)
    with pytest.raises(RegistrationError, match="Another shape is already registered as 'square'"):
        shapes.register("square", 5)
    assert (shapes["square"], len(shapes)) == (4, 3)


def test_a_single_registry_takes_one_entry_of_any_name() -> None:
    registry: Registry[int] = Registry("shape", single=True)
    assert not registry
    with pytest.raises(LookupError, match=r"No shape is registered\."):
        registry.only()
    registry.register("square", 4)
    assert registry and registry.only() == 4
    with pytest.raises(RegistrationError, match="The shape 'circle' is one too many: square is registered"):
        registry.register("circle", 0)
    with registry.replaced("circle", 0):
        assert [*registry.items()] == [("circle", 0)]
    with registry.replaced("circle", None):
        assert not registry
    assert registry.only() == 4


def test_a_replaced_added_or_removed_entry_is_restored_also_after_an_error(shapes: Registry[int]) -> None:
    before = [*shapes.items()]
    with shapes.replaced("square", 40), shapes.replaced("circle", 1), shapes.replaced("triangle", None):
        assert [*shapes.items()] == [("square", 40), ("pentagon", 5), ("circle", 1)]
        shapes.register("hexagon", 6)
    assert [*shapes.items()] == before
    with pytest.raises(ZeroDivisionError), shapes.replaced("square", None):
        assert "square" not in shapes
        raise ZeroDivisionError
    assert [*shapes.items()] == before


def test_the_architecture_page_lists_every_registry_of_the_product() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    listed = re.findall(r"^\| `([a-z_.]+\.[A-Z_]+)` \|", page, re.MULTILINE)
    declared = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{name}"
        for path in PRODUCT_FILES
        for name in re.findall(r"^([A-Z_]+): Registry\[", path.read_text(), re.MULTILINE)
    }
    assert len(declared) >= 8
    assert (set(listed), len(listed)) == (declared, len(declared))


def test_entries_are_registered_in_apps_modules_only() -> None:
    registering = {path for path in PRODUCT_FILES if re.search(r"\b[A-Z_]{2,}\.register\(", path.read_text())}
    assert registering == {
        ROOT / package / "apps.py" for package in ("accelerators", "agents", "placement_sync", "cyborgweb")
    }
