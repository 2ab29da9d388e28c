"""A fleet whose agents carry out changes of drivers, as the hosts of a large site do; chosen hosts fail them.

Each host has one GPU of `generic_driver`. `pci_driver` is not installed at first; a `configure` command changes that,
and the report that the Result names shows it. A stored Result is sent again after a reconnection, until it is
acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from agents import wire
from drivers.inventory import Attribute, DriverReport
from tests.bench import messages
from tests.bench.peer import Peer
from tests.bench.remote_calls import serve_calls
from tests.fleet.hosts import SimulatedAgent, SimulatedFleet

DEVICE_DRIVER, ROLLED_OUT_DRIVER = "generic_driver", "pci_driver"
FAILURE_TEXT = "no space left on /opt: 41 MB are needed"


def host_name(number: int) -> str:
    """Return the name of host `number` of the site, which is also its node."""
    return f"cmp{number + 1:04}.hall2.example"


@dataclass
class RolloutAgent(SimulatedAgent):
    """An agent that carries out `configure` commands; while it is `broken`, they fail."""

    broken: bool = False
    wishes: dict[str, wire.Wish] = field(default_factory=dict)
    """The wanted state of each driver that a command has changed."""
    _taken: set[str] = field(default_factory=set)
    _unreported: list[wire.Command] = field(default_factory=list)
    """Commands that were carried out, but whose report was not sent yet."""
    _results: dict[int, wire.Result] = field(default_factory=dict)
    """Results that were not acknowledged yet, by the number of their command."""
    _owes_results: bool = False

    @property
    def name(self) -> str:
        """Return the name of the agent's host."""
        return host_name(self.number)

    def discover(self) -> tuple[DriverReport, ...]:
        """Return the report of the host's GPU, and that of `pci_driver` in its wanted state."""
        (device,) = messages.devices(1, self.name)
        (part,) = device.deployables
        gpu = replace(part, attributes=(Attribute("rc", "PGPU"),), driver_name=DEVICE_DRIVER)
        device = replace(device, type="GPU", vendor="10de", model="20b5", deployables=(gpu,))
        wish = self.wishes.get(ROLLED_OUT_DRIVER)
        state = "absent" if wish is None or not wish.installed else "" if wish.enabled else "disabled"
        generation = wish.generation if wish else 0
        return (
            DriverReport(DEVICE_DRIVER, "", (device,), version="1"),
            DriverReport(ROLLED_OUT_DRIVER, version="2", state=state, generation=generation),
        )

    def build_hello(self) -> wire.Hello:
        """Return the first message of a connection."""
        return wire.Hello("fleet", f"boot-{self.epoch}", (DEVICE_DRIVER,), ("configure", "rescan"))

    async def _exchange_messages(self, peer: Peer) -> None:
        self._owes_results = True
        await super()._exchange_messages(peer)

    def _handle_message(self, peer: Peer, payload: bytes) -> None:
        message = wire.decode_from_gateway(payload)
        if isinstance(message, wire.Command):
            self._carry_out(peer, message)
        elif isinstance(message, wire.Ack) and message.of == "Result":
            self._results.pop(message.seq, None)
        else:
            super()._handle_message(peer, payload)

    def _carry_out(self, peer: Peer, command: wire.Command) -> None:
        peer.send(wire.encode_message(wire.Taken((command.number,))))
        if command.id in self._taken:
            return
        self._taken.add(command.id)
        if command.op != "configure" or command.wish is None:
            self._send_result(peer, wire.Result(command.number, "refused", f"{command.op} is not simulated"))
        elif self.broken:
            self._send_result(peer, wire.Result(command.number, "failed", FAILURE_TEXT))
        else:
            self.wishes[command.driver] = command.wish
            self._unreported.append(command)
            self.change()

    def _send_report(self, peer: Peer, now: float) -> None:
        super()._send_report(peer, now)
        if self._sent_since and self._sent_since[-1].generation == self.generation:
            sent = self._sent_since[-1]
            for command in self._unreported:
                text = f"{command.driver} is enabled"
                result = wire.Result(
                    command.number, "succeeded", text, epoch=sent.epoch, seq=sent.seq, hash=sent.content
                )
                self._send_result(peer, result)
            self._unreported.clear()
        if self._owes_results:
            self._owes_results = False
            for result in self._results.values():
                peer.send(wire.encode_message(result))

    def _send_result(self, peer: Peer, result: wire.Result) -> None:
        self._results[result.number] = result
        peer.send(wire.encode_message(result))


class RolloutFleet(SimulatedFleet):
    """A fleet of RolloutAgents."""

    agent_class = RolloutAgent
    hosts: list[RolloutAgent]  # type: ignore[assignment]

    async def set_broken(self, numbers: list[int]) -> dict[str, Any]:
        """Let changes of drivers fail on the hosts with these numbers, and succeed on all others."""
        for host in self.hosts:
            host.broken = host.number in numbers
        return {}


if __name__ == "__main__":
    serve_calls(RolloutFleet)
