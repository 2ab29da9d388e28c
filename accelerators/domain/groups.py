"""The groups of a device profile: check what they contain, and compute which requests they ask for (contract sections
2.2 and 2.3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from accelerators.domain.errors import AcceleratorsError

ProfileGroup = dict[str, str]

KEY_PREFIXES = ("resources:", "trait:", "accel:")
RESOURCE_CLASSES = ("FPGA", "GPU", "VGPU", "PGPU", "CUSTOM_QAT", "CUSTOM_NIC", "CUSTOM_SSD")
TRAIT_VALUES = ("required", "forbidden")
BITSTREAM_KEY, FUNCTION_KEY = "accel:bitstream_id", "accel:function_id"
XILINX_TRAIT_KEY = "trait:CUSTOM_FPGA_XILINX"

MAX_GROUPS, MAX_KEYS, MAX_TEXT_LENGTH = 64, 256, 255
MAX_REQUESTS = 256
"""Maximum number of requests per profile; upstream has no limit."""

_PROFILE_NAME = re.compile(r"[a-zA-Z0-9-_]+")
_AMOUNT = re.compile(r"\s*[+-]?[0-9]{1,9}\s*")


class GroupError(AcceleratorsError):
    """The name or the groups of a profile are invalid. The text is one sentence; upstream's where upstream has one."""


def check_profile_name(name: str) -> str:
    """Return the name of a profile unchanged; raise GroupError unless it consists of ASCII letters, digits, - and _."""
    if not _PROFILE_NAME.fullmatch(name):
        raise GroupError("Device profile name must be of the form ^[a-zA-Z0-9-_]+$")
    return name


def check_groups(groups: object) -> list[ProfileGroup]:
    """Check the groups of a profile; return them as they are stored, or raise GroupError.

    Values become strings; blanks around the names of resources and traits are removed. At most MAX_GROUPS groups of
    MAX_KEYS keys each are allowed, and MAX_REQUESTS requests in all.
    """
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise GroupError("The groups of a device profile are a list of objects.")
    if len(groups) > MAX_GROUPS or any(len(group) > MAX_KEYS for group in groups):
        raise GroupError(f"A device profile has at most {MAX_GROUPS} groups of at most {MAX_KEYS} keys each.")
    checked = [_check_group(group) for group in groups]
    if len(list_requested_groups(checked)) > MAX_REQUESTS:
        raise GroupError(f"A device profile may ask for at most {MAX_REQUESTS} accelerators.")
    return checked


def list_requested_groups(groups: Iterable[Mapping[str, str]]) -> list[int]:
    """Return one entry per request that the groups ask for: the index of its group, in the order of the groups.

    A Xilinx FPGA has two functions, so a group that requires such an FPGA makes two requests for each FPGA and none for
    its other resources, as upstream does (contract section 2.3). A group gets at most MAX_REQUESTS + 1 entries, none if
    its amount is negative. Raises ValueError if an amount is no number; `check_groups` excludes that.
    """
    group_indexes: list[int] = []
    for index, group in enumerate(groups):
        amount = sum(int(value) for key, value in group.items() if key.startswith("resources:"))
        if group.get(XILINX_TRAIT_KEY) == "required" and "resources:FPGA" in group:
            amount = 2 * int(group["resources:FPGA"])
        # An unchecked profile may ask for billions. The limit keeps the list small until `check_groups` rejects it.
        group_indexes += [index] * min(amount, MAX_REQUESTS + 1)
    return group_indexes


def first_resource_class(group: Mapping[str, str]) -> str:
    """Return the group's first resource class without the prefix `resources:`, '' if it has none."""
    return next((key.removeprefix("resources:") for key in group if key.startswith("resources:")), "")


def needs_programming(group: Mapping[str, str], loaded_bitstream: str | None) -> bool:
    """Return True if the device must be programmed before a request of this group can be bound.

    That is so for an FPGA group that names a bitstream other than the `loaded_bitstream`, and for every FPGA group that
    names a function: which bitstream has the function is only known when its image is looked up, after the bind was
    answered (contract section 4.1, step 3).
    """
    if "resources:FPGA" not in group:
        return False
    return FUNCTION_KEY in group or (BITSTREAM_KEY in group and group[BITSTREAM_KEY] != loaded_bitstream)


def _check_group(group: Mapping[str, object]) -> ProfileGroup:
    """Check one group; return it as it is stored, with values as strings, or raise GroupError."""
    checked: ProfileGroup = {}
    trimmed: ProfileGroup = {}
    for key, value in group.items():
        prefix = next((p for p in KEY_PREFIXES if key.startswith(p)), None)
        if prefix is None:
            raise GroupError("Device profile group keys must be of the form ^(resources:|trait:|accel:)")
        if not isinstance(value, str | int | float):
            raise GroupError(f"The value of {_shorten_key(key)} must be a string.")
        text, name = str(value), key.removeprefix(prefix)
        if len(key) > MAX_TEXT_LENGTH or len(text) > MAX_TEXT_LENGTH or "\0" in key + text:
            raise GroupError(
                f"{_shorten_key(key)} or its value is longer than {MAX_TEXT_LENGTH} characters or contains NUL."
            )
        trimmed_name = name if prefix == "accel:" else name.strip()
        _check_name_and_value(prefix, trimmed_name, text)
        # A key whose blanks were removed moves to the end of its group, as in upstream.
        (checked if trimmed_name == name else trimmed)[prefix + trimmed_name] = text
    return checked | trimmed


def _check_name_and_value(prefix: str, name: str, value: str) -> None:
    """Raise GroupError unless this trait or resource and its value are allowed; `accel:` keys are all allowed."""
    if prefix == "trait:":
        if not name.startswith("CUSTOM_"):
            raise GroupError(f"Unsupported trait name format {name}, should start with CUSTOM_")
        if value not in TRAIT_VALUES:
            raise GroupError(f"Unsupported trait value {value}, the value must be one among {list(TRAIT_VALUES)}")
    elif prefix == "resources:":
        if name not in RESOURCE_CLASSES and not name.startswith("CUSTOM_"):
            raise GroupError(f"Unsupported resource class {name}")
        if not _AMOUNT.fullmatch(value):
            raise GroupError(f"Resources number {value} is invalid")


def _shorten_key(key: str) -> str:
    """Return the key as error messages show it: at most 64 characters, without NUL."""
    return key[:64].replace("\0", "\\0")
