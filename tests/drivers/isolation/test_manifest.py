"""Tests of what a driver declares about itself: its manifest is checked, and its devices are compared with it."""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar

import pytest

from drivers.base import Driver
from drivers.errors import Failed
from drivers.inventory import AttachHandle, Attribute, Deployable, Device
from drivers.isolation import driver_main
from drivers.isolation.driver_main import Manifest
from drivers.isolation.runner import DriverProcess

HANDLE = AttachHandle("PCI", '{"bus": "01"}')


class PlainDriver(Driver):
    """Declares nothing but its name."""

    name: ClassVar[str] = "plain"


def build_manifest(**declared: object) -> Manifest:
    """Return the manifest of a driver that has these class attributes."""
    return driver_main._build_manifest("plain", type("Declared", (PlainDriver,), declared)(), ())


def make_device(resource_class: str = "CUSTOM_PCI") -> Device:
    deployable = Deployable("d", 1, (Attribute("rc", resource_class), Attribute("trait0", "T")), (HANDLE,))
    return Device("k", "GPU", "10de", "1eb8", deployables=(deployable,))


def test_a_driver_that_declares_nothing_has_an_empty_declaration() -> None:
    manifest = build_manifest()
    assert manifest.declares == driver_main.DriverDeclaration() and manifest.settings_schema == {}


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"affects": {"program": "card"}}, "`affects` cannot have 'program'"),
        ({"affects": {"install": "host"}}, "`affects` cannot have 'install'"),
        ({"affects": {"reset": "rack"}}, "`affects` cannot have 'rack'"),
        ({"min_kernel": "new"}, "`min_kernel` is 'new', not like 6.2"),
        ({"resource_classes": ("",)}, "describes itself wrongly"),
    ],
)
def test_an_impossible_declaration_is_refused_when_the_driver_is_loaded(declared: dict[str, object], says: str) -> None:
    with pytest.raises(Failed, match=says):
        build_manifest(**declared)


@pytest.mark.parametrize(
    ("classes", "types", "undeclared"),
    [
        ((), (), ""),
        (("CUSTOM_PCI",), ("PCI", "MDEV"), ""),
        (("VGPU",), ("PCI",), "the resource class CUSTOM_PCI"),
        (("CUSTOM_PCI",), ("MDEV",), "the handle type PCI"),
    ],
)
def test_a_device_is_compared_with_what_its_driver_declares(
    classes: tuple[str, ...], types: tuple[str, ...], undeclared: str
) -> None:
    assert driver_main.find_undeclared(make_device(), classes, types) == undeclared


def test_a_device_with_an_undeclared_resource_class_is_a_fault_and_others_stay() -> None:
    driver = type("Declared", (PlainDriver,), {"resource_classes": ("CUSTOM_PCI",)})()
    findings = driver_main.Findings((make_device("VGPU"), make_device()))
    report = driver_main._build_report("plain", driver, findings)
    assert len(report.devices) == 1
    assert [fault.reason for fault in report.faults] == ["the driver does not declare the resource class VGPU"]


@pytest.mark.parametrize(
    ("needed", "present", "says"),
    [
        ("", "3.2.0", ""),
        ("6.2", "6.2.0-1-amd64", ""),
        (
            "5.19",
            "5.4.0-150-generic",
            "it needs Linux 5.19 or later, and this is 5.4.0-150-generic: upgrade the kernel",
        ),
        ("6.2", "unknown", ""),
    ],
)
def test_an_old_kernel_is_reported_as_a_lack(needed: str, present: str, says: str) -> None:
    assert driver_main.explain_old_kernel(needed, present) == says


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "handle_types", "setting"),
    [
        ("fake_driver", ("TEST_PCI", "MDEV"), "control_file"),
        ("generic_driver", ("PCI", "MDEV", "DEV"), "backends"),
        ("pci_driver", ("PCI",), "rules"),
    ],
)
def test_each_driver_declares_its_handle_types_and_settings(
    name: str, handle_types: tuple[str, ...], setting: str
) -> None:
    async def story() -> None:
        driver = DriverProcess(name, "node-1", {})
        try:
            await driver.discover()
        finally:
            await driver.close()
        assert driver.manifest.declares.handle_types == handle_types
        assert driver.manifest.declares.affects == {}
        schema = driver.manifest.settings_schema
        assert f'"{setting}"' in json.dumps(schema) and "$defs" in schema

    asyncio.run(story())
