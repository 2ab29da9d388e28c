"""Rows of the command line at scale: a device by the beginning of its uuid, many devices changed by one job, and a
rollout of many hosts that is followed.

The verbs run in this process, without the start of Python, and send their requests to granian. Requests and the bytes
of their answers are counted where the client sends them. Each row compares many objects with few in one run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import process_time
from typing import Any

import pytest
import requests
from click.testing import CliRunner, Result
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.domain.states import EventSource, RolloutState, RolloutStepState
from accelerators.models import Bulk, Device, Host, Rollout, RolloutStep
from accelerators.workflows import bulk_actions
from cyborgweb.cli.exit_codes import ExitCode
from cyborgweb.cli.main import cli
from tests.bench import fixtures, inventory
from tests.bench.figures import Row, cpu_s
from tests.bench.granian_server import run_granian
from tests.bench.lab import Lab
from tests.bench.product import list_children
from tests.bench.remote_calls import MeasurementError
from tests.bench.rows_console import create_devices
from tests.support.clocks import replace_sleep

SHORT_UUID_DIGITS = 8
ONE_BY_ONE = 30
"""How many devices are changed by a verb for each of them, in comparison with one job."""
PAUSES, FAILURES = 40, 2
"""How often a rollout is looked at while it is followed, and after how many of the pauses a host has failed."""


@dataclass(frozen=True)
class Size:
    """Numbers of devices and of hosts, few and many, and how many verbs are run for a figure."""

    few_devices: int
    many_devices: int
    bulk_devices: int
    few_hosts: int
    many_hosts: int
    shows: int


@dataclass(frozen=True)
class Exchange:
    """A request of the command line: its address, and the size of the answer's body."""

    url: str
    answer_bytes: int


@dataclass(frozen=True)
class Service:
    """A running service, the processes that serve its requests, and an administrator's token."""

    port: int
    pids: tuple[int, ...]
    token: str

    def cpu_s(self) -> float:
        """Return the CPU seconds that the service has used."""
        return sum(map(cpu_s, self.pids))

    def run(self, *words: str, code: int = ExitCode.DONE) -> Result:
        """Run `cyborg` with these words. Raises MeasurementError unless it ends with this exit code."""
        cleared = {name: "" for name in os.environ if name.startswith(("OS_", "CYBORG_"))}
        login = {"CYBORG_URL": f"http://127.0.0.1:{self.port}", "CYBORG_TOKEN": self.token}
        result = CliRunner().invoke(cli, words, env=cleared | login, prog_name="cyborg")
        if result.exit_code != code:
            raise MeasurementError(f"cyborg {' '.join(words)}: {result.output[-500:]} {result.exception!r}")
        return result


def rows(lab: Lab, size: Size, progress: Callable[[str], None]) -> list[Row]:
    """Return the rows of the command line."""
    token = inventory.create_tokens()["X-Auth-Token"]
    with run_granian(lab, 1) as server:
        service = Service(server.port, (server.pid, *list_children(server.pid)), token)
        found = [
            _measure_shows(service, size, progress),
            _measure_bulk(service, size, progress),
            *_measure_rollouts(service, size, progress),
        ]
    fixtures.empty_inventory()
    return found


@contextmanager
def record_exchanges() -> Iterator[list[Exchange]]:
    """Yield a list that gets each request which this process sends with *requests*."""
    exchanges: list[Exchange] = []
    send = requests.Session.send

    def record(session: requests.Session, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        response = send(session, request, **options)
        exchanges.append(Exchange(str(request.url), len(response.content)))
        return response

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.Session, "send", record)
        yield exchanges


def _measure_shows(service: Service, size: Size, progress: Callable[[str], None]) -> Row:
    """Return the row of `device-show` with the beginning of a uuid."""
    progress(f"cyborg device-show with short uuids, of {size.few_devices} and {size.many_devices} devices")
    few_s, _, _ = _show_devices(service, size.few_devices, size.shows)
    many_s, client_s, exchanges = _show_devices(service, size.many_devices, size.shows)
    each = len(exchanges) / size.shows
    note = (
        f"{each:.1f} requests and {sum(one.answer_bytes for one in exchanges) / size.shows:.0f} bytes each;"
        f" CPU of the command line {client_s * 1000:.1f} ms, without the start of Python"
    )
    name = f"cyborg device-show with a short uuid, of {size.many_devices} devices"
    against = f"of {size.few_devices} devices"
    rate, reference = 1 / many_s, 1 / few_s
    return Row(
        name,
        rate,
        "/CPU s",
        against,
        0.6,
        ceiling=reference,
        ratio=rate / reference,
        cpu_us=many_s * 1e6,
        note=note,
        holds=each == 2,
    )


def _show_devices(service: Service, devices: int, count: int) -> tuple[float, float, list[Exchange]]:
    """Show `count` of so many devices. Return the CPU seconds of the service and of the command line for each, and the
    requests.
    """
    create_devices(devices)
    uuids = random.Random(1).sample([str(uuid) for uuid in Device.objects.values_list("uuid", flat=True)], count)
    service.run("device-show", uuids[0][:SHORT_UUID_DIGITS])
    with record_exchanges() as exchanges:
        served, used = service.cpu_s(), process_time()
        for uuid in uuids:
            if uuid not in service.run("device-show", uuid[:SHORT_UUID_DIGITS]).output:
                raise MeasurementError(f"device-show {uuid[:SHORT_UUID_DIGITS]} has not shown {uuid}")
        return (service.cpu_s() - served) / count, (process_time() - used) / count, exchanges


def _measure_bulk(service: Service, size: Size, progress: Callable[[str], None]) -> Row:
    """Return the row of many devices that are changed by one job."""
    progress(f"{size.bulk_devices} devices quarantined by one job, and {ONE_BY_ONE} by a verb for each")
    create_devices(size.bulk_devices)
    count = Device.objects.count()
    served = service.cpu_s()
    uuids = [str(uuid) for uuid in Device.objects.values_list("uuid", flat=True)[:ONE_BY_ONE]]
    with record_exchanges() as one_by_one:
        for uuid in uuids:
            service.run("device-quarantine", uuid, "--yes", "--reason", "bench")
    single_s = (service.cpu_s() - served) / ONE_BY_ONE
    served, used = service.cpu_s(), process_time()
    with record_exchanges() as exchanges:
        words = ("--filter", "all=true", "--yes", "--no-wait", "--reason", "bench")
        service.run("device-quarantine", *words)
    ordered_s = service.cpu_s() - served
    used = process_time()
    while (bulk := Bulk.objects.latest("id")).state == "running":
        bulk_actions.run()
    each_s = (ordered_s + process_time() - used) / count
    changed = Device.objects.filter(state="quarantined").count()
    Bulk.objects.all().delete()
    note = (
        f"{len(exchanges)} requests and {sum(one.answer_bytes for one in exchanges)} bytes for {count} devices, against"
        f" {len(one_by_one)} and {sum(one.answer_bytes for one in one_by_one)} for {ONE_BY_ONE}; {changed} changed,"
        f" the job is {bulk.state}"
    )
    rate, reference = 1 / each_s, 1 / single_s
    return Row(
        f"{size.bulk_devices} devices changed by one verb of cyborg",
        rate,
        "devices/CPU s",
        "a verb for each",
        20.0,
        ceiling=reference,
        ratio=rate / reference,
        cpu_us=each_s * 1e6,
        note=note,
        holds=changed == count and len(exchanges) == 2,
    )


def _measure_rollouts(service: Service, size: Size, progress: Callable[[str], None]) -> list[Row]:
    """Return the rows of a rollout that is followed: what a look costs the service, and how many bytes it reads."""
    progress(f"cyborg rollout-show --wait, of {size.few_hosts} and {size.many_hosts} hosts")
    few = _follow_rollout(service, size.few_hosts)
    many = _follow_rollout(service, size.many_hosts)
    rate, reference = 1 / many.look_cpu_s, 1 / few.look_cpu_s
    note = (
        f"{many.looks} looks, {many.failure_reads} reads of failed hosts, {many.others} of the whole rollout; CPU of"
        " the command line is not counted"
    )
    reads_only_changes = all(
        (one.looks, one.failure_reads, one.others) == (PAUSES + 2, FAILURES, 1) for one in (few, many)
    )
    name = f"following a rollout of {size.many_hosts} hosts"
    cpu_row = Row(
        f"{name}: looks",
        rate,
        "/CPU s",
        f"of {size.few_hosts} hosts",
        0.5,
        ceiling=reference,
        ratio=rate / reference,
        cpu_us=many.look_cpu_s * 1e6,
        note=note,
        holds=reads_only_changes,
    )
    share = 100 * many.look_bytes / many.whole_bytes
    note = (
        f"{many.look_bytes:.0f} bytes, of {size.few_hosts} hosts {few.look_bytes:.0f}; the whole rollout"
        f" {many.whole_bytes}"
    )
    return [cpu_row, Row(f"{name}: bytes of a look", share, "%", "the rollout with its hosts", 1.0, note=note)]


@dataclass(frozen=True)
class FollowedRollout:
    """How a rollout was followed: the numbers of requests of each kind, and what a look costs."""

    looks: int
    failure_reads: int
    others: int
    look_cpu_s: float
    look_bytes: float
    whole_bytes: int


def _follow_rollout(service: Service, hosts: int) -> FollowedRollout:
    """Follow a rollout on so many hosts. In each pause of the command line, some more hosts end."""
    rollout = _create_rollout(hosts)
    steps = list(rollout.steps.order_by("id").values_list("id", flat=True))
    pauses, cpu_at_pause = 0, list[float]()

    def advance(_: float) -> None:
        """Let the hosts of one pause end; the last pause ends the rollout."""
        nonlocal pauses
        cpu_at_pause.append(service.cpu_s())
        pauses += 1
        ended = steps[len(steps) * (pauses - 1) // PAUSES : len(steps) * pauses // PAUSES]
        with conductor.writing():
            RolloutStep.objects.filter(id__in=ended).update(state=RolloutStepState.DONE)
            if pauses % (PAUSES // FAILURES) == PAUSES // FAILURES // 2:
                RolloutStep.objects.filter(id=steps[len(steps) * pauses // PAUSES - 1]).update(
                    state=RolloutStepState.FAILED, text="no space left on the host"
                )
            if pauses == PAUSES:
                Rollout.objects.filter(pk=rollout.pk).update(state=RolloutState.DONE, ended_at=Now())

    with record_exchanges() as exchanges, pytest.MonkeyPatch.context() as patch:
        replace_sleep(patch, advance)
        # Some hosts have failed.
        service.run("rollout-show", str(rollout.uuid), "--wait", code=ExitCode.PARTIAL)
    failure_reads = [one for one in exchanges if "step_state=failed" in one.url]
    looks = [one for one in exchanges if "counts" in one.url]
    others = [one for one in exchanges if "fields=" not in one.url]
    Rollout.objects.all().delete()
    return FollowedRollout(
        len(looks),
        len(failure_reads),
        len(others),
        (cpu_at_pause[-1] - cpu_at_pause[0]) / (len(cpu_at_pause) - 1),
        sum(one.answer_bytes for one in looks) / len(looks),
        max(one.answer_bytes for one in exchanges),
    )


def _create_rollout(hosts: int) -> Rollout:
    """Create a rollout that runs on so many hosts, none of which has begun."""
    ids = fixtures.enrol(hosts)
    with conductor.writing():
        rollout = Rollout.objects.create(
            op="install", driver="pci_driver", total=hosts, actor="bench", source=EventSource.API, stop_on_failure=False
        )
        RolloutStep.objects.bulk_create(
            RolloutStep(rollout=rollout, host=host, host_name=host.name)
            for host in Host.objects.filter(pk__in=ids).order_by("name")
        )
    return rollout
