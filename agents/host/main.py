"""`cyborg-agent`: the entry point of the daemon on a compute host. It builds and connects the parts of `agents.host`.

Exit status: 0 when it was asked to stop; 1 when it failed, or with --once when a driver failed; 2 when the
configuration cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import re
import signal
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agents import credentials, wire
from agents.host import once
from agents.host.connection.authority import Authority
from agents.host.connection.http import Gateway
from agents.host.connection.identity import Keyring, load_or_make
from agents.host.connection.link import Link
from agents.host.discovery.change_watcher import Watch
from agents.host.discovery.driver_set import Roster
from agents.host.discovery.reporter import Reporter, canonical
from agents.host.discovery.sampler import Meter
from agents.host.execution.command_semantics import OPS
from agents.host.execution.executor import Executor
from agents.host.execution.images import Images
from agents.host.execution.placement_writer import Direct
from agents.host.execution.plan_runner import Site
from agents.host.journal.desired_drivers import Wishes
from agents.host.journal.journal import Journal, WrongHostError, known_host, open_journal
from agents.host.log_buffer import Tail
from agents.host.settings import AgentSettings, allowed_acts, driver_tables, host_of, read_join, read_settings
from drivers import catalogue
from drivers.configuration import ConfigurationError, keys_of
from drivers.errors import DriverError
from drivers.isolation.host_writer import HostWriter
from drivers.isolation.process import die_with_parent
from drivers.isolation.runner import DriverProcess
from drivers.machine import Machine
from drivers.pci.ownership import settle

log = logging.getLogger("cyborg.agent")

STOP_S = 1.5
"""Seconds that driver processes have to end at shutdown; processes that are left then die with this process."""
DISK_RETRY_S = 5.0
"""Seconds between two attempts to open a journal that SQLite cannot open or write, such as on a full disk."""
LAYOUT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; with --once, print what the drivers find. Return the exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.die_with_parent:
        die_with_parent()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if arguments.verbose else logging.WARNING if arguments.once else logging.INFO,
        format=LAYOUT,
    )
    logging.getLogger("websockets").setLevel(logging.INFO if arguments.verbose else logging.WARNING)
    try:
        settings = read_settings(os.environ)
        if arguments.once:
            return asyncio.run(_once(settings, as_json=arguments.json))
        return asyncio.run(_daemon(settings))
    except (ConfigurationError, WrongHostError) as error:
        sys.stderr.write(f"cyborg-agent: {error}\n")
        return 2
    except KeyboardInterrupt:  # SIGINT came before the event loop handled signals, or during --once
        return 0


def _parser() -> argparse.ArgumentParser:
    keys = keys_of(AgentSettings)
    width = max(len(one.name) for one in keys)
    table = "\n".join(f"  {one.name.ljust(width)}  {one.effect}\n  {'':{width}}  default: {one.shown}" for one in keys)
    parser = argparse.ArgumentParser(
        prog="cyborg-agent",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Finds this host's accelerators and keeps the conductor informed over one WebSocket.",
        epilog=f"""\
first steps:
  cyborg-agent --once                       prints what is found here; contacts nobody, writes nothing
  manage.py join_token HOST                 (on the conductor) prints the join token, one line
  CYBORG_JOIN_TOKEN=THAT_LINE cyborg-agent  joins, then runs; the token is needed only once

environment (or a TOML file named by CYBORG_CONFIG):
{table}""",
    )
    parser.add_argument("--once", action="store_true", help="print what this host's own drivers find, and exit")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON instead of a table")
    parser.add_argument("--verbose", action="store_true", help="log details")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started it ends")
    return parser


async def _once(settings: AgentSettings, *, as_json: bool) -> int:
    """Print the devices that the locally enabled drivers find; return 1 if a driver failed, else 0.

    Driver changes that the conductor asked for are ignored, and nothing is written to the journal.
    """
    join = read_join(settings)
    name, node = host_of(settings, join, known_host(Path(settings.state_dir)))
    tables = driver_tables(settings)
    allowed_acts(tables)
    drivers = _roster(settings, node, tables, None).running
    try:
        answers = await asyncio.gather(*(driver.discover() for driver in drivers.values()))
        lacks = {name: await _lacks(driver) for name, driver in drivers.items()}
    finally:
        await _close(drivers)
    reports = [canonical(report) for report in settle(answers)]
    sys.stdout.write(once.as_json(reports) if as_json else once.as_table(reports, name, lacks))
    return 1 if any(report.error for report in reports) else 0


async def _lacks(driver: DriverProcess) -> tuple[str, ...]:
    """Return the reasons why the driver cannot use all features of this host.

    Return () when the driver itself fails: its report has that error already.
    """
    try:
        return await driver.probe()
    except DriverError:
        return ()


async def _daemon(settings: AgentSettings) -> int:
    """Lock the state directory, load the key and the journal, and run until a signal comes. Return the exit status.

    Raises ConfigurationError and WrongHostError.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    directory = Path(settings.state_dir).absolute()
    tables = driver_tables(settings)
    allowed = allowed_acts(tables)
    join = read_join(settings)
    lock = claim(directory)
    try:
        known = known_host(directory)
        if join is None and not known:
            raise ConfigurationError(
                "this host has not joined yet: set CYBORG_JOIN_TOKEN to the line that "
                "`manage.py join_token HOST` prints on the conductor"
            )
        name, node = host_of(settings, join, known)
        keys = load_or_make(directory, name, node)
        journal = await _journal(directory, name, stop)
        if journal is None:
            return 0
        try:
            agent = _Agent(settings, tables, allowed, keys, journal, _gateway(join, journal))
            await _work(agent, stop)
        finally:
            journal.close()
    finally:
        os.close(lock)
    log.info("stopped")
    return 0


@dataclass(frozen=True)
class _Agent:
    """What the daemon has loaded before it starts the drivers: settings, key, journal and gateway address."""

    settings: AgentSettings
    tables: Mapping[str, Any]
    allowed: Mapping[str, frozenset[str]]
    keys: Keyring
    journal: Journal
    gateway: Gateway


async def _work(agent: _Agent, stop: asyncio.Event) -> None:
    """Run drivers, reports, commands, samples and the connection until `stop` is set, or until one of them fails.

    Raises the failure of the part that failed first.
    """
    settings, journal = agent.settings, agent.journal
    identity = agent.keys.current
    roster = _roster(settings, identity.node, agent.tables, journal.wishes)
    drivers = roster.running
    watch = Watch(drivers, debounce_s=settings.uevent_debounce_ms / 1000, rescan_s=settings.rescan_s)
    log.info("host %s (node %s), drivers %s", identity.host, identity.node, ", ".join(drivers) or "none")
    reporter = Reporter(drivers, journal, told=roster.told)
    direct = Direct(identity.host, os.environ, Authority())
    greeting = hello(tuple(drivers), direct.lacks())
    executor = _executor(agent, roster, reporter, direct, greeting.boot_id)
    meter = Meter(drivers, lambda: reporter.last)
    link = Link(
        *(journal, agent.keys, agent.gateway, greeting, reporter.limit),
        desk=executor,
        authority=direct.authority,
        meter=meter,
    )
    executor.on_news = meter.on_news = link.wake.set
    watch.start()
    try:
        works = [link.run(), _serve(executor, reporter, link), _feed(watch, reporter), meter.run()]
        tasks = [asyncio.ensure_future(work) for work in (stop.wait(), *works)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    finally:
        watch.close()
        await _close(drivers)


def _executor(agent: _Agent, roster: Roster, reporter: Reporter, direct: Direct, boot: str) -> Executor:
    """Build the executor, and add a handler to the root logger that keeps the last lines for the command `logs`."""
    node = agent.keys.current.node

    site = Site(
        drivers=roster.running,
        machine=lambda driver: Machine(node, state_root=_state(agent.settings, driver)),
        hand=lambda driver: HostWriter({"/sys": "/sys", "/state": _state(agent.settings, driver)}),
        device=reporter.device,
        ledger=agent.journal.ledger,
        boot=boot or "unknown",
    )
    images = Images(
        Path(agent.settings.state_dir).absolute() / "images", agent.gateway, agent.keys, lambda: agent.journal.epoch
    )
    tail = Tail(LAYOUT)
    logging.getLogger().addHandler(tail)
    return Executor(site, reporter, images, direct, roster, rules=agent.allowed, logs=tail.text)


async def _serve(executor: Executor, reporter: Reporter, link: Link) -> None:
    """Recover interrupted commands, then run the reporter and the executor.

    The order is a rule: recovery ends before the first report is made, so that this report shows its effects.
    """
    await executor.prepare()
    async with asyncio.TaskGroup() as group:
        group.create_task(reporter.run(link.offer))
        group.create_task(executor.run())


async def _feed(watch: Watch, reporter: Reporter) -> None:
    """Have the reporter ask drivers again each time the change watcher names them."""
    while True:
        reporter.look(await watch.changed())


def _roster(settings: AgentSettings, node: str, tables: Mapping[str, Any], wishes: Wishes | None) -> Roster:
    """Return the drivers of this host. Without `desired_drivers` only those run that its own configuration enables.

    Raises ConfigurationError when CYBORG_ENABLED_DRIVERS names a driver that is not installed.
    """
    known = catalogue.names()
    for name in settings.enabled_drivers:
        if name not in known:
            raise ConfigurationError(f"CYBORG_ENABLED_DRIVERS: there is no driver {name!r}; known: {', '.join(known)}")
    for name in tables.keys() - set(settings.enabled_drivers):
        log.warning("CYBORG_DRIVER_SETTINGS has a table for %s, which is not enabled", name)

    def make(name: str, table: Mapping[str, object]) -> DriverProcess:
        state = _state(settings, name)
        return DriverProcess(name, node, table, deadline_s=settings.driver_deadline_s, state=state)

    return Roster(settings.enabled_drivers, tables, wishes, make)


def _state(settings: AgentSettings, driver: str) -> str:
    """Return the path of the driver's own directory, which it sees as `/state`. The first write creates it."""
    return str(Path(settings.state_dir).absolute() / "drivers" / driver)


async def _close(drivers: Mapping[str, DriverProcess]) -> None:
    """End all driver processes at once; after STOP_TIMEOUT_S stop waiting for those that have not ended."""
    closing = [asyncio.ensure_future(driver.close()) for driver in drivers.values()]
    done, late = await asyncio.wait(closing, timeout=STOP_S)
    for task in late:
        task.cancel()
    for task in done:
        task.result()


def hello(drivers: tuple[str, ...], writes: str | None = None) -> wire.Hello:
    """Build the Hello message: release, boot id of the kernel, running drivers, commands, access to Placement.

    `placement_problem` is the reason why this host cannot write to Placement, '' when it can.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        log.debug("this kernel has no boot id: %s", error)
        boot = ""
    release = re.sub(r"[^A-Za-z0-9_.:-]", "-", metadata.version("cyborgweb"))[:64]
    return wire.Hello(agent_version=release, boot_id=boot, drivers=drivers, ops=OPS, writes=writes)


def claim(directory: Path) -> int:
    """Create the state directory, lock it for this process, and return the lock's file descriptor.

    The lock holds until the descriptor is closed. Raises ConfigurationError when the directory cannot be used, or when
    another agent has locked it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"CYBORG_AGENT_STATE_DIR={directory} cannot be used: {error.strerror}: {error.filename}"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigurationError(
            f"another agent already uses {directory}: stop it, or give this one its own CYBORG_AGENT_STATE_DIR"
        ) from None
    return handle


async def _journal(directory: Path, host: str, stop: asyncio.Event) -> Journal | None:
    """Open the journal, with a retry every DISK_RETRY_S while SQLite fails; return None if `stop` is set first.

    Raises WrongHostError.
    """
    while not stop.is_set():
        try:
            return open_journal(directory, host)
        except sqlite3.OperationalError as error:
            log.error(
                "the journal in %s cannot be opened (%s): trying again in %.0f s",
                directory,
                error,
                DISK_RETRY_S,
            )
        try:
            async with asyncio.timeout(DISK_RETRY_S):
                await stop.wait()
        except TimeoutError:
            continue
    return None


def _gateway(join: credentials.Join | None, journal: Journal) -> Gateway:
    """Return the gateway of the join token, else the one that the journal remembers. Raises ConfigurationError."""
    if join is not None:
        return Gateway(join.address, join.fingerprint, join.secret)
    if not journal.address:
        raise ConfigurationError(
            f"{journal.host} has not joined yet: set CYBORG_JOIN_TOKEN to the line that "
            f"`manage.py join_token {journal.host}` prints on the conductor"
        )
    return Gateway(journal.address, journal.fingerprint)


if __name__ == "__main__":
    sys.exit(main())
