"""Test the names of hardware: from the PCI ID database and overrides, in lists, pages and `/api`, and by search."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from msgspec.structs import replace as replace_device

from accelerators import conductor
from accelerators.domain import pci_names
from accelerators.domain.states import EventSource
from accelerators.models import Device
from accelerators.runtime import hardware_names
from cyborgweb.models.event_types import describe_event
from cyborgweb.models.notify import Delivery, add_hardware_name
from cyborgweb.settings.keys import get_keys
from drivers.configuration import ConfigurationError
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

DATABASE = """
# Vendors, devices and subsystems.
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t740f  Aldebaran/MI200 [Instinct MI210]
10de  NVIDIA Corporation
\t20b5  GA100 [A100 PCIe 80GB]
\t\t10de 1533  A100 80GB PCIe
\tthis line is broken
15b3  Mellanox Technologies
\t1017  MT27800 Family [ConnectX-5]
\t\t15b3 0006  ConnectX-5 EN network interface card, 100GbE single-port QSFP28; MCX515A-CCAT
\t\t193d 1051  NIC-IB1040i-Mb-2P
\t\tffff 0001  Board of nobody
193d  New H3C Technologies Co., Ltd. [H3C]
8086  Intel Corporation
\t4940  4xxx Series QAT
C 03  Display controller
\t00  VGA compatible controller
"""


@pytest.fixture
def names_file(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let names come from a file with DATABASE, which is looked at again at every use."""
    path = tmp_path / "pci.ids"
    path.write_text(DATABASE)
    monkeypatch.setattr(hardware_names, "CHECK_INTERVAL_S", 0.0)
    settings.KEYS = replace(settings.KEYS, pci_ids=str(path))
    yield path
    hardware_names._name_hardware.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "model", "name"),
    [
        ("10de", "20b5", "NVIDIA A100 PCIe 80GB"),
        ("0x10DE", "0x20B5", "NVIDIA A100 PCIe 80GB"),
        ("1002", "740f", "AMD/ATI Instinct MI210"),
        ("15b3", "1017", "Mellanox ConnectX-5"),
        ("8086", "4940", "Intel 4xxx Series QAT"),
        ("10de", "ffff", "NVIDIA ffff"),
        ("ffff", "20b5", "20b5"),
        ("0xABCD", "miss model info", "miss model info"),
        ("Habana", "Gaudi2", "Habana Gaudi2"),
        ("Intel", "Intel Arc", "Intel Arc"),
        ("8086", "00", "Intel 00"),
    ],
)
def test_hardware_is_named_as_people_call_it(vendor: str, model: str, name: str) -> None:
    vendors = pci_names.parse_pci_ids(DATABASE.splitlines())
    assert pci_names.name_hardware(vendor, model, "", vendors, {}).full == name


@pytest.mark.parametrize(
    ("ids", "name", "subsystem"),
    [
        ("10de 20b5 10de:1533", "NVIDIA A100 80GB PCIe", "NVIDIA Corporation A100 80GB PCIe"),
        ("0x10DE 0x20B5 10de:1533", "NVIDIA A100 80GB PCIe", "NVIDIA Corporation A100 80GB PCIe"),
        ("10de 20b5 10de:ffff", "NVIDIA A100 PCIe 80GB", "NVIDIA Corporation"),
        ("10de ffff 10de:1533", "NVIDIA ffff", "NVIDIA Corporation"),
        (
            "15b3 1017 15b3:0006",
            "Mellanox ConnectX-5 EN network interface card",
            "Mellanox Technologies ConnectX-5 EN network interface card, 100GbE single-port QSFP28; MCX515A-CCAT",
        ),
        (
            "15b3 1017 193d:1051",
            "H3C NIC-IB1040i-Mb-2P (Mellanox ConnectX-5)",
            "New H3C Technologies Co., Ltd. [H3C] NIC-IB1040i-Mb-2P",
        ),
        ("15b3 1017 ffff:0001", "Board of nobody (Mellanox ConnectX-5)", "Board of nobody"),
        ("ffff 20b5 10de:1533", "20b5", "NVIDIA Corporation"),
    ],
)
def test_a_board_that_the_database_knows_gives_the_hardware_its_name(ids: str, name: str, subsystem: str) -> None:
    vendors = pci_names.parse_pci_ids(DATABASE.splitlines())
    found = pci_names.name_hardware(*ids.split(), vendors, {})
    assert (found.full, found.subsystem) == (name, subsystem)


def test_parsing_is_bounded_in_lines_and_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    long_line = f"10df  {'x' * pci_names.MAX_LINE}"
    assert "10df" not in pci_names.parse_pci_ids([long_line, "10de  NVIDIA"])
    monkeypatch.setattr(pci_names, "MAX_ENTRIES", 2)
    assert list(pci_names.parse_pci_ids(f"{n:04x}  Vendor {n}" for n in range(100))) == ["0000", "0001"]


def test_a_missing_broken_or_huge_file_is_no_failure(
    names_file: Path, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert hardware_names.get_hardware_name("10de", "20b5", "").full == "NVIDIA A100 PCIe 80GB"
    names_file.unlink()
    assert hardware_names.get_hardware_name("10de", "20b5", "").full == "20b5"
    names_file.write_bytes(os.urandom(5000))
    assert hardware_names.get_hardware_name("10de", "20b5", "").full == "20b5"
    names_file.unlink()
    names_file.mkdir()
    assert hardware_names.get_hardware_name("10de", "20b5", "").full == "20b5"
    assert "Is a directory" in caplog.text
    names_file.rmdir()
    names_file.write_text(DATABASE)
    monkeypatch.setattr(hardware_names, "MAX_BYTES", 10)
    assert hardware_names.get_hardware_name("10de", "20b5", "").full == "20b5"
    assert "more than 10 bytes" in caplog.text


def test_the_file_is_read_once_until_it_changes(names_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read_names = hardware_names._read_names
    monkeypatch.setattr(hardware_names, "_read_names", lambda *one: reads.append(one[0]) or read_names(*one))
    for _ in range(100):
        hardware_names.get_hardware_name("10de", "20b5", "")
    assert len(reads) == 1
    names_file.write_text(DATABASE.replace("A100 PCIe 80GB]", "A100 of another text]"))
    assert hardware_names.get_hardware_name("10de", "20b5", "").full == "NVIDIA A100 of another text"
    assert len(reads) == 2


def test_single_names_are_overridden_by_the_configuration(
    names_file: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.KEYS = replace(settings.KEYS, hardware_names=("10DE:20b5=Big card", "ffff:0001=House card"))
    assert hardware_names.get_hardware_name("10de", "20b5", "").full == "Big card"
    assert hardware_names.get_hardware_name("0xffff", "0x0001", "").full == "House card"
    settings.KEYS = replace(settings.KEYS, hardware_names=("10de:20b5=Big card", "10DE:20B5:10DE:1533=Bigger card"))
    assert hardware_names.get_hardware_name("0x10de", "0x20b5", "10de:1533").full == "Bigger card"
    assert hardware_names.get_hardware_name("10de", "20b5", "10de:ffff").full == "Big card"
    monkeypatch.setenv("CYBORG_HARDWARE_NAMES", "10de=NVIDIA")
    get_keys.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="VENDOR:MODEL=NAME"):
            get_keys()
    finally:
        monkeypatch.undo()
        get_keys.cache_clear()


@pytest.fixture
def cards(db: None, names_file: Path) -> Client:
    """Report three cards, and return a client of an administrator."""
    kinds = (("10de", "20b5", "GPU"), ("15b3", "1017", "NIC"), ("Habana", "Gaudi2", "AICHIP"))
    found = [make_card(n, vendor=v, model=m, type=t) for n, (v, m, t) in enumerate(kinds, 1)]
    apply_report(get_or_create_host(), make_driver_report(*found))
    client = Client()
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    return client


def test_lists_and_pages_show_the_name_with_an_icon_and_the_ids(cards: Client) -> None:
    page = cards.get("/admin/accelerators/device/").content.decode()
    assert "NVIDIA A100 PCIe 80GB" in page and "Mellanox ConnectX-5" in page and "10de:20b5" in page
    assert '<svg class="kind" role="img" aria-label="GPU"' in page and 'aria-label="AICHIP"' in page
    device = Device.objects.get(vendor="10de")
    page = cards.get(f"/admin/accelerators/device/{device.pk}/change/").content.decode()
    assert "NVIDIA A100 PCIe 80GB" in page and "GA100 [A100 PCIe 80GB]" in page and "NVIDIA Corporation" in page
    page = cards.get(f"/admin/accelerators/host/{device.host_id}/change/").content.decode()
    assert "NVIDIA A100 PCIe 80GB" in page


@pytest.mark.slow
def test_devices_are_found_by_their_names(cards: Client) -> None:
    for term, vendors in (
        *(("a100", {"10de"}), ("mellanox connectx", {"15b3"}), ("gaudi", {"Habana"}), ("4xxx", set())),
        *(('"a100 pcie"', {"10de"}), ("'A100 PCIe' nvidia", {"10de"}), ('"pcie a100"', set())),
    ):
        page = cards.get("/admin/accelerators/device/", {"q": term})
        assert {one.vendor for one in page.context["cl"].result_list} == vendors, term
        found = cards.get("/api/devices/", {"name": term}).json()["results"]
        assert {one["vendor"] for one in found} == vendors, term


def list_devices(client: Client, term: str) -> tuple[set[str], str]:
    """Search the console's list of devices; return the vendors of those found, and the SQL that reads vendors."""
    with CaptureQueriesContext(connection) as captured:
        page = client.get("/admin/accelerators/device/", {"q": term})
    return {device.vendor for device in page.context["cl"].result_list}, "\n".join(
        one["sql"] for one in captured if '"accelerators_device"."vendor"' in one["sql"]
    )


def test_a_search_for_a_host_with_the_name_of_hardware_reads_only_that_host(cards: Client) -> None:
    apply_report(get_or_create_host("mellanox"), make_driver_report(make_card(9, vendor="8086", model="4940")))
    vendors, statements = list_devices(cards, "mellanox")
    assert vendors == {"8086"}
    assert "DISTINCT" not in statements and "UPPER(" not in statements
    assert list_devices(cards, "mellanox 4xxx")[0] == {"8086"}


def test_a_search_for_hardware_compares_columns_with_stored_values(cards: Client) -> None:
    vendors, statements = list_devices(cards, "connectx mellanox")
    assert vendors == {"15b3"}
    assert "LOWER(" not in statements and "0x15b3" not in statements and statements.count("DISTINCT") == 1


def test_a_few_hexadecimal_digits_are_hardware_also_if_a_uuid_begins_with_them(cards: Client) -> None:
    with conductor.writing():
        Device.objects.filter(vendor="Habana").update(uuid=(uuid := "a1001111-2222-4333-8444-555555555555"))
        conductor.record_event("device.changed", EventSource.PERSON, "olga", subject=(uuid, ""))
    assert list_devices(cards, "a100")[0] == {"10de", "Habana"}
    assert list_devices(cards, "a1001111")[0] == {"Habana"}


def test_the_api_has_names_and_v2_keeps_what_drivers_report(cards: Client) -> None:
    (shown,) = cards.get("/api/devices/", {"vendor": "10de"}).json()["results"]
    assert (shown["vendor"], shown["model"], shown["name"]) == ("10de", "20b5", "NVIDIA A100 PCIe 80GB")
    assert (shown["vendor_name"], shown["model_name"]) == ("NVIDIA Corporation", "GA100 [A100 PCIe 80GB]")
    body = cards.get("/v2/devices").content.decode()
    assert "NVIDIA" not in body


def test_the_board_is_reported_stored_shown_and_found(cards: Client) -> None:
    board = replace_device(make_card(1, vendor="10de", model="20b5", type="GPU"), subsystem="10de:1533")
    apply_report(get_or_create_host(), make_driver_report(board), seq=2)
    (shown,) = cards.get("/api/devices/", {"name": "a100 80gb"}).json()["results"]
    assert (shown["name"], shown["model_name"]) == ("NVIDIA A100 80GB PCIe", "GA100 [A100 PCIe 80GB]")
    assert (shown["subsystem"], shown["subsystem_name"]) == ("10de:1533", "NVIDIA Corporation A100 80GB PCIe")
    device = Device.objects.get(vendor="10de")
    page = cards.get(f"/admin/accelerators/device/{device.pk}/change/").content.decode()
    assert "<dt>Board</dt><dd>NVIDIA Corporation A100 80GB PCIe" in page and "10de:1533" in page
    assert "10de:1533" not in cards.get("/v2/devices").content.decode()
    older_agent = replace_device(board, subsystem="")
    apply_report(get_or_create_host(), make_driver_report(older_agent), seq=3)
    assert Device.objects.get(vendor="10de").hardware_name.full == "NVIDIA A100 PCIe 80GB"


@pytest.mark.parametrize(
    ("listed", "column"),
    [("device", "name"), ("deployable", "device_name"), ("attachhandle", "deployable_device_name")],
)
def test_exports_have_the_names_beside_the_ids(cards: Client, listed: str, column: str) -> None:
    def download(file_format: str) -> str:
        answer: Any = cards.get(reverse(f"admin:accelerators_{listed}_export", args=[file_format]))
        return b"".join(answer.streaming_content).decode()

    names = {row[column] for row in json.loads(download("json"))}
    assert names == {"NVIDIA A100 PCIe 80GB", "Mellanox ConnectX-5", "Habana Gaudi2"}
    table = download("csv")
    assert f'"{column}"' in table and '"NVIDIA A100 PCIe 80GB","20b5"' in table
    assert f"{column}: NVIDIA A100 PCIe 80GB" in download("yaml")


def test_the_search_page_finds_and_names_hardware(cards: Client) -> None:
    apply_report(get_or_create_host("cmp2"), make_driver_report(make_card(7, vendor="10de", model="20b5", type="GPU")))
    for term, host in (("a100", ""), ("nvidia a100", ""), ("mellanox", "Mellanox ConnectX-5")):
        found = cards.get("/admin/find/", {"q": term}, follow=True)
        page = found.content.decode()
        assert host in page if host else page.count("NVIDIA A100 PCIe 80GB pci:0000:0") == 2, term
    assert "Nothing is called" in cards.get("/admin/find/", {"q": "aldebaran"}).content.decode()


def test_references_to_devices_name_their_hardware_in_the_api(cards: Client) -> None:
    rows = cards.get("/api/deployables/").json()["results"]
    names = {row["device"]["name"] for row in rows}
    assert names == {"NVIDIA A100 PCIe 80GB", "Mellanox ConnectX-5", "Habana Gaudi2"}


def test_messages_name_their_hardware(names_file: Path) -> None:
    data = {"device": "d", "type": "GPU", "vendor": "10de", "model": "20b5", "subsystem": "10de:1533", "host": "cmp1"}
    named = Delivery(kind="device.failed", data=data).named_data
    assert named == data | {"hardware": "NVIDIA A100 80GB PCIe"}
    assert describe_event("device.failed", named) == "Device failed: d, NVIDIA A100 80GB PCIe, on cmp1."
    assert add_hardware_name({"device": "d", "model": "20b5"})["hardware"] == "20b5"
    assert add_hardware_name({"request": "r"}) == {"request": "r"}


def test_names_cost_no_statement(cards: Client, settings: Any) -> None:
    def count_statements() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert cards.get("/admin/accelerators/device/").status_code == 200
        return len(captured)

    count_statements()
    with_names = count_statements()
    settings.KEYS = replace(settings.KEYS, pci_ids="off")
    assert count_statements() == with_names
