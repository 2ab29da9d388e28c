"""Send commands, acknowledgements of results and the Placement writer's epoch to the agents connected here.

`CommandDispatcher` is a thread of each gateway process, with its own database connection. The tables hold what is to be
sent: notifications only wake the thread, and it polls every POLL_S in case one was lost. Only this thread changes its
state; other threads put functions into its queue.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import psycopg
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from accelerators.commands import command_queue, placement_delegation
from accelerators.commands.command_queue import CommandAnswer, CommandId, CommandProgress, Obstacle
from accelerators.models import Host
from accelerators.runtime import database_outage, pubsub
from agents import liveness, wire
from agents.gateway.row_locks import limiting_lock_waits, suppressing_lock_timeouts
from agents.gateway.sessions import AgentSession
from agents.models import Agent

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two polls of the tables without a notification."""
RESEND_S = 5.0
"""Seconds after which a command is sent again that the agent has not confirmed with Taken."""
ERROR_PAUSE_S = 1.0
"""Seconds to wait after a database error."""
MAX_COMMANDS_PER_QUERY = 500
"""Maximum number of commands that one query reads."""
MAX_OUTBOX = 4 * MAX_COMMANDS_PER_QUERY
"""Maximum number of messages that wait for one slow socket. Commands beyond it are sent again after RESEND_S."""
SELECT_UNSENT_COMMANDS = """
SELECT c.id, c.host_id, c.uuid::text, c.op, c.arguments::text,
  extract(epoch FROM c.start_by - statement_timestamp())::float8,
  extract(epoch FROM c.end_by - statement_timestamp())::float8
FROM accelerators_command c
WHERE c.ended_at IS NULL AND c.answered_at IS NULL AND c.host_id = ANY(%(hosts)s::bigint[])
  AND NOT c.id = ANY(%(told)s::bigint[])
  AND (c.state = 'queued' AND c.start_by > statement_timestamp()
    OR c.state IN ('taken', 'started') AND c.host_id = ANY(%(fresh)s::bigint[]))
ORDER BY c.id LIMIT %(count)s::bigint
"""
"""Commands to send to `hosts`: queued ones that may still start, and for `fresh` hosts also those taken or started.

Plain SQL, because it is measured: `make bench`, the rows of the time until an agent has its command.
"""
CommandMessage = tuple[int, int] | CommandProgress | CommandAnswer
"""One message of an agent about a command. A pair (host id, command number) means: it is in the agent's journal."""


@dataclass(slots=True)
class _DispatchState:
    """A connected agent that has sent Hello.

    `release`: its version. `knows_writes`: its release supports delegated Placement writes. `is_new`: the open commands
    that it took or started earlier were not sent on this connection yet; it may have lost them. `sent_at`: when
    (monotonic) each command was sent.
    """

    session: AgentSession
    accepts_commands: bool
    release: str
    knows_writes: bool = False
    sent_epoch: int = -1
    """The Placement writer's epoch that was last sent to this agent; -1 before the first."""
    is_new: bool = True
    sent_at: dict[int, float] = field(default_factory=dict)


def store_messages(messages: Sequence[CommandMessage]) -> set[CommandId]:
    """Store what agents sent about commands, together; return the commands that are settled.

    A settled command needs nothing more, so its Result can be acknowledged; only a CommandAnswer can settle it. Raise
    database errors.
    """
    if taken := [one for one in messages if not isinstance(one, (CommandProgress, CommandAnswer))]:
        command_queue.mark_commands_taken(taken)
    if progress := [one for one in messages if isinstance(one, CommandProgress)]:
        command_queue.store_progress(progress)
    answers = [message for message in messages if isinstance(message, CommandAnswer)]
    return command_queue.store_answers(answers) if answers else set()


def find_agent_obstacles(hosts: Collection[Host]) -> dict[int, Obstacle]:
    """Return, by host id, why the agents of these hosts accept no commands; hosts without an obstacle are left out.

    That an agent is too old, down or barred, that none has joined, or that the host is being removed, is an obstacle.
    Costs one query.
    """
    agents = Agent.objects.filter(host__in=hosts).order_by().select_related("host__lease")
    agent_by_host = {agent.host_id: agent for agent in agents}
    obstacles = {host.pk: _find_obstacle(host, agent_by_host.get(host.pk)) for host in hosts}
    return {pk: obstacle for pk, obstacle in obstacles.items() if obstacle}


def _find_obstacle(host: Host, agent: Agent | None) -> Obstacle | None:
    """Return why the agent of `host` accepts no commands, None if it does. `agent` is None if none has joined.

    An update is advised only if it can help: not for an agent that is barred, or whose host is being removed.
    """
    absence = liveness.explain_absence(host, agent)
    if agent is not None and agent.ops == "" and (absence is None or absence.may_wait):
        return _refuse_commands(host.name, agent.version)
    return absence


def _refuse_commands(host: str, release: str) -> Obstacle:
    """Return the Obstacle which says that the agent of `host`, of this release, accepts no commands."""
    predicate = f"(release {release or 'unknown'}) accepts no commands: update it"
    return Obstacle(f"the agent of {host} {predicate}", f"its agent {predicate}")


class CommandDispatcher(threading.Thread):
    """The thread that reads from the database what is to be sent to agents, and hands it to the event loop.

    That is commands, Acks of results, and the Placement writer's epoch. Call `add_agent`, `remove_agent` and
    `watch_result` on the event loop, where the sockets are; they only put work into a queue. The first `add_agent`
    starts the thread: do not call `start`. After a database error the thread closes its connection, waits ERROR_PAUSE_S
    seconds and continues. It is a daemon thread, so it needs no `stop` when the process ends.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="courier")
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._states: dict[int, _DispatchState] = {}
        self._due_hosts: set[int] = set()
        self._unsettled_results: dict[CommandId, AgentSession] = {}
        self._should_check_settled = False
        self._polled_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def add_agent(self, session: AgentSession, said: wire.Hello) -> None:
        """Add an agent that has sent Hello; its open commands are sent soon. The first call starts the thread."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            pubsub.subscribe(command_queue.COMMANDS_TOPIC, self._on_new_commands)
            pubsub.subscribe(command_queue.COMMAND_CHANGED_TOPIC, self._on_changed_commands)
            pubsub.subscribe(placement_delegation.WRITER_TOPIC, self._on_writer_change)
            self.start()
            pubsub.start_listener()
        self._calls.put(
            partial(
                self._register_agent,
                session,
                _DispatchState(session, bool(said.ops), said.agent_version, said.writes is not None),
            )
        )

    def remove_agent(self, session: AgentSession) -> None:
        """Remove an agent whose connection has ended; its results are no longer watched. A newer connection of its host
        stays."""
        self._calls.put(partial(self._unregister_agent, session))

    def watch_result(self, session: AgentSession, number: int) -> None:
        """Watch an answered command, and send the Ack of its Result when it is settled."""
        self._calls.put(partial(self._register_result, session, (session.identity.host_id, number)))

    def stop(self) -> None:
        """End the thread and close its database connection. Wait up to 15 s. Only tests need this: a real process just
        ends."""
        self._stopping = True
        self._calls.put(lambda: None)
        if self.is_alive():
            self.join(15)

    def run(self) -> None:
        """Wait for queued calls, then poll the tables, until `stop`. Waits ERROR_PAUSE_S seconds after a database
        error."""
        with limiting_lock_waits():
            while not self._stopping:
                self._run_queued_calls()
                try:
                    self._poll_tables()
                except (DatabaseError, InterfaceError, psycopg.Error) as error:
                    database_outage.log_outage(error)
                    connection.close()
                    time.sleep(ERROR_PAUSE_S)
        connection.close()

    def _on_new_commands(self, detail: str | None) -> None:
        """Handle a notification that there are commands for one host, or, without a detail, for any host."""
        if not self._stopping:
            self._calls.put(partial(self._mark_hosts_due, int(detail) if detail else None))

    def _on_changed_commands(self, _detail: str | None) -> None:
        """Handle a notification that commands have changed: watched ones may be settled."""
        if self._unsettled_results and not self._stopping:
            self._calls.put(self._schedule_settled_check)

    def _on_writer_change(self, _detail: str | None) -> None:
        """Handle a notification that the Placement writer may have changed: make the next poll a complete one."""
        if not self._stopping:
            self._calls.put(self._schedule_full_poll)

    def _schedule_full_poll(self) -> None:
        """Make the next poll a complete one, as if POLL_S had passed."""
        self._polled_at = 0.0

    def _register_agent(self, session: AgentSession, state: _DispatchState) -> None:
        """Add an agent, instead of an older connection of its host, and read its commands in the next poll. See
        `add_agent`."""
        self._states[session.identity.host_id] = state
        self._due_hosts.add(session.identity.host_id)

    def _unregister_agent(self, session: AgentSession) -> None:
        """Remove a session, and stop watching its answered commands. See `remove_agent`."""
        host = session.identity.host_id
        if (state := self._states.get(host)) and state.session is session:
            del self._states[host]
        self._unsettled_results = {
            number: other for number, other in self._unsettled_results.items() if other is not session
        }

    def _register_result(self, session: AgentSession, number: CommandId) -> None:
        """Watch an answered command, and check it in the next poll. See `watch_result`."""
        self._unsettled_results[number] = session
        self._should_check_settled = True

    def _mark_hosts_due(self, host: int | None) -> None:
        """Read the commands of one host in the next poll, or of all hosts connected here if it is None; ignore other
        hosts."""
        self._due_hosts |= self._states.keys() if host is None else {host} & self._states.keys()

    def _schedule_settled_check(self) -> None:
        """Check the watched commands in the next poll."""
        self._should_check_settled = True

    def _run_queued_calls(self) -> None:
        """Wait for queued functions or the next poll, then run all that are queued."""
        try:
            if not self._due_hosts:
                self._calls.get(timeout=max(0.0, self._polled_at + POLL_S - time.monotonic()))()
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            pass

    def _poll_tables(self) -> None:
        """Read what is to be sent, and hand it to the event loop. Raise database errors.

        Read commands for hosts that are due (all of them every POLL_S), settled commands whose Ack is awaited, and the
        writer's epoch.
        """
        now = time.monotonic()
        is_full_poll = now - self._polled_at >= POLL_S
        if is_full_poll:
            self._polled_at, self._should_check_settled = now, True
            self._due_hosts |= self._states.keys()
            close_old_connections()
        outgoing: list[tuple[AgentSession, list[str]]] = []
        if hosts := self._due_hosts & self._states.keys():
            has_more = self._collect_commands(hosts, now, outgoing)
            self._due_hosts = hosts if has_more else set()
        if self._should_check_settled and self._unsettled_results:
            self._collect_acknowledgements(outgoing)
        self._should_check_settled = False
        if any(state.knows_writes and (is_full_poll or state.sent_epoch < 0) for state in self._states.values()):
            self._broadcast_writer_epoch()
        if outgoing and self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._enqueue_messages, outgoing)

    def _collect_commands(self, hosts: set[int], now: float, outgoing: list[tuple[AgentSession, list[str]]]) -> bool:
        """Append to `outgoing` the commands that these hosts are to be sent, and note that they were sent at `now`.

        Return True if there may be more. Costs one query. The commands of agents that accept none are refused in the
        database instead.
        """
        states = {host: self._states[host] for host in hosts}
        for state in states.values():
            state.sent_at = {number: at for number, at in state.sent_at.items() if now - at < RESEND_S}
        sent = [number for line in states.values() for number in line.sent_at]
        new_hosts = [host for host, line in states.items() if line.is_new]
        with connection.cursor() as cursor:
            cursor.execute(
                SELECT_UNSENT_COMMANDS,
                {"hosts": [*hosts], "told": sent, "fresh": new_hosts, "count": MAX_COMMANDS_PER_QUERY},
            )
            rows = cursor.fetchall()
        rows_by_host: dict[int, list[tuple[Any, ...]]] = {}
        for id, host, *row in rows:
            rows_by_host.setdefault(host, []).append((id, *row))
        for host, unsent in rows_by_host.items():
            state = states[host]
            if state.accepts_commands:
                state.sent_at |= dict.fromkeys((id for id, *_ in unsent), now)
                outgoing.append((state.session, [_encode_command(*row) for row in unsent]))
            else:
                reason = _refuse_commands(state.session.identity.host, state.release).text
                with suppressing_lock_timeouts():  # they are found again by the next poll
                    command_queue.refuse_undelivered_commands([id for id, *_ in unsent], reason)
        if len(rows) == MAX_COMMANDS_PER_QUERY:
            return True
        for state in states.values():
            state.is_new = False
        return False

    def _collect_acknowledgements(self, outgoing: list[tuple[AgentSession, list[str]]]) -> None:
        """Append to `outgoing` an Ack for each watched command that is settled, and stop watching it. Costs one
        query."""
        settled = self._unsettled_results.keys() - command_queue.select_open_commands(self._unsettled_results)
        for number in settled:
            outgoing.append((self._unsettled_results.pop(number), [wire.encode_message(wire.Ack(number[1], "Result"))]))

    def _broadcast_writer_epoch(self) -> None:
        """Send the Placement writer's epoch to each agent that knows delegated writes and was not sent this epoch yet.

        These messages do not wait in the session's outbox behind commands: the agent obeys the highest epoch it has
        received, so the order does not matter.
        """
        epoch = placement_delegation.WRITER_EPOCH.only()()
        outdated = [line for line in self._states.values() if line.knows_writes and line.sent_epoch != epoch]
        for state in outdated:
            state.sent_epoch = epoch
        if outdated and self._loop and not self._loop.is_closed():
            text = wire.encode_message(wire.Writer(epoch))

            def send_to_outdated() -> None:
                """Start one task for each outdated agent, so that a slow socket does not delay the others. Call it on
                the event loop only."""
                for line in outdated:
                    self._start_task(_send_past_outbox(line.session, text))

            self._loop.call_soon_threadsafe(send_to_outdated)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, and keep a reference to it until it is done. Call it on the event loop only."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _enqueue_messages(self, outgoing: Iterable[tuple[AgentSession, list[str]]]) -> None:
        """Add messages to the outboxes of their sessions, and start a sender where none runs. Call it on the event loop
        only.

        Each socket is served at its own pace and in order. Messages beyond MAX_OUTBOX are dropped: commands are sent
        again later, and an agent whose Ack was dropped repeats its Result after a reconnection.
        """
        for session, texts in outgoing:
            is_sending = bool(session.outbox)
            session.outbox += texts[: MAX_OUTBOX - len(session.outbox)]
            if not is_sending:
                self._start_task(_drain_outbox(session))


async def _drain_outbox(session: AgentSession) -> None:
    """Send what is in the session's outbox until it is empty; empty it if the connection is gone."""
    try:
        while session.outbox:
            await session.send({"type": "websocket.send", "text": session.outbox[0]})
            del session.outbox[0]
    except (RuntimeError, OSError) as error:
        session.outbox.clear()
        log.debug("%s disconnected before a message could be sent: %s", session.identity.host, error)


async def _send_past_outbox(session: AgentSession, text: str) -> None:
    """Send one text at once, without the session's outbox. If the connection is gone, this is only logged."""
    try:
        await session.send({"type": "websocket.send", "text": text})
    except (RuntimeError, OSError) as error:
        log.debug("%s disconnected before the writer's epoch could be sent: %s", session.identity.host, error)


def _encode_command(id: int, uuid: str, op: str, arguments: str, start_s: float, end_s: float) -> str:
    """Encode a row of SELECT_UNSENT_COMMANDS as a Command message.

    `arguments` is JSON with the command's other fields. `start_s` and `end_s` are the seconds left; negative ones
    become 0.
    """
    values: dict[str, Any] = msgspec.json.decode(arguments)
    values.pop("wanted", None)
    values |= {"number": id, "id": uuid, "op": op, "start_s": max(0.0, start_s), "end_s": max(0.0, end_s)}
    return wire.encode_message(msgspec.convert(values, wire.Command))
