"""Compute which providers Placement shall show for a host's deployables. Pure, free of Django: agents use it, too.

Names, ids, classes and traits are upstream's for the same hardware (contract sections 6.2 to 6.4). In addition,
`reserved` is set: a deployable that is not offered stays in Placement and cannot be allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelerators.domain.provider_ids import provider_uuid

CLASS_KEY, TRAIT_KEY = "rc", "trait"
WORD = re.compile(r"[A-Z0-9_]{1,255}")
"""Pattern of a trait or a resource class."""


@dataclass(frozen=True)
class Part:
    """A deployable as it is stored. `rp_uuid` is '' until a provider id is recorded."""

    name: str
    rp_uuid: str
    total: int
    attributes: Mapping[str, str]
    offered: bool


@dataclass(frozen=True)
class Provider:
    """A desired provider, a child of the host's compute provider. Without a resource class it has no inventory."""

    uuid: str
    name: str
    resource_class: str
    total: int
    reserved: int
    traits: frozenset[str]


def desired(parts: Iterable[Part]) -> tuple[dict[str, Provider], list[str]]:
    """Return the desired providers by uuid, and a sentence for each problem.

    Problems are an unusable resource class, an unusable trait name, and two deployables with the same provider id (the
    first one is used).
    """
    providers: dict[str, Provider] = {}
    problems: list[str] = []
    for part in parts:
        provider = _provider(part, problems)
        if (other := providers.setdefault(provider.uuid, provider)) is not provider:
            problems.append(
                f"{part.name} has the provider id of {other.name}, {provider.uuid}, so it is not in Placement"
            )
    return providers, problems


def _provider(part: Part, problems: list[str]) -> Provider:
    wanted = part.attributes.get(CLASS_KEY, "")
    if not WORD.fullmatch(wanted):
        problems.append(f"{part.name} has no usable resource class ({wanted[:64]!r}), so it has no inventory")
        wanted = ""
    total = part.total if wanted else 0
    uuid = part.rp_uuid or str(provider_uuid(part.name))
    reserved = 0 if part.offered else total
    return Provider(uuid, part.name, wanted, total, reserved, _traits(part, problems))


def _traits(part: Part, problems: list[str]) -> frozenset[str]:
    named = {value for key, value in part.attributes.items() if key.startswith(TRAIT_KEY)}
    for name in sorted(named):
        if not WORD.fullmatch(name):
            problems.append(f"{part.name} has a trait whose name Placement does not accept: {name[:64]!r}")
    return frozenset(name for name in named if WORD.fullmatch(name))
