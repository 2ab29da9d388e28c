"""Find the admission rule that decides about a newly found device.

The first rule that fits decides. A rule without patterns fits every device. Upper and lower case are equal, because
vendors and drivers do not agree on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec


class AdmissionFacts(NamedTuple):
    """The properties of a device that rules match, in the order of `EnabledRule`'s patterns."""

    host: str
    driver: str
    vendor: str
    model: str
    type: str


class EnabledRule(msgspec.Struct, frozen=True, array_like=True):
    """An enabled row of `accelerators_admissionrule`. A pattern may contain * and ?, as in file names; an empty pattern
    fits everything."""

    name: str
    action: str
    host: str = ""
    driver: str = ""
    vendor: str = ""
    model: str = ""
    type: str = ""

    @property
    def state_by(self) -> str:
        """The text that `state_by` of the device gets: `rule`, then the rule's name."""
        return f"rule {self.name}"

    def matches(self, device: AdmissionFacts) -> bool:
        """Return True if every pattern matches the device."""
        patterns = (self.host, self.driver, self.vendor, self.model, self.type)
        return all(
            not pattern or fnmatchcase(fact.casefold(), pattern.casefold())
            for pattern, fact in zip(patterns, device, strict=True)
        )


decode_rules = msgspec.json.Decoder(tuple[EnabledRule, ...]).decode
"""Decode the enabled rules, in the order in which they are tried, as `merge_sql.LOCK_HOSTS` returns them."""


def first_matching_rule(rules: Iterable[EnabledRule], device: AdmissionFacts) -> EnabledRule | None:
    """Return the first rule that fits the device, None if no rule does."""
    return next((rule for rule in rules if rule.matches(device)), None)
