"""`cyborg-agent`: the entry point of the daemon on a compute host. It builds and connects the parts of `agents.host`.

Exit status: 0 when it was asked to stop; 1 when it failed, with --once when a driver failed, with `check` when a check
failed; 2 when the command line or the configuration cannot be used.
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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from agents import credentials, wire
from agents.host import discovery_table
from agents.host.checking import checks, gathering
from agents.host.checking.facts import HostFacts
from agents.host.connection.authority import PlacementAuthority
from agents.host.connection.http import GatewayEndpoint
from agents.host.connection.identity import Keyring, load_or_create_keys
from agents.host.connection.link import GatewayLink
from agents.host.discovery.change_watcher import ChangeWatcher
from agents.host.discovery.driver_set import DriverSet
from agents.host.discovery.reporter import InventoryReporter, canonicalize_report
from agents.host.discovery.sampler import HostLoadSampler
from agents.host.execution.command_semantics import SUPPORTED_OPS
from agents.host.execution.executor import Executor
from agents.host.execution.host_machine import HostMachine
from agents.host.execution.images import ImageCache
from agents.host.execution.placement_writer import DirectPlacementWriter
from agents.host.execution.plan_runner import HostContext
from agents.host.journal.desired_drivers import DesiredDrivers
from agents.host.journal.journal import (
    Journal,
    KnownGateway,
    WrongHostError,
    open_journal,
    read_known_gateway,
    read_known_host,
)
from agents.host.log_buffer import LogTail
from agents.host.settings import (
    AgentSettings,
    determine_host_names,
    extract_allowed_acts,
    read_driver_settings,
    read_join_token,
    read_settings,
)
from drivers import catalogue
from drivers.configuration import ConfigurationError, list_keys
from drivers.errors import DriverError
from drivers.isolation.host_writer import HostWriter
from drivers.isolation.process import die_with_parent
from drivers.isolation.runner import DriverProcess
from drivers.isolation.threads import SharedWork
from drivers.machine import Machine
from drivers.plan import MDEV_DEFINITIONS

log = logging.getLogger("cyborg.agent")

STOP_TIMEOUT_S = 1.5
"""Seconds that driver processes have to end at shutdown; processes that are left then die with this process."""
DISK_RETRY_S = 5.0
"""Seconds between two attempts to open a journal that SQLite cannot open or write, such as on a full disk."""
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; with --once, print what the drivers find; with `check`, check the host.

    Return the exit status.
    """
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.once and arguments.command:
        parser.error("check and --once are two different things: give one of them")
    if arguments.die_with_parent:
        die_with_parent()
    logging.basicConfig(
        stream=sys.stderr,
        level=_choose_log_level(arguments),
        format=LOG_FORMAT,
    )
    logging.getLogger("websockets").setLevel(logging.INFO if arguments.verbose else logging.WARNING)
    try:
        settings = read_settings(os.environ)
        if arguments.command:
            return asyncio.run(_check_host(settings, as_json=arguments.json))
        if arguments.once:
            return asyncio.run(_print_inventory(settings, as_json=arguments.json))
        return asyncio.run(_run_daemon(settings))
    except (ConfigurationError, WrongHostError) as error:
        sys.stderr.write(f"cyborg-agent: {error}\n")
        return 2
    except DriverError as error:  # a file of /sys or /proc that the check itself reads
        sys.stderr.write(f"cyborg-agent: this host cannot be checked: {error}\n")
        return 1
    except KeyboardInterrupt:  # SIGINT came before the event loop handled signals, or during --once or check
        return 1 if arguments.command else 0


def _choose_log_level(arguments: argparse.Namespace) -> int:
    """Return the least level of messages to log. With `--once` and `check`, which print a result, it is WARNING."""
    if arguments.verbose:
        return logging.DEBUG
    return logging.WARNING if arguments.once or arguments.command else logging.INFO


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Its help lists all configuration keys of the agent."""
    keys = list_keys(AgentSettings)
    width = max(len(setting.name) for setting in keys)
    table = "\n".join(
        f"  {one.name.ljust(width)}  {one.effect}\n  {'':{width}}  default: {one.default_text}" for one in keys
    )
    parser = argparse.ArgumentParser(
        prog="cyborg-agent",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Finds this host's accelerators and keeps the conductor informed over one WebSocket.",
        epilog=f"""\
first steps:
  cyborg-agent check                        checks this host before it joins, and says what must be mended
  cyborg-agent --once                       prints what is found here; contacts nobody, writes nothing
  manage.py join_token HOST                 (on the conductor) prints the join token, one line
  CYBORG_JOIN_TOKEN=THAT_LINE cyborg-agent  joins, then runs; the token is needed only once

check looks at the kernel, IOMMU, VFIO, SR-IOV, the rights of this user, the state directory, what the host itself uses,
and what each installed driver would offer. With a join token, or on a host that has joined, it asks the conductor for a
challenge, and checks the route, the pinned certificate and the clocks. It writes nothing and joins nothing. As in the
running agent, a driver opens the disks that its rules select exclusively for a moment, to see whether they are claimed.
Exit status of check: 0 nothing failed, 1 something must be mended, 2 the command line or the configuration is unusable.

environment (or a TOML file named by CYBORG_CONFIG):
{table}""",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("check",),
        help="check whether this host is ready, and exit; default: run the agent",
    )
    parser.add_argument("--once", action="store_true", help="print what this host's own drivers find, and exit")
    parser.add_argument("--json", action="store_true", help="with --once and check: as JSON instead of text")
    parser.add_argument("--verbose", action="store_true", help="log details")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started it ends")
    return parser


async def _print_inventory(settings: AgentSettings, *, as_json: bool) -> int:
    """Print the devices that the locally enabled drivers find; return 1 if a driver failed, else 0.

    Driver changes that the conductor asked for are ignored, and nothing is written to the journal. Raises
    ConfigurationError.
    """
    join = read_join_token(settings)
    name, node = determine_host_names(settings, join, read_known_host(Path(settings.state_dir)))
    driver_settings = read_driver_settings(settings)
    extract_allowed_acts(driver_settings)
    drivers = _build_driver_set(settings, node, driver_settings, None).running
    try:
        facts = await gathering.gather_drivers(list(drivers.values()), list(drivers))
    finally:
        await _close_drivers(drivers)
    reports = [canonicalize_report(one.report) for one in facts]
    limitations = {one.name: one.limitations for one in facts}
    sys.stdout.write(
        discovery_table.render_json(reports) if as_json else discovery_table.render_table(reports, name, limitations)
    )
    return 1 if any(report.error for report in reports) else 0


async def _check_host(settings: AgentSettings, *, as_json: bool) -> int:
    """Check this host and its way to the conductor, print the results, and return 1 if a check failed, else 0.

    The local configuration decides which drivers count as enabled. Nothing is written. Raises ConfigurationError.
    """
    join, directory = read_join_token(settings), Path(settings.state_dir).absolute()
    known_host = read_known_host(directory)
    host, node = determine_host_names(settings, join, known_host)
    driver_settings = read_driver_settings(settings)
    extract_allowed_acts(driver_settings)
    drivers = dict(_build_driver_set(settings, node, driver_settings, None).running)
    for name in catalogue.list_driver_names():
        drivers.setdefault(name, _create_driver_process(settings, node, name, driver_settings.get(name, {})))
    gateway = _choose_gateway(join, read_known_gateway(directory))
    machine = Machine(node)
    try:
        driver_facts, conductor = await asyncio.gather(
            gathering.gather_drivers(list(drivers.values()), settings.enabled_drivers),
            gathering.gather_conductor(gateway),
        )
    finally:
        await _close_drivers(drivers)
    usage, usage_error = await gathering.gather_host_usage(machine)
    facts = HostFacts(
        host,
        node,
        known_host,
        gathering.gather_kernel(machine),
        gathering.gather_rights(machine, directory),
        conductor,
        driver_facts,
        usage,
        usage_error,
    )
    results = checks.run_checks(facts)
    text = checks.render_json(host, results, driver_facts) if as_json else checks.render_text(host, results)
    sys.stdout.write(text)
    return 1 if checks.has_failed(results) else 0


async def _run_daemon(settings: AgentSettings) -> int:
    """Lock the state directory, load the key and the journal, and run until a signal comes. Return the exit status.

    Raises ConfigurationError and WrongHostError.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    directory = Path(settings.state_dir).absolute()
    driver_settings = read_driver_settings(settings)
    allowed = extract_allowed_acts(driver_settings)
    join = read_join_token(settings)
    lock_descriptor = lock_state_dir(directory)
    try:
        known_name = read_known_host(directory)
        if join is None and not known_name:
            raise ConfigurationError(
                "this host has not joined yet: set CYBORG_JOIN_TOKEN to the line that "
                "`manage.py join_token HOST` prints on the conductor"
            )
        name, node = determine_host_names(settings, join, known_name)
        keys = load_or_create_keys(directory, name, node)
        journal = await _open_journal_with_retry(directory, name, stop)
        if journal is None:
            return 0
        try:
            gateway = _choose_gateway(join, journal.gateway)
            if gateway is None:
                raise ConfigurationError(
                    f"{name} has not joined yet: set CYBORG_JOIN_TOKEN to the line that `manage.py join_token {name}` "
                    "prints on the conductor"
                )
            agent = _LoadedAgent(settings, driver_settings, allowed, keys, journal, gateway)
            await _run_agent(agent, stop)
        finally:
            journal.close()
    finally:
        os.close(lock_descriptor)
    log.info("stopped")
    return 0


@dataclass(frozen=True)
class _LoadedAgent:
    """The data that the daemon loads before it starts the drivers: settings, key, journal and gateway address.

    `gateway` is the gateway as it was known at the start; the connection learns of further certificates.
    """

    settings: AgentSettings
    driver_settings: Mapping[str, Any]
    allowed_acts: Mapping[str, frozenset[str]]
    keys: Keyring
    journal: Journal
    gateway: GatewayEndpoint


async def _run_agent(agent: _LoadedAgent, stop: asyncio.Event) -> None:
    """Run drivers, reports, commands, samples and the connection until `stop` is set, or until one of them fails.

    Raises the failure of the part that failed first.
    """
    settings, journal = agent.settings, agent.journal
    identity = agent.keys.current_identity
    driver_set = _build_driver_set(settings, identity.node, agent.driver_settings, journal.desired_drivers)
    drivers = driver_set.running
    change_watcher = ChangeWatcher(drivers, debounce_s=settings.uevent_debounce_ms / 1000, rescan_s=settings.rescan_s)
    log.info("host %s (node %s), drivers %s", identity.host, identity.node, ", ".join(drivers) or "none")
    reporter = InventoryReporter(drivers, journal, complete_reports=driver_set.complete_reports)
    placement_writer = DirectPlacementWriter(identity.host, os.environ, PlacementAuthority())
    hello_message = build_hello(tuple(drivers), placement_writer.find_obstacle())
    journal.boot_id = hello_message.boot_id
    sampler = HostLoadSampler(drivers, lambda: reporter.last_report)
    link = GatewayLink(
        *(journal, agent.keys, agent.gateway, hello_message, reporter.set_message_limit),
        authority=placement_writer.authority,
        sampler=sampler,
    )
    executor = link.command_sink = _build_executor(agent, link, driver_set, reporter, placement_writer)
    executor.notify_sender = sampler.notify_sender = link.wake.set
    change_watcher.start()
    try:
        coroutines = [
            link.run(),
            _recover_and_serve(executor, reporter, link),
            _forward_changes(change_watcher, reporter),
            sampler.run(),
        ]
        tasks = [asyncio.ensure_future(work) for work in (stop.wait(), *coroutines)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    finally:
        change_watcher.close()
        await _close_drivers(drivers)


def _build_executor(
    agent: _LoadedAgent,
    link: GatewayLink,
    driver_set: DriverSet,
    reporter: InventoryReporter,
    placement_writer: DirectPlacementWriter,
) -> Executor:
    """Build the executor, and add a handler to the root logger that keeps the last lines for the command `logs`."""
    node = agent.keys.current_identity.node
    open_nodes_look = SharedWork(Machine(node).list_open_nodes)

    context = HostContext(
        drivers=driver_set.running,
        machine_for=lambda driver: HostMachine(
            node, open_nodes_look, state_root=_driver_state_dir(agent.settings, driver)
        ),
        writer_for=lambda driver: HostWriter(
            {"/sys": "/sys", MDEV_DEFINITIONS: MDEV_DEFINITIONS, "/state": _driver_state_dir(agent.settings, driver)}
        ),
        find_device=reporter.find_device,
        command_log=agent.journal.command_log,
        boot_id=agent.journal.boot_id or "unknown",
    )
    images = ImageCache(
        Path(agent.settings.state_dir).absolute() / "images",
        lambda: link.gateway,
        agent.keys,
        lambda: agent.journal.epoch,
    )
    log_tail = LogTail(LOG_FORMAT)
    logging.getLogger().addHandler(log_tail)
    return Executor(
        context,
        reporter,
        images,
        placement_writer,
        driver_set,
        allowed_acts=agent.allowed_acts,
        read_log=log_tail.read_text,
    )


async def _recover_and_serve(executor: Executor, reporter: InventoryReporter, link: GatewayLink) -> None:
    """Recover interrupted commands, then run the reporter and the executor.

    The order is a rule: recovery ends before the first report is made, so that this report shows its effects.
    """
    await executor.recover_after_restart()
    async with asyncio.TaskGroup() as group:
        group.create_task(reporter.run(link.offer_report))
        group.create_task(executor.run())


async def _forward_changes(change_watcher: ChangeWatcher, reporter: InventoryReporter) -> None:
    """Have the reporter ask drivers again each time the change watcher names them. Runs until it is cancelled."""
    while True:
        reporter.request_discovery(await change_watcher.wait_for_changes())


def _build_driver_set(
    settings: AgentSettings, node: str, driver_settings: Mapping[str, Any], desired_drivers: DesiredDrivers | None
) -> DriverSet:
    """Return the drivers of this host. Without `desired_drivers` only those run that its own configuration enables.

    Raises ConfigurationError when CYBORG_ENABLED_DRIVERS names a driver that is not installed.
    """
    installed_names = catalogue.list_driver_names()
    for name in settings.enabled_drivers:
        if name not in installed_names:
            raise ConfigurationError(
                f"CYBORG_ENABLED_DRIVERS: there is no driver {name!r}; known: {', '.join(installed_names)}"
            )
    for name in driver_settings.keys() - set(settings.enabled_drivers):
        log.warning("CYBORG_DRIVER_SETTINGS has a table for %s, which is not enabled", name)

    make_process = partial(_create_driver_process, settings, node)
    return DriverSet(settings.enabled_drivers, driver_settings, desired_drivers, make_process)


def _create_driver_process(
    settings: AgentSettings, node: str, name: str, own_settings: Mapping[str, object]
) -> DriverProcess:
    """Return a driver with these settings; its process is not started yet."""
    state_dir = _driver_state_dir(settings, name)
    return DriverProcess(name, node, own_settings, deadline_s=settings.driver_deadline_s, state=state_dir)


def _driver_state_dir(settings: AgentSettings, driver: str) -> str:
    """Return the path of the driver's own directory, which it sees as `/state`. The first write creates it."""
    return str(Path(settings.state_dir).absolute() / "drivers" / driver)


async def _close_drivers(drivers: Mapping[str, DriverProcess]) -> None:
    """End all driver processes at once; after STOP_TIMEOUT_S stop waiting for those that have not ended."""
    if not drivers:  # asyncio.wait refuses an empty list
        return
    closing = [asyncio.ensure_future(driver.close()) for driver in drivers.values()]
    done, late = await asyncio.wait(closing, timeout=STOP_TIMEOUT_S)
    for task in late:
        task.cancel()
    for task in done:
        task.result()


def build_hello(drivers: tuple[str, ...], placement_problem: str | None = None) -> wire.Hello:
    """Build the Hello message: release, boot id of the kernel ('' if it has none), running drivers, commands, and
    access to Placement.

    `placement_problem` is the reason why this host cannot write to Placement, '' when it can, None when this is not
    supported.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        log.debug("this kernel has no boot id: %s", error)
        boot_id = ""
    release = re.sub(r"[^A-Za-z0-9_.:-]", "-", metadata.version("cyborgweb"))[:64]
    return wire.Hello(
        agent_version=release, boot_id=boot_id, drivers=drivers, ops=SUPPORTED_OPS, writes=placement_problem
    )


def lock_state_dir(directory: Path) -> int:
    """Create the state directory, lock it for this process, and return the lock's file descriptor.

    The lock holds until the descriptor is closed. Raises ConfigurationError when the directory cannot be used, or when
    another agent has locked it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"CYBORG_AGENT_STATE_DIR={directory} cannot be used: {error.strerror}: {error.filename}"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigurationError(
            f"another agent already uses {directory}: stop it, or give this one its own CYBORG_AGENT_STATE_DIR"
        ) from None
    return descriptor


async def _open_journal_with_retry(directory: Path, host: str, stop: asyncio.Event) -> Journal | None:
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


def _choose_gateway(join: credentials.JoinData | None, known: KnownGateway) -> GatewayEndpoint | None:
    """Return the gateway of the join token, else the known one; None if there is neither.

    Announcements of certificates are those that the journal knows, also with a join token: the token may be older than
    they are. Their signatures are checked here.
    """
    if join is None and not known.address:
        return None
    key = (join.announcement_key if join else "") or known.announcement_key
    if join is None:
        gateway = GatewayEndpoint(known.address, known.fingerprint, announcement_key=key)
    else:
        gateway = GatewayEndpoint(join.address, join.fingerprint, join.secret, announcement_key=key)
    return gateway.add_announcements(known.announcements)


if __name__ == "__main__":
    sys.exit(main())
