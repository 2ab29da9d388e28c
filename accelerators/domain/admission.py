"""Which rule admits a device that is found. Pure: called by `diff` for what is new, by `rules` for what waits.

The first rule that fits decides. A rule without anything to fit fits every device; letters' case does not matter, as
vendors and drivers do not agree on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec


class Facts(NamedTuple):
    """What a rule looks at, in the order of `Rule`'s patterns."""

    host: str
    driver: str
    vendor: str
    model: str
    type: str


class Rule(msgspec.Struct, frozen=True, array_like=True):
    """An enabled row of `accelerators_admissionrule`; '' fits everything, * and ? as in file names."""

    name: str
    action: str
    host: str = ""
    driver: str = ""
    vendor: str = ""
    model: str = ""
    type: str = ""

    @property
    def by(self) -> str:
        """Who decided, as a device says it."""
        return f"rule {self.name}"

    def fits(self, device: Facts) -> bool:
        """Whether every pattern does."""
        patterns = (self.host, self.driver, self.vendor, self.model, self.type)
        return all(
            not pattern or fnmatchcase(fact.casefold(), pattern.casefold())
            for pattern, fact in zip(patterns, device, strict=True)
        )


decode = msgspec.json.Decoder(tuple[Rule, ...]).decode
"""The rules in the order in which they are tried, as `inventory_sql.RULES` has them."""


def first(rules: Iterable[Rule], device: Facts) -> Rule | None:
    """The rule that decides, if any does."""
    return next((rule for rule in rules if rule.fits(device)), None)
