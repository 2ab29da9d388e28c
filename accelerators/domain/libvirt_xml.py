"""Tell a person how to plug an attached accelerator into a running guest: a sentence, and the XML for libvirt.

Unmodified Nova plugs no accelerator into a running guest. It reads an instance's requests only when it builds the guest
again, and uses them only if all of them are PCI (contract sections 5.1 and 7.1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from accelerators.domain.states import HandleType

PLUG_TEXT = (
    "The accelerator is claimed and bound, but it is not in the guest yet: stock Nova plugs no accelerator into a"
    " running guest. Attach each of the libvirt elements to the guest on {host} (virsh attach-device DOMAIN FILE"
    " --live), and remove it there (virsh detach-device) before you detach it here."
)
REBOOT_TEXT = (
    " If the flavor names a device profile and all accelerators of the instance are of type PCI, a hard reboot by Nova"
    " plugs it as well."
)
TEST_HANDLE_TEXT = "It is claimed and bound. It is a handle for tests without a device, so there is nothing to plug in."
_HEX = re.compile(r"[0-9a-f]{1,4}")


@dataclass(frozen=True)
class HeldHandle:
    """An attach handle that a request holds. `info` is JSON text; for a PCI handle it contains the address."""

    uuid: str
    attach_type: str
    info: str
    hardware: str = ""
    """The name of its device's hardware, for people."""


def describe_plugging(handles: Sequence[HeldHandle], host: str) -> str:
    """Return sentences that tell a person how to plug these handles into their running guest on `host`.

    For handles of type TEST_PCI they say that there is nothing to plug. Returns '' if there are no handles, or only
    handles of type DEV.
    """
    types = {handle.attach_type for handle in handles}
    texts = {
        HandleType.PCI: PLUG_TEXT + REBOOT_TEXT,
        HandleType.MDEV: PLUG_TEXT,
        HandleType.TEST_PCI: TEST_HANDLE_TEXT,
    }
    return " ".join(text.format(host=host) for kind, text in texts.items() if kind in types)


def render_hostdev_elements(handles: Sequence[HeldHandle]) -> list[str]:
    """Return the libvirt `hostdev` element of each handle of type PCI or MDEV.

    Handles of other types are left out, and so are PCI handles whose `info` has no valid address.
    """
    return [text for handle in handles if (text := _render_element(handle))]


def _render_element(handle: HeldHandle) -> str:
    """Return the `hostdev` element of one handle, '' if it is not of type PCI or MDEV or has no valid PCI address.

    A mediated device has the uuid of its handle.
    """
    if handle.attach_type == HandleType.MDEV:
        return _build_hostdev({"type": "mdev", "model": "vfio-pci"}, {"uuid": handle.uuid})
    if handle.attach_type != HandleType.PCI:
        return ""
    try:
        info = json.loads(handle.info)
    except ValueError:
        info = None
    if not isinstance(info, dict):
        return ""
    parts = {"domain": "domain", "bus": "bus", "slot": "device", "function": "function"}
    address = {name: str(info.get(key, "")).removeprefix("0x") for name, key in parts.items()}
    if not all(_HEX.fullmatch(value) for value in address.values()):
        return ""
    managed = "no" if info.get("managed") == "false" else "yes"
    return _build_hostdev({"type": "pci", "managed": managed}, {name: f"0x{value}" for name, value in address.items()})


def _build_hostdev(attributes: dict[str, str], address: dict[str, str]) -> str:
    """Return a `hostdev` element as XML text, with these attributes, and `address` as the address of its source."""
    element = ElementTree.Element("hostdev", {"mode": "subsystem"} | attributes)
    ElementTree.SubElement(ElementTree.SubElement(element, "source"), "address", address)
    return ElementTree.tostring(element, encoding="unicode")
