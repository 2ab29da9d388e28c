"""Compute which providers Placement shall show for a host's deployables. This module is pure and does not use Django:
agents use it, too.

Names, ids, classes and traits are upstream's for the same hardware (contract sections 6.2 to 6.4). In addition,
`reserved` is set: a deployable that is not offered stays in Placement and cannot be allocated, and neither can a unit
that was released and that a guest may still use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelerators.domain.provider_ids import compute_provider_uuid

CLASS_KEY, TRAIT_KEY = "rc", "trait"
NAME_PATTERN = re.compile(r"[A-Z0-9_]{1,255}")
"""Pattern of a trait or a resource class."""


@dataclass(frozen=True)
class DeployableRecord:
    """The stored data from which the desired provider of a deployable is computed.

    `total` is 0 while the deployable is missing. While `is_offered` is False (the device is not offered, or the
    deployable is missing) its provider stays, fully reserved. `rp_uuid` is '' until a provider id is recorded.
    `released` is the number of released handles that a guest may still use: as many units are reserved.
    """

    name: str
    rp_uuid: str
    total: int
    attributes: Mapping[str, str]
    is_offered: bool
    released: int = 0


@dataclass(frozen=True)
class DesiredProvider:
    """A desired provider, a child of the host's compute provider. Without a resource class it has no inventory."""

    uuid: str
    name: str
    resource_class: str
    total: int
    reserved: int
    traits: frozenset[str]


def compute_desired_providers(deployables: Iterable[DeployableRecord]) -> tuple[dict[str, DesiredProvider], list[str]]:
    """Return the desired providers by uuid, and a sentence for each problem.

    Problems are an unusable resource class, an unusable trait name, and two deployables with the same provider id (the
    first one is used).
    """
    providers: dict[str, DesiredProvider] = {}
    problems: list[str] = []
    for deployable in deployables:
        provider = _build_provider(deployable, problems)
        if (other := providers.setdefault(provider.uuid, provider)) is not provider:
            problems.append(
                f"{deployable.name} has the provider id of {other.name}, {provider.uuid}, so it is not in Placement"
            )
    return providers, problems


def _build_provider(deployable: DeployableRecord, problems: list[str]) -> DesiredProvider:
    """Build the desired provider of a deployable; append a sentence to `problems` for each unusable name.

    Without a usable resource class the provider gets no inventory.
    """
    resource_class = deployable.attributes.get(CLASS_KEY, "")
    if not NAME_PATTERN.fullmatch(resource_class):
        problems.append(
            f"{deployable.name} has no usable resource class ({resource_class[:64]!r}), so it has no inventory"
        )
        resource_class = ""
    total = deployable.total if resource_class else 0
    uuid = deployable.rp_uuid or str(compute_provider_uuid(deployable.name))
    reserved = min(deployable.released, total) if deployable.is_offered else total
    return DesiredProvider(
        uuid, deployable.name, resource_class, total, reserved, _collect_traits(deployable, problems)
    )


def _collect_traits(deployable: DeployableRecord, problems: list[str]) -> frozenset[str]:
    """Return the deployable's traits that Placement accepts; append a sentence to `problems` for each of the others."""
    names = {value for key, value in deployable.attributes.items() if key.startswith(TRAIT_KEY)}
    for name in sorted(names):
        if not NAME_PATTERN.fullmatch(name):
            problems.append(f"{deployable.name} has a trait whose name Placement does not accept: {name[:64]!r}")
    return frozenset(name for name in names if NAME_PATTERN.fullmatch(name))
