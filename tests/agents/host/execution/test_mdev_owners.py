"""Test mediated devices that two owners make, the agent and Nova, with random sequences of what happens to instances.

Once everything has settled, a host has exactly one mediated device for each handle that a request holds, and no
definition of any other handle. Real are the driver, the executor, its recovery and the command log; the kernel, Nova,
mdevctl and the conductor are models. Nova's model (34.0.0, `virt/libvirt/driver.py`, `_allocate_cyborg_mdevs`): at each
start of a guest it creates a mediated device under the handle's uuid if libvirt knows none, defines it persistent and
lets it start with the host; it never removes one.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from agents import wire
from agents.host.execution.executor import Executor
from agents.host.execution.plan_runner import HostContext
from agents.host.journal.command_log import CREATE_COMMAND_TABLES, CommandLog
from drivers.generic.mdev import MdevBackend
from drivers.inventory import AttachHandle, Device
from drivers.isolation.driver_main import Manifest
from drivers.plan import Act, Ask, Plan
from tests.support import modelkinds
from tests.support.long import few_or_many
from tests.support.modelmachine import ModelHand, ModelMachine

GPU, KIND, ROOM = "0000:02:00.0", "nvidia-223", 3
BACKEND = {"kind": "mdev", "match": [{"vendor": "10de"}], "desired": {"mdev_type": KIND}}
HANDLES = [str(UUID(int=number)) for number in range(1, ROOM + 1)]
FOREIGN = [str(UUID(int=number)) for number in range(101, 101 + ROOM)]
DEFINITIONS = f"etc/mdevctl.d/{GPU}"
KILLS = st.sampled_from([None, None, None, None, 0, 1, 2])
"""Before which of its writes the agent is killed, mostly never."""


class BackendProcess:
    """The driver, called directly; its processes have tests of their own."""

    manifest = Manifest("generic_driver", writes=MdevBackend.writes)

    def __init__(self, host: ModelMachine) -> None:
        self.backend, self.host = msgspec.convert(BACKEND, MdevBackend), host

    def find_device(self) -> Device:
        findings = self.backend.discover(self.host.machine)
        assert findings.faults == ()
        return findings.devices[0]

    async def plan(self, act: Act, ask: Ask) -> Plan:
        return self.backend.plan(act, self.host.machine, ask)


class NoReporter:
    """Stands for the reporter: nobody reads reports here."""

    def __init__(self) -> None:
        self.failure_marks: dict[tuple[str, str], str] = {}

    async def discover_and_record(self, name: str) -> None:
        return None

    def set_failure_mark(self, driver: str, key: str, reason: str) -> None:
        self.failure_marks[driver, key] = reason


class NoImages:
    """Stands for the cache of images."""

    def delete_all(self) -> None:
        return None


class MortalHand(ModelHand):
    """Writes to the model until the agent is killed, right before one of its writes."""

    def __init__(self, host: ModelMachine, agent: AgentModel) -> None:
        super().__init__(host)
        self.agent = agent

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        if self.agent.writes_left == 0:
            self.agent.is_killed = True
            raise asyncio.CancelledError
        if self.agent.writes_left is not None:
            self.agent.writes_left -= 1
        await super().write(path, value, timeout_s)


@dataclass
class AgentModel:
    """The agent: each call of `run` is a new process with the same journal. Commands are sent until they are answered,
    as the gateway does."""

    host: ModelMachine
    boot: int = 1
    number: int = 0
    open_commands: dict[int, wire.Command] = field(default_factory=dict)
    writes_left: int | None = None
    is_killed: bool = False

    def __post_init__(self) -> None:
        connection = sqlite3.connect(":memory:")
        connection.executescript(CREATE_COMMAND_TABLES)
        self.driver, self.log = BackendProcess(self.host), CommandLog(connection)

    def order(self, op: str, handle: str, consumer: str) -> int:
        """Place a command for a handle; return its number."""
        self.number += 1
        info = f"{KIND}_{HANDLES.index(handle)}"
        place = {"asked_type": KIND, "bus": "02", "device": "00", "domain": "0000", "function": "0", "vgpu_mark": info}
        values = {"driver": "generic_driver", "key": f"pci:{GPU}", "uuid": handle, "consumer": consumer}
        values |= {"handle": AttachHandle("MDEV", msgspec.json.format(msgspec.json.encode(place), indent=0).decode())}
        self.open_commands[self.number] = wire.Command(
            self.number, str(UUID(int=self.number)), op, 60.0, 60.0, **values
        )
        return self.number

    def run(self, writes_left: int | None = None) -> dict[int, wire.Result]:
        """Start the agent, let it recover and carry out all open commands, and stop it; return the results.

        With `writes_left` it is killed before the write after that many.
        """
        self.writes_left, self.is_killed = writes_left, False
        context = HostContext(
            drivers={"generic_driver": self.driver},  # type: ignore[dict-item]
            machine_for=lambda _: self.host.machine,
            writer_for=lambda _: MortalHand(self.host, self),
            find_device=lambda *_: self.driver.find_device(),
            command_log=self.log,
            boot_id=f"boot {self.boot}",
        )
        self.reporter = NoReporter()
        executor = Executor(context, self.reporter, NoImages(), read_log=lambda: "")  # type: ignore[arg-type]
        asyncio.run(self._serve(executor))
        results = {number: result for number, result in self.log.unacknowledged.items() if number in self.open_commands}
        for number in [*self.log.unacknowledged]:
            self.log.acknowledge_result(number)
            self.open_commands.pop(number, None)
        return results

    async def _serve(self, executor: Executor) -> None:
        recovery = asyncio.ensure_future(executor.recover_after_restart())
        await asyncio.wait([recovery])
        if self.is_killed:
            return
        recovery.result()
        for command in self.open_commands.values():
            executor.accept_command(command)
        serving = asyncio.ensure_future(executor.run())
        while not self.is_killed and self.open_commands.keys() - self.log.unacknowledged.keys():
            await asyncio.sleep(0.001)
        serving.cancel()
        await asyncio.wait([serving])


class TwoOwners(RuleBasedStateMachine):
    """The conductor and Nova use mediated devices of one host at the same time.

    `held` and `releasing` are the conductor's records: handle → instance. `guests` has the handles of running guests.
    """

    @initialize()
    def start_example(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cyborg-mdev-"))
        self.host = ModelMachine(self.folder)
        card = self.host.pci(GPU, "0x10de", "0x2235", "0x030200", group=8)
        modelkinds.mdev_types(self.host, card, {KIND: ROOM})
        self.agent = AgentModel(self.host)
        self.held: dict[str, str] = {}
        self.releasing: dict[str, str] = {}
        self.guests: set[str] = set()
        self.foreign: dict[str, bool] = {}
        self.instances = 0

    # Rules about instances

    def list_free_handles(self) -> list[str]:
        """Return the handles that a request can get. Placement allocates at most the number of reported handles."""
        reported = len(self.agent.driver.find_device().deployables[0].handles)
        left = max(0, reported - len(self.held) - len(self.releasing))
        return [one for one in HANDLES[:reported] if one not in self.held and one not in self.releasing][:left]

    @precondition(lambda self: self.list_free_handles())
    @rule(killed_after=KILLS, spawns=st.booleans())
    def boot_an_instance(self, killed_after: int | None, spawns: bool) -> None:
        """Bind a handle and start the guest; the agent may be killed meanwhile, and the build may fail before."""
        handle, self.instances = self.list_free_handles()[0], self.instances + 1
        instance = str(UUID(int=1000 + self.instances))
        number = self.agent.order("attach", handle, instance)
        results = self.agent.run(killed_after)
        if number not in results:
            results = self.agent.run()
        if results[number].outcome == "succeeded":
            self.held[handle] = instance
            if spawns:
                self.nova_starts_guest(handle)
        else:
            assert killed_after is not None, results[number]
            self.releasing[handle] = instance

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 5))
    def reboot_or_rebuild_an_instance(self, which: int) -> None:
        handle = sorted(self.held)[which % len(self.held)]
        self.end_guest(handle)
        self.nova_starts_guest(handle)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 5), guest_ends=st.booleans())
    def delete_or_shelve_an_instance(self, which: int, guest_ends: bool) -> None:
        """Delete the requests; if Nova does not reach the host, the guest is still there."""
        handle = sorted(self.held)[which % len(self.held)]
        if guest_ends:
            self.end_guest(handle)
        self.releasing[handle] = self.held.pop(handle)

    @rule(killed_after=KILLS)
    def the_conductor_asks_for_released_handles(self, killed_after: int | None) -> None:
        numbers = {
            self.agent.order("detach", handle, instance): handle for handle, instance in [*self.releasing.items()]
        }
        results = self.agent.run(killed_after)
        results |= self.agent.run() if killed_after is not None else {}
        for number, handle in numbers.items():
            if results[number].outcome == "succeeded":
                assert handle not in self.guests, "it was free although its guest ran"
                del self.releasing[handle]

    # Rules about the host

    @rule(nova_first=st.booleans(), killed_after=KILLS)
    def the_host_reboots(self, nova_first: bool, killed_after: int | None) -> None:
        for handle in [*self.guests]:
            self.end_guest(handle)
        for uuid in self.list_active():
            self.host.write(f"/sys/bus/pci/devices/{GPU}/{uuid}/remove", "1")
        self.foreign = {uuid: persistent for uuid, persistent in self.foreign.items() if persistent}
        self.agent.boot += 1
        for uuid in self.list_definitions():
            self.create_mdev(uuid)
        if not nova_first:
            self.agent.run(killed_after)
        for handle in self.held:
            self.nova_starts_guest(handle)
        self.agent.run()

    @precondition(lambda self: len(self.held) + len(self.releasing) + len(self.foreign) < ROOM)
    @rule(persistent=st.booleans())
    def somebody_else_makes_a_device(self, persistent: bool) -> None:
        uuid = next(one for one in FOREIGN if one not in self.foreign)
        self.create_mdev(uuid)
        self.foreign[uuid] = persistent
        if persistent:
            self.host.file(self.folder / DEFINITIONS / uuid, '{"start": "auto"}')

    # The models of Nova, mdevctl and guests

    def nova_starts_guest(self, handle: str) -> None:
        if handle not in self.list_active():
            self.create_mdev(handle)
            self.host.file(self.folder / DEFINITIONS / handle, '{"start": "auto"}')
        group = 20 + HANDLES.index(handle)
        link = self.host.real(f"/sys/bus/pci/devices/{GPU}/{handle}/iommu_group")
        if not link.is_symlink():
            self.host.link(link, self.host.sys / f"kernel/iommu_groups/{group}")
        self.host.held |= {handle, f"/dev/vfio/{group}"}
        self.guests.add(handle)

    def end_guest(self, handle: str) -> None:
        self.host.held -= {handle, f"/dev/vfio/{20 + HANDLES.index(handle)}"}
        self.guests.discard(handle)

    def create_mdev(self, uuid: str) -> None:
        self.host.write(f"/sys/bus/pci/devices/{GPU}/mdev_supported_types/{KIND}/create", uuid)

    def list_active(self) -> list[str]:
        return self.host.machine.names("/sys/bus/mdev/devices")

    def list_definitions(self) -> list[str]:
        return self.host.machine.names(f"/{DEFINITIONS}")

    # Comparisons

    @rule()
    def everything_settles(self) -> None:
        """Let the guests of deleted instances end and the agent answer; then compare the host with the handles."""
        for handle in self.releasing:
            self.end_guest(handle)
        self.the_conductor_asks_for_released_handles(None)
        assert not self.releasing
        assert {*self.list_active()} == {*self.held} | {*self.foreign}
        persistent = {uuid for uuid, is_persistent in self.foreign.items() if is_persistent}
        assert {*self.list_definitions()} - {*self.held} == persistent
        assert len(self.agent.driver.find_device().deployables[0].handles) == ROOM - len(self.foreign)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.everything_settles()
            shutil.rmtree(self.folder)


@few_or_many(8, 400)
@pytest.mark.slow
def test_a_host_has_as_many_mediated_devices_and_definitions_as_handles_are_held(examples: int) -> None:
    checked = settings(
        max_examples=examples,
        stateful_step_count=15,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(TwoOwners, settings=checked)


def test_a_device_that_nova_makes_at_the_same_moment_as_the_agent_after_a_reboot_is_taken_over(tmp_path: Path) -> None:
    host = ModelMachine(tmp_path)
    modelkinds.mdev_types(host, host.pci(GPU, "0x10de", "0x2235", "0x030200", group=8), {KIND: ROOM})
    agent = AgentModel(host)
    attach = agent.order("attach", HANDLES[0], HANDLES[1])
    assert agent.run()[attach].outcome == "succeeded"
    host.write(f"/sys/bus/pci/devices/{GPU}/{HANDLES[0]}/remove", "1")
    agent.boot += 1
    write = host.write

    def write_after_nova(path: str, value: str) -> None:
        if path.endswith("/create"):
            write(path, value)
        write(path, value)

    host.write = write_after_nova  # type: ignore[method-assign]
    agent.run()
    assert agent.reporter.failure_marks == {("generic_driver", f"pci:{GPU}"): ""}
    assert host.machine.names("/sys/bus/mdev/devices") == [HANDLES[0]]
    assert host.machine.read(f"/state/mdev/{HANDLES[0]}") == HANDLES[1]
