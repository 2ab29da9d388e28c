"""Test usage over /api/ (units and load by groups) and the load census: numbers, permissions, statements."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.domain.errors import RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile, Host
from accelerators.requests import candidates, profiles
from agents import telemetry
from agents.gateway.asgi_app import AgentGateway
from agents.key_revocation import explain_bar
from agents.models import Agent, Lease
from agents.telemetry import HostLoad, LoadSnapshot
from cyborgweb.asgi import HttpApplication
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.settings.keys import Keys
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.support.reports import create_heard_host, get_or_create_host

pytestmark = pytest.mark.django_db

SetLoad = Callable[..., None]
CENSUS = "/api/census/"
GIB = 2.0**30


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> SetLoad:
    """Return `heard(host, *percents, ago=0, quiet=False, silent="", devices=None)`, which sets the load of a host.

    `percents` are the utilizations of its devices in order; `devices` gives all values by device key instead. `ago` is
    the age in seconds. A `quiet` host does not answer a census. `silent` names a gateway that does not answer.
    """
    known: dict[int, HostLoad] = {}
    mute: set[int] = set()
    away: list[str] = []

    def say(
        host: Host,
        *percents: float,
        ago: float = 0,
        quiet: bool = False,
        silent: str = "",
        devices: dict[str, dict[str, float]] | None = None,
    ) -> None:
        keys = host.devices.order_by("id").values_list("key", flat=True) if percents else ()
        more = {"memory_used_bytes": GIB, "memory_total_bytes": 4 * GIB, "power_watts": 50.0}
        said = {key: {"utilization_percent": n, **more} for key, n in zip(keys, percents, strict=False)}
        known[host.pk] = HostLoad(host.pk, time.time() - ago, said if devices is None else devices)
        mute.update({host.pk} if quiet else ())
        away.extend([silent] if silent else ())

    def last(hosts: Collection[int] | None = None) -> LoadSnapshot:
        return LoadSnapshot({pk: one for pk, one in known.items() if hosts is None or pk in hosts}, tuple(away))

    def census(hosts: Collection[int], within_s: float) -> LoadSnapshot:
        return LoadSnapshot({pk: known[pk] for pk in hosts if pk in known and pk not in mute}, tuple(away))

    monkeypatch.setattr(telemetry, "get_last_loads", last)
    monkeypatch.setattr(telemetry, "run_load_census", census)
    return say


def make_ready(*hosts: Host) -> None:
    """Offer all devices of these hosts, as enabling them would."""
    with conductor.writing():
        Device.objects.filter(host__in=hosts).update(state="ready")
        for part in Deployable.objects.filter(device__host__in=hosts):
            Deployable.objects.filter(pk=part.pk).update(rp_uuid=uuid4())


def group_by(groups: list[dict], name: str) -> dict[str, dict]:
    return {one["group"][name]: one for one in groups}


def test_usage_shows_units_and_load_by_host_and_by_resource_class(ask: Ask, fill: Fill, heard: SetLoad) -> None:
    first, second = fill(14)
    heard(first, 10.0, 30.0)
    heard(second, 90.0, ago=1000)
    hosts = group_by(get_results(ask("/api/usage/?by=host")), "host")
    assert list(hosts) == ["cmp0", "cmp1"]
    one, two = hosts["cmp0"], hosts["cmp1"]
    held = AcceleratorRequest.objects.filter(deployable__device__host=first).count()
    in_offer = AcceleratorRequest.objects.filter(deployable__device__host=first, deployable__device__state="ready")
    assert (one["total"], one["held"], one["free"]) == (20, held, 2 - in_offer.count())
    assert one["total"] == one["held"] + one["free"] + one["reserved"]
    assert one["load"] == {
        "devices": 10,
        "sampled": 2,
        "utilization_percent_mean": 20.0,
        "utilization_percent_max": 30.0,
        "memory_used_bytes": 2 * GIB,
        "memory_total_bytes": 8 * GIB,
        "power_watts": 100.0,
    }
    assert (two["load"]["devices"], two["load"]["sampled"], two["load"]["utilization_percent_mean"]) == (4, 0, None)
    (whole,) = get_results(ask("/api/usage/"))
    assert (whole["group"], whole["total"]) == ({"resource_class": "FPGA"}, 28)
    (both,) = get_results(ask("/api/usage/?by=type,host&host=cmp1"))
    assert (both["group"], both["total"]) == ({"type": "FPGA", "host": "cmp1"}, 8)
    assert get_results(ask("/api/usage/?by=host&resource_class=VGPU")) == []


def test_free_counts_exactly_the_units_that_a_bind_would_get(ask: Ask, heard: SetLoad) -> None:
    host = create_heard_host("cmp0", 5)
    make_ready(host)
    busy, device_nodes, gone, crowded, plain = host.devices.order_by("id")
    handles = AttachHandle.objects
    with conductor.writing():
        Device.objects.filter(pk=busy.pk).update(busy_with=uuid4())
        handles.filter(deployable__device=device_nodes).update(attach_type="DEV")
        handles.filter(pk=handles.filter(deployable__device=gone).first().pk).update(missing_since=datetime.now(UTC))
        profile = DeviceProfile.objects.create(name="one", groups=[])
        for handle in handles.filter(deployable__device=crowded):
            AcceleratorRequest.objects.create(
                project_id="p1",
                state="Bound",
                profile=profile,
                group={},
                deployable=handle.deployable,
                attach_handle=handle,
            )
        Deployable.objects.filter(device=crowded).update(num_accelerators=0)
    (all_,) = get_results(ask("/api/usage/"))
    assert [all_[name] for name in ("total", "held", "free", "reserved")] == [8, 2, 3, 5]
    assert all_["free"] == sum(one.free for one in candidates.find_candidates(host))
    with conductor.writing():
        Deployable.objects.filter(device=plain).update(num_accelerators=1)
    assert [one["free"] for one in get_results(ask("/api/usage/?by=host,type"))] == [2], "Placement gives no more"
    host_candidates = candidates.find_candidates(host)
    assert [one.free for one in host_candidates] == [1, 1], "nor does an attachment, or a census"
    assert candidates.find_candidates(host, crowded.uuid) == []
    wanted = [{"resources:FPGA": "1"}]
    assert candidates.count_possible_choices(wanted, host_candidates, 5) == 2
    assert set(candidates.choose_providers(wanted * 2, host_candidates, "there").providers) == {
        one.provider for one in host_candidates
    }
    with pytest.raises(RefusedError, match="no free unit"):
        candidates.choose_providers([{"resources:FPGA": "2"}], host_candidates, "there")


def hold_all_handles(device: Device) -> None:
    """Bind all handles of a device although its total would allow more requests."""
    Deployable.objects.filter(device=device).update(num_accelerators=9)
    values = {"project_id": "p1", "state": "Bound", "profile": DeviceProfile.objects.create(name="one", groups=[])}
    for handle in AttachHandle.objects.filter(deployable__device=device):
        AcceleratorRequest.objects.create(group={}, deployable=handle.deployable, attach_handle=handle, **values)


@pytest.mark.parametrize(
    "change",
    [
        hold_all_handles,
        lambda device: Device.objects.filter(pk=device.pk).update(state="maintenance"),
        lambda device: Device.objects.filter(pk=device.pk).update(busy_with=uuid4()),
        lambda device: Deployable.objects.filter(device=device).update(missing_since=datetime.now(UTC)),
        lambda device: Deployable.objects.filter(device=device).update(rp_uuid=None),
        lambda device: AttachHandle.objects.filter(deployable__device=device).update(missing_since=datetime.now(UTC)),
        lambda device: AttachHandle.objects.filter(deployable__device=device).update(attach_type="DEV"),
    ],
)
def test_a_device_of_which_a_bind_would_reserve_nothing_has_no_candidates(change: Callable[[Device], object]) -> None:
    host = create_heard_host("cmp0", 1)
    make_ready(host)
    device = host.devices.get()
    (candidate,) = candidates.find_candidates(host)
    assert (candidate.resource_class, candidate.traits, candidate.free) == ("FPGA", {"CUSTOM_TEST"}, 2)
    with conductor.writing():
        change(device)
    assert candidates.find_candidates(host) == []


def test_impossible_sample_values_are_left_out_of_the_load(ask: Ask, fill: Fill, heard: SetLoad) -> None:
    (host,) = fill(3)
    heard(host, 1e308, -5.0, 40.0)
    (one,) = get_results(ask("/api/usage/"))
    assert (one["load"]["utilization_percent_mean"], one["load"]["sampled"]) == (40.0, 3)


def test_memory_counts_only_devices_that_report_both_used_and_total(ask: Ask, heard: SetLoad) -> None:
    host, mute = create_heard_host("cmp0", 3), create_heard_host("cmp1", 1)
    whole, used_alone, size_alone = host.devices.order_by("id").values_list("key", flat=True)
    used, size = {"memory_used_bytes": 9 * GIB}, {"memory_total_bytes": 16 * GIB}
    heard(host, devices={whole: used | size, used_alone: used, size_alone: size})
    heard(mute, devices={mute.devices.get().key: used})
    names = ("sampled", "memory_used_bytes", "memory_total_bytes")
    taken = json.loads(ask(CENSUS, method="POST", data={}).content)["hosts"]
    loads = [one["load"] for one in get_results(ask("/api/usage/?by=host"))]
    for one, other in (loads, [row["load"] for row in sorted(taken, key=lambda row: row["host"]["name"])]):
        assert [one[name] for name in names] == [3, 9 * GIB, 16 * GIB]
        assert [other[name] for name in names] == [1, None, None]


def test_x4_a_project_sees_only_the_units_that_it_holds_and_no_load(ask: Ask, fill: Fill, heard: SetLoad) -> None:
    (host,) = fill(6)
    heard(host, 50.0)
    held = AcceleratorRequest.objects.filter(project_id="p1").count()
    mine = {"group": {"project": "p1"}, "total": None, "held": held, "free": None, "reserved": 0, "load": None}
    assert get_results(ask("/api/usage/", "reader")) == [mine]
    assert get_results(ask("/api/usage/?by=project", "member", "p9")) == []
    for asked in ("by=host", "by=resource_class", "by=project,host", "by=project&host=cmp0"):
        assert "cyborg:usage:elevated" in get_error_message(ask(f"/api/usage/?{asked}", "reader"), 403)
    everybody = group_by(get_results(ask("/api/usage/?by=project", "operator")), "project")
    assert list(everybody) == ["p1", "p2"] and everybody["p2"]["load"]["devices"] > 0


def test_pages_of_groups_take_at_most_five_statements(ask: Ask, fill: Fill, heard: SetLoad) -> None:
    for host in fill(60):
        heard(host, 5.0)
    with CaptureQueriesContext(connection) as captured:
        page = json.loads(ask("/api/usage/?by=host,type&limit=4&fields=group,held").content)
    assert len(captured) <= 5
    seen = [one["group"]["host"] for one in page["results"]]
    assert list(page["results"][0]) == ["group", "held"]
    rest = json.loads(ask(page["next"].removeprefix("http://testserver")).content)
    assert seen + [one["group"]["host"] for one in rest["results"]] == [f"cmp{n}" for n in range(6)]
    assert rest["next"] is None
    down = get_results(ask("/api/usage/?by=host&ordering=-group&limit=1"))
    assert down[0]["group"] == {"host": "cmp5"}


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ("by=colour", 400, "by: say one or two of host, type, resource_class, project"),
        ("by=host,host", 400, "by: say one or two"),
        ("by=host,type,project", 400, "by: say one or two"),
        ("type=TOASTER", 400, "type"),
        ("cursor=bm9uZQ", 404, "does not belong to this list"),
        ("by=host&colour=red", 400, "colour: unknown parameter"),
    ],
)
def test_invalid_usage_queries_are_refused(ask: Ask, asked: str, status: int, says: str) -> None:
    assert says in get_error_message(ask(f"/api/usage/?{asked}"), status)


def create_profile(name: str, *groups: dict[str, str]) -> None:
    with conductor.writing():
        DeviceProfile.objects.create(name=name, groups=list(groups))


def test_a_census_lists_fitting_hosts_least_busy_first_and_hosts_that_did_not_answer(ask: Ask, heard: SetLoad) -> None:
    busy, idle, full, mute, _, down = hosts = [create_heard_host(f"cmp{n}", 2) for n in range(6)]
    get_or_create_host("cmp8")
    make_ready(*hosts)
    create_profile("pair", {"resources:FPGA": "2", "trait:CUSTOM_TEST": "required"})
    with conductor.writing():
        for handle in AttachHandle.objects.filter(deployable__device__host=full):
            AcceleratorRequest.objects.create(
                project_id="p1",
                state="Bound",
                profile=DeviceProfile.objects.get(),
                group={},
                deployable=handle.deployable,
                attach_handle=handle,
            )
    Lease.objects.filter(host=down).delete()
    heard(busy, 80.0, 90.0)
    heard(idle, 0.0, 10.0)
    heard(full, 20.0)
    heard(mute, 1.0, quiet=True, ago=40)
    ask("/api/usage/", "operator")  # creates the caller's token, whose statement is not counted below
    with CaptureQueriesContext(connection) as captured:
        census = json.loads(ask(CENSUS, "operator", method="POST", data={"profile": "pair", "count": 2}).content)
    assert len(captured) <= 6
    found = [(row["host"]["name"], row["fits"], row["free"], row["room"]) for row in census["hosts"]]
    assert found[:4] == [
        ("cmp1", True, 4, 2),
        ("cmp0", True, 4, 2),
        ("cmp3", True, 4, 2),
        ("cmp4", True, 4, 2),
    ]
    assert {row[0] for row in found[4:]} == {"cmp2", "cmp5", "cmp8"} and not any(row[1] for row in found[4:])
    why = {row["host"]["name"]: row["why"] for row in census["hosts"]}
    assert why["cmp2"] == "it has no free unit that is ready and fits"
    assert census["hosts"][0]["load"]["utilization_percent_mean"] == 5.0 and census["hosts"][2]["load"] is None
    missing = {one["host"]: one["why"] for one in census["missing"]}
    assert (census["came"], census["fitting"], len(missing)) == (3, 4, 4)
    assert missing["cmp3"].startswith("silent: no answer within 2 s; it last spoke 4")
    assert "an older release" in missing["cmp4"]
    assert missing["cmp5"] == "its agent is down: start it, then try again" == why["cmp5"]
    assert missing["cmp8"].startswith("no agent has joined for it: let it join") and missing["cmp8"] == why["cmp8"]


def test_a_census_of_named_hosts_counts_their_room_and_names_a_silent_gateway(ask: Ask, heard: SetLoad) -> None:
    near, far = create_heard_host("cmp0", 2), create_heard_host("cmp1", 2)
    make_ready(near, far)
    heard(near, 1.0, silent="web-2")
    Agent.objects.filter(host=near).update(barred="revoked", barred_reason="by olga")
    asked = {"hosts": ["cmp1", "cmp0"], "count": 5, "within_s": 0.2}
    census = json.loads(ask(CENSUS, method="POST", data=asked).content)
    assert [(row["host"]["name"], row["room"], row["why"]) for row in census["hosts"]] == [
        ("cmp0", 4, explain_bar("revoked", "by olga", "")),
        ("cmp1", 4, "room for 4 of 5"),
    ]
    assert census["missing"][1] == {
        "host": "cmp1",
        "why": "gateway not answering: web-2 may hold its connection",
    }


def test_a_census_counts_how_many_devices_of_a_host_sent_samples(ask: Ask, heard: SetLoad) -> None:
    part, dumb, bare = create_heard_host("cmp0", 4), create_heard_host("cmp1", 2), create_heard_host("cmp2", 0)
    first, second, gone, _ = part.devices.order_by("id")
    with conductor.writing():
        Device.objects.filter(pk=gone.pk).update(state="retired")
        AttachHandle.objects.filter(deployable__device=second).delete()
        Deployable.objects.filter(device=second).delete()
    busy = {"utilization_percent": 90.0, "power_watts": 10.0}
    heard(part, devices={first.key: {"utilization_percent": 20.0}, second.key: {}, gone.key: busy, "pci:nowhere": busy})
    heard(dumb)
    heard(bare)
    taken = json.loads(ask(CENSUS, method="POST", data={}).content)
    loads = {row["host"]["name"]: row["load"] for row in taken["hosts"]}
    found = {name: (load["devices"], load["sampled"]) for name, load in loads.items()}
    assert found == {"cmp0": (3, 2), "cmp1": (2, 0), "cmp2": (0, 0)}
    assert (loads["cmp0"]["utilization_percent_max"], loads["cmp0"]["power_watts"]) == (20.0, None)
    assert (taken["came"], taken["missing"]) == (3, [])


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"hosts": ["nope"]}, 404, "There is no host nope."),
        ({"profile": "nope"}, 404, "There is no device profile 'nope'."),
        ({"profile": "none"}, 409, "asks for no accelerator"),
        ({"count": 0}, 400, "count"),
        ({"count": 100_000}, 400, "count"),
        ({"within_s": 11}, 400, "within_s"),
        ({"within_s": "2"}, 400, "within_s"),
        ({"hosts": []}, 400, "hosts"),
        ({"colour": "red"}, 400, "colour: cannot be written"),
    ],
)
def test_invalid_censuses_are_refused(ask: Ask, asked: dict, status: int, says: str) -> None:
    create_profile("none", {})
    assert says in get_error_message(ask(CENSUS, method="POST", data=asked), status)


def test_a_census_is_allowed_to_admins_managers_and_operators_only(ask: Ask, db: None) -> None:
    for who, status in (("admin", 200), ("manager", 200), ("operator", 200), ("member", 403), ("", 401)):
        assert ask(CENSUS, who, method="POST", data={}).status_code == status
    get_error_message(ask(CENSUS), 405)


def test_more_than_two_censuses_at_once_are_answered_503(
    ask: Ask, heard: SetLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_heard_host("cmp0", 1)
    meanwhile = []

    def another(hosts: Collection[int], within_s: float) -> LoadSnapshot:
        meanwhile.append(ask(CENSUS, method="POST", data={}))
        return LoadSnapshot({})

    monkeypatch.setattr(telemetry, "run_load_census", another)
    for _ in range(2):
        meanwhile.clear()
        assert ask(CENSUS, method="POST", data={}).status_code == 200
        refused, second = meanwhile
        assert (
            "2 censuses are under way" in get_error_message(refused, 503, "unavailable")
            and refused["Retry-After"] == "5"
        )
        assert second.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "where"),
    [
        ("POST", "/api/census/", "long"),
        ("POST", "/api/census", "long"),
        ("POST", "/admin/census/", "long"),
        ("GET", "/admin/census/", "short"),
        ("POST", "/api/censuses/", "short"),
    ],
)
def test_a_census_runs_in_the_threads_for_long_requests(method: str, path: str, where: str) -> None:
    taken = []

    async def short(*_: Any) -> None:
        taken.append("short")

    async def long(*_: Any) -> None:
        taken.append("long")

    threads = DjangoThreads(None, Keys())
    threads.short, threads.long = short, long  # type: ignore[assignment]
    http = HttpApplication(AgentGateway(Keys()), threads)
    asyncio.run(http({"type": "http", "method": method, "path": path, "headers": []}, None, None))
    assert taken == [where]


@pytest.mark.slow
def test_a_census_of_a_thousand_hosts_takes_no_more_statements_than_one_of_ten(ask: Ask, heard: SetLoad) -> None:
    def cost() -> int:
        profiles.clear_profile_cache()  # so that reading the profile is always counted
        with CaptureQueriesContext(connection) as captured:
            said = ask(CENSUS, method="POST", data={"profile": "one"})
        assert json.loads(said.content)["came"] == Host.objects.count()
        return len(captured)

    create_profile("one", {"resources:FPGA": "1"})
    with conductor.writing():
        made = Host.objects.bulk_create(Host(name=f"cmp{n}", node=f"cmp{n}") for n in range(10))
    enrol_agents(made, heard)
    ask("/api/usage/")  # creates the caller's token, whose statement is not counted below
    few = cost()
    with conductor.writing():
        made = Host.objects.bulk_create(Host(name=f"far{n}", node=f"far{n}") for n in range(990))
    enrol_agents(made, heard)
    assert cost() == few <= 6


def enrol_agents(hosts: list[Host], heard: SetLoad) -> None:
    """Give each host an agent with a current lease and a load."""
    Agent.objects.bulk_create(Agent(host=host, public_key=f"key of {host.name}") for host in hosts)
    for host in hosts:
        heard(host)
    Lease.objects.bulk_create(Lease(host=host, seen_at=datetime.now(UTC)) for host in hosts)
