"""Test the rows, messages and exit codes of `cyborg usage` and `cyborg load-census`."""

from __future__ import annotations

import json
import time
from uuid import uuid4

import pytest

from accelerators import conductor
from accelerators.models import Deployable, Device, DeviceProfile
from agents import telemetry
from agents.telemetry import HostLoad, LoadSnapshot
from tests.cyborgweb.cli.conftest import Cyborg, assert_refused
from tests.support.reports import create_heard_host, get_or_create_host

pytestmark = pytest.mark.django_db(transaction=True)


def test_usage_is_printed_as_table_and_json(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 2)
    create_heard_host("cmp2", 3)
    table = [line.split() for line in cyborg("usage", "--by", "host,type").stdout.splitlines()]
    assert table[0][:5] == ["host", "type", "total", "held", "free"]
    assert [line[:3] for line in table[1:]] == [["cmp1", "FPGA", "4"], ["cmp2", "FPGA", "6"]]
    (whole,) = json.loads(cyborg("usage", "--host", "cmp2", "-f", "json").stdout)
    assert (whole["group"], whole["reserved"]) == ({"resource_class": "FPGA"}, 6)
    assert_refused(cyborg("usage", "--by", "host", role="reader"), 4, "cyborg:usage:elevated")
    assert cyborg("usage", role="member").stderr == "No units.\n"


def test_load_census_lists_fitting_and_silent_hosts_and_exits_with_1_if_none_fits(
    cyborg: Cyborg, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = create_heard_host("cmp1", 2)
    get_or_create_host("cmp2")
    with conductor.writing():
        Device.objects.update(state="ready")
        for part in Deployable.objects.all():
            Deployable.objects.filter(pk=part.pk).update(rp_uuid=uuid4())
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    said = {key: {"utilization_percent": 12.0} for key in host.devices.values_list("key", flat=True)}
    monkeypatch.setattr(
        telemetry,
        "run_load_census",
        lambda hosts, within_s: LoadSnapshot({host.pk: HostLoad(host.pk, time.time(), said)}),
    )
    fits = cyborg("load-census", "--profile", "one", "--before", "4", "--within", "0.5")
    assert fits.exit_code == 0, fits.output
    first, second = (line.split() for line in fits.stdout.splitlines()[1:])
    assert first == ["cmp1", "yes", "4", "4", "12.0", "12.0"]
    assert second[:4] == ["cmp2", "no", "0", "0"]
    why = "no agent has joined for it: let it join with a join token, then try again"
    assert fits.stderr == f"cmp2 did not answer: {why}\n"
    none = cyborg("load-census", "--count", "5", "--hosts", "cmp1", "-f", "json")
    assert (none.exit_code, json.loads(none.stdout)["hosts"][0]["why"]) == (1, "room for 4 of 5")
    del said[min(said)]
    table = cyborg("load-census", "--hosts", "cmp1", "-c", "host,heard,busy").stdout
    assert table.splitlines()[1].split() == ["cmp1", "1", "of", "2", "12.0"]
    assert_refused(cyborg("load-census", "--hosts", "nope"), 3, "There is no host nope.")
    assert_refused(cyborg("load-census", role="member"), 4, "cyborg:census:create")


@pytest.mark.parametrize("hosts", ["", ",", ",,"])
def test_load_census_with_an_empty_list_of_hosts_is_refused(cyborg: Cyborg, hosts: str) -> None:
    assert_refused(cyborg("load-census", "--hosts", hosts), 2, "Name at least one host, or leave the option out.")
