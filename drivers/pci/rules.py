"""The rules with which an operator selects PCI functions, and how a function is matched with them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from drivers.base import Settings
from drivers.errors import Invalid
from drivers.inventory import DeviceType
from drivers.pci.offer import MAX_DEVICES, DeviceOffer, Offer, describe_problem

BRIDGE = "06"
"""The PCI class of bridges, which are never offered."""

MatchT = TypeVar("MatchT", bound="PciMatch")
VfCount = Annotated[int, Meta(ge=0, le=1024)]
KernelDriverName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]*$", max_length=64)]
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]+$", max_length=32)]
"""The PCI address of a function or the name of its network interface; not a glob."""
HexGlob = Annotated[str, Meta(pattern=r"^[0-9a-f*?\[\]!:.-]+$", max_length=64)]


class PciMatch(Struct, frozen=True, forbid_unknown_fields=True, rename={"pci_class": "class"}):
    """Selects PCI functions by globs. `class` is compared with four digits (`0302`) and with six (`030200`)."""

    vendor: HexGlob = "*"
    product: HexGlob = "*"
    pci_class: HexGlob = "*"
    address: HexGlob = "*"


class PciRule(PciMatch, frozen=True, forbid_unknown_fields=True):
    """One rule of the settings: it selects functions to offer, and sets their type and wanted state.

    `type` is the device type; None takes it from the PCI class. The wanted state is `vfs`, the number of virtual
    functions, and `bind`, the kernel driver ('' for no driver of the host); None leaves either as it is.
    `vfs_beside_host` are names of functions whose number of virtual functions may be changed although the host itself
    uses them, such as the card of its default route; the function itself stays the host's. `offer` is how the functions
    are offered in Placement, and `devices` has exceptions for single ones.
    """

    type: DeviceType | None = None
    vfs: VfCount | None = None
    bind: KernelDriverName | None = None
    vfs_beside_host: Annotated[list[FunctionName], Meta(max_length=64)] = []
    offer: Offer = Offer()
    devices: Annotated[list[DeviceOffer], Meta(max_length=MAX_DEVICES)] = []


class PciSettings(Struct, frozen=True):
    """The settings of a PCI driver. Other keys are ignored."""

    rules: list[PciRule] = []


class PciFunction(Struct, frozen=True):
    """A PCI function as sysfs describes it; ids are lower-case hex without 0x, and `pci_class` has six digits."""

    address: str
    vendor: str
    product: str
    pci_class: str


def read_rules(settings: Settings, driver: str, *, finds_own_cards: bool) -> list[PciRule]:
    """Return the validated rules of the settings of `driver`. Raises Invalid, which names the rule, if one is unusable.

    A driver that `finds_own_cards` uses rules only to narrow them down, so a rule of it may select every function.
    """
    try:
        rules = msgspec.convert(settings, PciSettings).rules
    except msgspec.ValidationError as error:
        hint = " (hex digits in lower case without 0x, and * ? [] as wildcards)" if "regex" in str(error) else ""
        raise Invalid(f"the rules of {driver} are not usable: {error}{hint}") from None
    for number, rule in enumerate(rules, 1):
        if not finds_own_cards and (rule.vendor, rule.product, rule.pci_class, rule.address) == ("*",) * 4:
            raise Invalid(f"rule {number} of {driver} selects every function: state vendor, product, class or address")
        if problem := describe_problem(rule.offer, rule.devices):
            raise Invalid(f"rule {number} of {driver}: {problem}")
    return rules


def find_matching_rule(function: PciFunction, rules: Sequence[MatchT]) -> MatchT | None:
    """Return the first rule whose globs all match the function, or None. A bridge matches no rule."""
    for rule in rules if not function.pci_class.startswith(BRIDGE) else ():
        pairs = (
            (function.vendor, rule.vendor),
            (function.product, rule.product),
            (function.address, rule.address),
        )
        classes = (function.pci_class, function.pci_class[:4])
        if all(fnmatchcase(*pair) for pair in pairs) and any(fnmatchcase(c, rule.pci_class) for c in classes):
            return rule
    return None


def apply_layout(rule: PciRule, layout: dict[str, str]) -> PciRule:
    """Return the rule with the values of a layout in place of its own. Raises Invalid for an unusable layout."""
    try:
        if unknown := set(layout) - {"vfs", "bind"}:
            raise Invalid(f"the layout of a PCI function has no key {min(unknown)!r}: its keys are vfs and bind")
        changed = {**msgspec.to_builtins(rule), **layout}
        return msgspec.convert(changed, PciRule, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"the layout is not usable: {error}") from None
