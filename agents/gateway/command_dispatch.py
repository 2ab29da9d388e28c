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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import psycopg
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from accelerators.commands import placement_delegation, placing
from accelerators.commands.placing import Answer, Number, Progress
from accelerators.models import Host
from accelerators.runtime import database_outage, pubsub
from agents import wire
from agents.gateway.sessions import Session
from agents.models import Agent

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two polls of the tables without a notification."""
AGAIN_S = 5.0
"""Seconds after which a command is sent again that the agent has not confirmed with Taken."""
RETRY_S = 1.0
"""Seconds to wait after a database error."""
BATCH = 500
"""Maximum number of commands that one query reads."""
MAX_OUTBOX = 4 * BATCH
"""Maximum number of messages that wait for one slow socket. Commands beyond it are sent again after RESEND_S."""
UNTOLD = """
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
"""Commands to send to `hosts`: queued ones that may still start, and for `fresh` hosts also those taken or started."""
Said = tuple[int, int] | Progress | Answer
"""One message of an agent about a command. A pair (host id, command number) means: it is in the agent's journal."""


@dataclass(slots=True)
class _Line:
    """A connected agent that has sent Hello.

    `release`: its version. `knows_writes`: its release supports delegated Placement writes. `is_new`: the open commands
    that it took or started earlier were not sent on this connection yet; it may have lost them. `sent_at`: when
    (monotonic) each command was sent.
    """

    session: Session
    takes: bool
    release: str
    writes: bool = False
    epoch: int = -1
    """The Placement writer's epoch that was last sent to this agent; -1 before the first."""
    fresh: bool = True
    told: dict[int, float] = field(default_factory=dict)


def keep(said: Sequence[Said]) -> set[Number]:
    """Store what agents sent about commands, together; return the commands that are settled.

    Only an Answer can settle a command. Raise database errors.
    """
    if taken := [one for one in said if type(one) is tuple]:
        placing.taken(taken)
    if progress := [one for one in said if isinstance(one, Progress)]:
        placing.progressed(progress)
    answers = [one for one in said if isinstance(one, Answer)]
    return placing.answer(answers) if answers else set()


def reach(host: Host) -> str:
    """Return why the agent of a host accepts no commands, '' if it does or if nothing is known. One query."""
    agent = Agent.objects.filter(host=host).values_list("ops", "version").first()
    return _deaf(host.name, agent[1]) if agent and agent[0] == "" else ""


def _deaf(host: str, release: str) -> str:
    """Return the sentence for an agent that accepts no commands."""
    return f"the agent of {host} (release {release or 'unknown'}) accepts no commands: update it"


class Courier(threading.Thread):
    """The thread that reads what is to be sent, and hands it to the event loop.

    Call `add_agent`, `remove_agent` and `watch_result` on the event loop, where the sockets are.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="courier")
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._lines: dict[int, _Line] = {}
        self._due: set[int] = set()
        self._unsettled: dict[Number, Session] = {}
        self._moved = False
        self._polled = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def hello(self, session: Session, said: wire.Hello) -> None:
        """Add an agent that has sent Hello; its open commands are sent soon. The first call starts the thread."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            pubsub.subscribe(placing.TOPIC, self._rung)
            pubsub.subscribe(placing.CHANGED, self._changed)
            pubsub.subscribe(placement_delegation.TOPIC, self._switched)
            self.start()
            pubsub.listen()
        self._news.put(
            partial(self._enter, session, _Line(session, bool(said.ops), said.agent_version, said.writes is not None))
        )

    def gone(self, session: Session) -> None:
        """Remove an agent whose connection has ended."""
        self._news.put(partial(self._leave, session))

    def unsettled(self, session: Session, number: int) -> None:
        """Watch an answered command, and send the Ack of its Result when it is settled."""
        self._news.put(partial(self._await, session, (session.identity.host_id, number)))

    def stop(self) -> None:
        """End the thread and close its database connection. Only tests need this: a real process just ends."""
        self._stopping = True
        self._news.put(lambda: None)
        if self.is_alive():
            self.join(15)

    def run(self) -> None:
        """Wait for queued calls, then poll the tables, until `stop`. Wait ERROR_PAUSE_S after a database error."""
        while not self._stopping:
            self._hear()
            try:
                self._look()
            except (DatabaseError, InterfaceError, psycopg.Error) as error:
                database_outage.log_outage(error)
                connection.close()
                time.sleep(RETRY_S)
        connection.close()

    def _rung(self, detail: str | None) -> None:
        """Handle a notification that there are commands for one host, or, without a detail, for any host."""
        if not self._stopping:
            self._news.put(partial(self._wake, int(detail) if detail else None))

    def _changed(self, _detail: str | None) -> None:
        """Handle a notification that commands have changed: watched ones may be settled."""
        if self._unsettled and not self._stopping:
            self._news.put(self._settled)

    def _switched(self, _detail: str | None) -> None:
        """Handle a notification that the Placement writer may have changed."""
        if not self._stopping:
            self._news.put(self._wake_all)

    def _wake_all(self) -> None:
        """Make the next poll a complete one, as if POLL_S had passed."""
        self._polled = 0.0

    def _enter(self, session: Session, line: _Line) -> None:
        """Add an agent, instead of an older connection of its host, and read its commands in the next poll. See
        `add_agent`."""
        self._lines[session.identity.host_id] = line
        self._due.add(session.identity.host_id)

    def _leave(self, session: Session) -> None:
        """Remove a session, and stop watching its answered commands. See `remove_agent`."""
        host = session.identity.host_id
        if (line := self._lines.get(host)) and line.session is session:
            del self._lines[host]
        self._unsettled = {number: other for number, other in self._unsettled.items() if other is not session}

    def _await(self, session: Session, number: Number) -> None:
        """Watch an answered command, and check it in the next poll. See `watch_result`."""
        self._unsettled[number] = session
        self._moved = True

    def _wake(self, host: int | None) -> None:
        """Read the commands of one host, or of all hosts connected here, in the next poll."""
        self._due |= self._lines.keys() if host is None else {host} & self._lines.keys()

    def _settled(self) -> None:
        """Check the watched commands in the next poll."""
        self._moved = True

    def _hear(self) -> None:
        """Wait for queued functions or the next poll, then run all that are queued."""
        try:
            if not self._due:
                self._news.get(timeout=max(0.0, self._polled + POLL_S - time.monotonic()))()
            while True:
                self._news.get_nowait()()
        except queue.Empty:
            pass

    def _look(self) -> None:
        """Read what is to be sent, and hand it to the event loop. Raise database errors.

        Read commands for hosts that are due (all of them every POLL_S), settled commands whose Ack is awaited, and the
        writer's epoch.
        """
        now = time.monotonic()
        polls = now - self._polled >= POLL_S
        if polls:
            self._polled, self._moved = now, True
            self._due |= self._lines.keys()
            close_old_connections()
        posts: list[tuple[Session, list[str]]] = []
        if hosts := self._due & self._lines.keys():
            more = self._commands(hosts, now, posts)
            self._due = hosts if more else set()
        if self._moved and self._unsettled:
            self._acknowledge(posts)
        self._moved = False
        if any(line.writes and (polls or line.epoch < 0) for line in self._lines.values()):
            self._tell_writer()
        if posts and self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._post, posts)

    def _commands(self, hosts: set[int], now: float, posts: list[tuple[Session, list[str]]]) -> bool:
        """Append the commands that these hosts are to be sent; return True if there may be more. One query.

        The commands of agents that accept none are refused in the database.
        """
        lines = {host: self._lines[host] for host in hosts}
        for line in lines.values():
            line.told = {number: at for number, at in line.told.items() if now - at < AGAIN_S}
        told = [number for line in lines.values() for number in line.told]
        fresh = [host for host, line in lines.items() if line.fresh]
        with connection.cursor() as cursor:
            cursor.execute(UNTOLD, {"hosts": [*hosts], "told": told, "fresh": fresh, "count": BATCH})
            rows = cursor.fetchall()
        found: dict[int, list[tuple[Any, ...]]] = {}
        for id, host, *row in rows:
            found.setdefault(host, []).append((id, *row))
        for host, untold in found.items():
            line = lines[host]
            if line.takes:
                line.told |= dict.fromkeys((id for id, *_ in untold), now)
                posts.append((line.session, [_frame(*row) for row in untold]))
            else:
                placing.refuse([id for id, *_ in untold], _deaf(line.session.identity.host, line.release))
        if len(rows) == BATCH:
            return True
        for line in lines.values():
            line.fresh = False
        return False

    def _acknowledge(self, posts: list[tuple[Session, list[str]]]) -> None:
        """Append an Ack for each watched command that is settled, and stop watching it. One query."""
        settled = self._unsettled.keys() - placing.still_open(self._unsettled)
        for number in settled:
            posts.append((self._unsettled.pop(number), [wire.encode(wire.Ack(number[1], "Result"))]))

    def _tell_writer(self) -> None:
        """Send the Placement writer's epoch to each agent that knows delegated writes and was not sent this epoch yet.

        These messages do not wait in the session's outbox behind commands: the agent obeys the highest epoch it has
        received, so the order does not matter.
        """
        epoch = placement_delegation.epoch()
        told = [line for line in self._lines.values() if line.writes and line.epoch != epoch]
        for line in told:
            line.epoch = epoch
        if told and self._loop and not self._loop.is_closed():
            text = wire.encode(wire.Writer(epoch))
            self._loop.call_soon_threadsafe(lambda: [self._start(_tell(line.session, text)) for line in told])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, and keep a reference to it until it is done. On the event loop only."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _post(self, posts: Iterable[tuple[Session, list[str]]]) -> None:
        """Add messages to the outboxes of their sessions, and start a sender where none runs. On the event loop only.

        Each socket is served at its own pace and in order. Messages beyond MAX_OUTBOX are dropped: commands are sent
        again later, and an agent whose Ack was dropped repeats its Result after a reconnection.
        """
        for session, texts in posts:
            begun = bool(session.outbox)
            session.outbox += texts[: MAX_OUTBOX - len(session.outbox)]
            if not begun:
                self._start(_send(session))


async def _send(session: Session) -> None:
    """Send what is in the session's outbox until it is empty; empty it if the connection is gone."""
    try:
        while session.outbox:
            await session.send({"type": "websocket.send", "text": session.outbox[0]})
            del session.outbox[0]
    except (RuntimeError, OSError) as error:
        session.outbox.clear()
        log.debug("%s disconnected before a message could be sent: %s", session.identity.host, error)


async def _tell(session: Session, text: str) -> None:
    """Send one text past the session's outbox; a connection that is gone is only logged."""
    try:
        await session.send({"type": "websocket.send", "text": text})
    except (RuntimeError, OSError) as error:
        log.debug("%s disconnected before the writer's epoch could be sent: %s", session.identity.host, error)


def _frame(id: int, uuid: str, op: str, arguments: str, start_s: float, end_s: float) -> str:
    """Encode a row of SELECT_UNSENT_COMMANDS as a Command message."""
    values: dict[str, Any] = msgspec.json.decode(arguments)
    values.pop("wanted", None)
    values |= {"number": id, "id": uuid, "op": op, "start_s": max(0.0, start_s), "end_s": max(0.0, end_s)}
    return wire.encode(msgspec.convert(values, wire.Command))
