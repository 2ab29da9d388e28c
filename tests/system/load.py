"""Hosts that report continuously and remember which reports were acknowledged, to test that none of these is lost.

Each host is a `WireAgent` on a thread. It sends one report after the other, each with different devices, and reconnects
when the socket breaks, as the real agent does: an unacknowledged report is sent again with the same number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from psycopg import OperationalError
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from agents import credentials, wire
from drivers.inventory import Device, DriverReport
from tests.support.reports import make_card, name_providers_of_device
from tests.support.wireagent import WireAgent, ask
from tests.system.product import Product

CARDS = 6
DRIVER = "test_driver"
STORED = """
SELECT d.key, d.vendor_board_info FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id
WHERE h.name = %s AND d.state <> 'missing'
"""


def devices(node: str, seq: int) -> tuple[Device, ...]:
    """Return the devices in report `seq` of a host: one card for each bit set in `seq`, with `seq` in its
    vendor_board_info."""
    cards = (make_card(n, vendor_board_info=f"seq {seq}") for n in range(CARDS) if seq >> n & 1)
    return tuple(name_providers_of_device(node, card) for card in cards)


@dataclass
class ReportingHost:
    """One host. `acked` is the number of its newest acknowledged report, `sent` that of the newest one sent.

    `acked_at` are the times of all acknowledgements (time.monotonic())."""

    product: Product
    name: str
    token: str
    acked: int = 0
    sent: int = 0
    trouble: str = ""
    acked_at: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    hold: threading.Event = field(default_factory=threading.Event)
    quiet: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.agent = WireAgent(port=0, host=self.name, node=self.name, token=self.token)

    def run(self) -> None:
        """Report until `stop` is set. If `hold` is set, stay connected but send nothing after the next acknowledgement.

        `quiet` is set when that state is reached.
        """
        for event in (self.stop, self.hold, self.quiet):
            event.clear()
        while not self.stop.is_set():
            self.agent.port = self.product.port
            try:
                self._connected()
            except (OSError, EOFError, ValueError, WebSocketException, AssertionError) as error:
                self.trouble = f"{type(error).__name__}: {error}"
            self.stop.wait(0.1)

    def _connected(self) -> None:
        try:
            socket = self.agent.connect()
        except InvalidStatus as error:
            raise OSError(f"{error.response.status_code} {error.response.body!r}") from None
        with socket:
            while not self.stop.is_set():
                self.sent = self.acked + 1
                content = (DriverReport(DRIVER, devices=devices(self.name, self.sent)),)
                report = wire.Report(self.agent.epoch, self.sent, wire.hash_report_content(content), content)
                answer = ask(socket, report)
                if not isinstance(answer, wire.Ack):
                    raise ConnectionClosed(None, None)
                assert answer.seq == self.sent
                self.acked = self.sent
                self.acked_at.append(time.monotonic())
                if self.hold.is_set():
                    self.quiet.set()
                    self.stop.wait()
                self.stop.wait(0.005)

    def longest_wait(self, begin: float, end: float) -> float:
        """Return the most seconds between two acknowledgements; `begin` and `end` count as acknowledgements."""
        moments = [begin, *(moment for moment in self.acked_at if begin < moment < end), end]
        return max(later - former for former, later in pairwise(moments))

    def lost(self) -> str:
        """Describe how the tables differ from the acknowledged reports; return '' if they do not.

        Raises OperationalError while the database is down.
        """
        applied = self.product.rows("SELECT applied_seq FROM accelerators_host WHERE name = %s", self.name)
        if not self.sent:
            return ""
        if not applied or not self.acked <= applied[0][0] <= self.sent:
            return f"{self.name}: applied {applied}, acknowledged {self.acked}, sent {self.sent} ({self.trouble})"
        stored = set(self.product.rows(STORED, self.name))
        wanted = {(device.key, device.vendor_board_info) for device in devices(self.name, applied[0][0])}
        return "" if stored == wanted else f"{self.name}: stored {stored}, reported {wanted}"


class Load:
    """Several reporting hosts, each of which joins `product` with its own join token."""

    def __init__(self, product: Product, count: int = 3) -> None:
        self.product = product
        names = [f"load{number}.example" for number in range(count)]
        self.hosts = [ReportingHost(product, name, self._secret(name)) for name in names]

    def _secret(self, name: str) -> str:
        address = f"http://127.0.0.1:{self.product.port}"
        return credentials.parse_join_string(self.product.manage("join_token", name, "--address", address)[-1]).secret

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Let all hosts report during the block."""
        threads = [threading.Thread(target=host.run, name=host.name, daemon=True) for host in self.hosts]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for host in self.hosts:
                host.stop.set()
            for thread in threads:
                thread.join(15)

    def hold(self) -> None:
        """Make all hosts pause, and return right after their last acknowledgement.

        If a report is lost from then on, no later report can hide the loss.
        """
        for host in self.hosts:
            host.hold.set()
        for host in self.hosts:
            assert host.quiet.wait(30), f"{host.name}: {host.trouble}"

    def until_acknowledged(self, more: int, deadline_s: float = 60.0) -> None:
        """Wait until each host has had at least `more` further reports acknowledged."""
        wanted = {host.name: host.acked + more for host in self.hosts}
        self.product.until(
            lambda: all(host.acked >= wanted[host.name] for host in self.hosts),
            deadline_s,
            lambda: f"{[(h.name, h.acked, h.trouble) for h in self.hosts]} shall reach {wanted}",
        )

    def until_taken(self) -> None:
        """Wait until the spool is empty, so that only the tables hold the acknowledged reports."""
        self.product.until(self._spool_is_empty, 60, "the spool is empty")

    def _spool_is_empty(self) -> bool:
        return self.product.rows_or_empty("SELECT count(*) FROM spool") == [(0,)]

    def until_stored(self, deadline_s: float = 60.0) -> None:
        """Wait until the spool is empty and the tables agree with the acknowledged reports; else a report was lost."""

        lost: list[str] = []

        def stored() -> bool:
            try:
                lost[:] = [text for host in self.hosts if (text := host.lost())]
                return not lost and self._spool_is_empty()
            except OperationalError as error:
                lost[:] = [f"the database is away: {error}"]
                return False

        self.product.until(stored, deadline_s, lambda: f"lost: {lost}, or the spool is not empty")
