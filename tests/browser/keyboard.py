"""Operate a page with key presses only, and check at each stop of the focus that a person could follow it.

Nothing here clicks or calls `focus()`. At each stop the focused element must be inside the window, not covered, and
drawn differently from before; and it must follow the last stop in reading order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Page, expect

REMEMBER_LOOKS = """() => {
    if (window.rememberedLooks) return;
    const looks = window.rememberedLooks = new WeakMap();
    const partsOf = one => [one, ...(one instanceof SVGElement ? one.querySelectorAll(".face, rect, .rest") : []),
        ...(one.labels ?? []), ...(one.id === "menu" ? document.querySelectorAll(".menu-button") : [])];
    window.lookOf = one => partsOf(one).map(part => {
        const style = getComputedStyle(part);
        return [style.outlineStyle, style.outlineWidth, style.outlineColor, style.boxShadow, style.borderColor,
                style.stroke, style.strokeWidth, style.textDecorationLine].join(); }).join("|");
    for (const one of document.querySelectorAll("a, button, input, select, summary, textarea, [tabindex]"))
        if (one !== document.activeElement) looks.set(one, window.lookOf(one)); }"""
"""Store how each control looks without the focus. Of a picture its shapes count, and of the menu its button."""
DESCRIBE_FOCUS = """() => {
    const one = document.activeElement, box = one.getBoundingClientRect();
    const labels = [...(one.labels ?? [])].map(label => label.textContent).join(" ");
    const ids = (one.getAttribute("aria-labelledby") ?? "").split(" ")
        .map(id => document.getElementById(id)?.textContent);
    const text = [...one.childNodes].map(node => node.nodeType === Node.ELEMENT_NODE
        ? (node.matches("[aria-hidden=true], [class*=material-symbols]") ? "" : node.textContent) : node.data).join("");
    const name = one === document.body ? "" : one.ariaLabel || ids.join("") || labels || text || one.value
        || one.title || one.placeholder || "";
    const spots = [[.5, .5], [.05, .5], [.95, .5], [.5, .1], [.5, .9]].map(([x, y]) =>
        document.elementFromPoint(box.left + box.width * x, box.top + box.height * y)).filter(spot => spot);
    const all = [...document.querySelectorAll("a[href], button, input, select, summary, textarea, [tabindex]")];
    const isOurs = spot => one.contains(spot) || spot.contains(one) && spot.matches("label, svg, svg *")
        || [...(one.labels ?? [])].some(label => label.contains(spot))
        || one.id === "menu" && document.querySelector(".menu-button").checkVisibility();
    return { name: name.replace(/\\s+/g, " ").trim(), kind: one.tagName.toLowerCase(), at: all.indexOf(one),
             isDisabled: one.getAttribute("aria-disabled") === "true", isSized: box.width > 0 && box.height > 0,
             isUncovered: spots.some(isOurs), isInWindow: box.bottom > 0 && box.top < innerHeight
                 && box.right > 0 && box.left < innerWidth,
             isMarked: !window.rememberedLooks?.has(one) || window.rememberedLooks.get(one) !== window.lookOf(one),
             left: box.left, right: box.right, top: box.top, bottom: box.bottom,
             html: one.outerHTML.slice(0, 200) }; }"""


@dataclass
class Keyboard:
    """Presses keys on one page. `stops` counts the stops of the Tab key that were checked."""

    page: Page
    stops: int = 0

    def read_focus(self) -> dict[str, Any]:
        """Return what has the focus, and how it is drawn."""
        found: dict[str, Any] = self.page.evaluate(DESCRIBE_FOCUS)
        return found

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self.page.keyboard.press(key)

    def type(self, text: str) -> None:
        """Type text into what has the focus, in place of the text that is there."""
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)

    def step(self, key: str = "Tab") -> dict[str, Any]:
        """Press Tab, or Shift+Tab; fail unless a person sees what has the focus now. Return it."""
        self.page.evaluate(REMEMBER_LOOKS)
        self.page.keyboard.press(key)
        now = self.read_focus()
        self.stops += 1
        if now["kind"] == "body":
            return now
        for state, problem in (
            ("isSized", "has no size"),
            ("isInWindow", "is outside the window"),
            ("isUncovered", "is covered by something else"),
            ("isMarked", "looks as it does without the focus"),
        ):
            assert now[state], f"{now['name']!r} has the focus, but {problem}: {now['html']}"
        return now

    def go_to(self, wanted: str, kind: str = "", key: str = "Tab", limit: int = 150) -> None:
        """Press Tab (or Shift+Tab) until a control has the focus whose name matches the regular expression `wanted`.

        It must be a `kind` of element, if one is given. Fails if a stop is out of order, or if the way is longer than
        `limit`.
        """

        def is_wanted(stop: dict[str, Any]) -> bool:
            return bool(re.fullmatch(wanted, stop["name"])) and kind in ("", stop["kind"])

        before = self.read_focus()
        if is_wanted(before):
            return
        passed = []
        for _ in range(limit):
            now = self.step(key)
            passed.append(now["name"])
            forwards = now["at"] > before["at"] if key == "Tab" else now["at"] < before["at"]
            wrapped = now["at"] <= 0 or before["at"] <= 0
            assert forwards or wrapped, f"{now['name']!r} comes after {before['name']!r}, out of order"
            is_above_and_left = now["bottom"] <= before["top"] and now["right"] <= before["left"]
            assert wrapped or key != "Tab" or not is_above_and_left, (
                f"{now['name']!r} is above and left of {before['name']!r}, which comes before it"
            )
            before = now
            if is_wanted(now):
                return
        raise AssertionError(f"no way to {wanted!r} with {key}: {passed}")

    def press_button(self, wanted: str) -> None:
        """Go to the button whose name matches the regular expression `wanted`, and press Enter there."""
        self.go_to(wanted, "button")
        self.press("Enter")

    def follow(self, wanted: str, address: str | re.Pattern[str], key: str = "Enter") -> None:
        """Go to the control `wanted`, press it, and wait for the page with an address that matches `address`."""
        self.go_to(wanted)
        self.page.keyboard.press(key)
        self.arrive(address)

    def arrive(self, address: str | re.Pattern[str]) -> None:
        """Wait for a page, and fail unless its focus is where a reader begins: at its top or in its content."""
        self.page.wait_for_url(address)
        self.page.wait_for_load_state()
        self.check_start()

    def check_start(self) -> None:
        """Fail unless the focus is at the top of the page, or inside its content."""
        is_sensible = self.page.evaluate(
            """() => { const one = document.activeElement, main = document.querySelector("main, #main, #content");
                       return one === document.body || Boolean(main?.contains(one)); }"""
        )
        assert is_sensible, f"a new page begins at {self.read_focus()['html']}"

    def leave_page(self, limit: int = 400) -> int:
        """Press Tab until the focus leaves the page or returns to its first stop; return the number of stops."""
        first = self.step()
        for count in range(1, limit):
            now = self.step()
            if now["at"] in (first["at"], -1):
                return count
        raise AssertionError(f"the focus does not leave the page, and is at {self.read_focus()['html']}")

    def check_focused(self, name: str) -> None:
        """Fail unless the control with this name has the focus, now or soon."""
        expect(self.page.locator(":focus")).to_have_count(1)
        assert self.read_focus()["name"] == name, self.read_focus()["html"]
