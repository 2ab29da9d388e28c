"""Hosts that report without pause and remember what was acknowledged: the other half of "nothing is lost".

Each is a `WireAgent` on a thread. It sends one report after the other, each with other devices, and connects again
when the socket breaks, as the real agent does: a report that was not acknowledged is sent once more with its number.
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
from tests.support.reports import card
from tests.support.wireagent import WireAgent, ask
from tests.system.product import Product

CARDS = 6
DRIVER = "test_driver"
STORED = """
SELECT d.key, d.vendor_board_info FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id
WHERE h.name = %s AND d.state <> 'missing'
"""


def devices(seq: int) -> tuple[Device, ...]:
    """What a host has at its report `seq`: the cards whose bits are set in it, each of them named after it."""
    return tuple(card(n, vendor_board_info=f"seq {seq}") for n in range(CARDS) if seq >> n & 1)


@dataclass
class ReportingHost:
    """One host; `acked` is its newest acknowledged report, `sent` its newest one that left.

    `acked_at` are the moments of all acknowledgements (time.monotonic())."""

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
        """Report until told to stop; told to hold, stay connected and be quiet after the next acknowledgement."""
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
                content = (DriverReport(DRIVER, devices=devices(self.sent)),)
                report = wire.Report(self.agent.epoch, self.sent, wire.content_hash(content), content)
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
        """The longest time between two acknowledgements from `begin` to `end`, which count as acknowledgements."""
        moments = [begin, *(moment for moment in self.acked_at if begin < moment < end), end]
        return max(later - former for former, later in pairwise(moments))

    def lost(self) -> str:
        """What of the acknowledged is not in the tables; '' when all is. Raises OperationalError without a database."""
        applied = self.product.rows("SELECT applied_seq FROM accelerators_host WHERE name = %s", self.name)
        if not self.sent:
            return ""
        if not applied or not self.acked <= applied[0][0] <= self.sent:
            return f"{self.name}: applied {applied}, acknowledged {self.acked}, sent {self.sent} ({self.trouble})"
        stored = set(self.product.rows(STORED, self.name))
        wanted = {(device.key, device.vendor_board_info) for device in devices(applied[0][0])}
        return "" if stored == wanted else f"{self.name}: stored {stored}, reported {wanted}"


class Load:
    """Some hosts that join `product` with tokens of their own."""

    def __init__(self, product: Product, count: int = 3) -> None:
        self.product = product
        names = [f"load{number}.example" for number in range(count)]
        self.hosts = [ReportingHost(product, name, self._secret(name)) for name in names]

    def _secret(self, name: str) -> str:
        return credentials.parse_join_string(self.product.manage("join_token", name)[-1]).secret

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """All of them report meanwhile."""
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
        """Return right after the last acknowledgement: what is lost from now on, no later report makes good."""
        for host in self.hosts:
            host.hold.set()
        for host in self.hosts:
            assert host.quiet.wait(30), f"{host.name}: {host.trouble}"

    def until_acknowledged(self, more: int, deadline_s: float = 60.0) -> None:
        """Wait until each host has had so many more reports acknowledged."""
        wanted = {host.name: host.acked + more for host in self.hosts}
        self.product.until(
            lambda: all(host.acked >= wanted[host.name] for host in self.hosts),
            deadline_s,
            lambda: f"{[(h.name, h.acked, h.trouble) for h in self.hosts]} shall reach {wanted}",
        )

    def until_taken(self) -> None:
        """Wait until the spool is empty: from now on the tables alone hold what was acknowledged."""
        self.product.until(self._spool_is_empty, 60, "the spool is empty")

    def _spool_is_empty(self) -> bool:
        return self.product.rows_or_empty("SELECT count(*) FROM spool") == [(0,)]

    def until_stored(self, deadline_s: float = 60.0) -> None:
        """Nothing acknowledged is lost: wait until the tables say what was acknowledged, and the spool is empty."""

        lost: list[str] = []

        def stored() -> bool:
            try:
                lost[:] = [text for host in self.hosts if (text := host.lost())]
                return not lost and self._spool_is_empty()
            except OperationalError as error:
                lost[:] = [f"the database is away: {error}"]
                return False

        self.product.until(stored, deadline_s, lambda: f"lost: {lost}, or the spool is not empty")
