"""Brings commands to the agents that are connected here, the word that a command is settled, and who is the writer.

A thread of each gateway process, with its own database connection. What is to be told stands in the tables: the hub's
rings only wake it, and it looks every POLL_S whether one was lost. Its state is its own: others fill its queue.
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

from accelerators import database_outage
from accelerators.commands import placement_delegation, placing
from accelerators.commands.placing import Answer, Number, Progress
from accelerators.models import Host
from accelerators.runtime import pubsub
from agents import wire
from agents.gateway.sessions import Session
from agents.models import Agent

log = logging.getLogger(__name__)

POLL_S = 2.0
AGAIN_S = 5.0
"""What was told and not taken for so long is told again."""
RETRY_S = 1.0
BATCH = 500
MAX_OUTBOX = 4 * BATCH
"""Commands that wait for one slow socket; what is beyond is told again later."""
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
Said = tuple[int, int] | Progress | Answer
"""Of a command (the host's id, its number): it is in the agent's journal, or more."""


@dataclass(slots=True)
class _Line:
    """An agent that has said what it takes. `fresh`: it has not been told what it may have forgotten."""

    session: Session
    takes: bool
    release: str
    writes: bool = False
    epoch: int = -1
    """The writer's that it was told, where it can write."""
    fresh: bool = True
    told: dict[int, float] = field(default_factory=dict)


def keep(said: Sequence[Said]) -> set[Number]:
    """Store what agents say, all at once; returns the commands that are settled."""
    if taken := [one for one in said if type(one) is tuple]:
        placing.taken(taken)
    if progress := [one for one in said if isinstance(one, Progress)]:
        placing.progressed(progress)
    answers = [one for one in said if isinstance(one, Answer)]
    return placing.answer(answers) if answers else set()


def reach(host: Host) -> str:
    """Why the agent of a host takes no commands; '' as far as is known it does."""
    agent = Agent.objects.filter(host=host).values_list("ops", "version").first()
    return _deaf(host.name, agent[1]) if agent and agent[0] == "" else ""


def _deaf(host: str, release: str) -> str:
    return f"the agent of {host} (release {release or 'unknown'}) takes no commands: update it"


class Courier(threading.Thread):
    """`hello`, `gone` and `unsettled` are called on the event loop, where the sockets are."""

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
        """An agent is there, and takes these commands; starts the thread at the first one."""
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
        """Its connection has ended."""
        self._news.put(partial(self._leave, session))

    def unsettled(self, session: Session, number: int) -> None:
        """Its agent has answered, and is to be told when the command is settled."""
        self._news.put(partial(self._await, session, (session.identity.host_id, number)))

    def stop(self) -> None:
        """End the thread and close its connection (tests; a real process just ends)."""
        self._stopping = True
        self._news.put(lambda: None)
        if self.is_alive():
            self.join(15)

    def run(self) -> None:
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
        """The hub: there is something for a host, or who knows for which."""
        if not self._stopping:
            self._news.put(partial(self._wake, int(detail) if detail else None))

    def _changed(self, _detail: str | None) -> None:
        if self._unsettled and not self._stopping:
            self._news.put(self._settled)

    def _switched(self, _detail: str | None) -> None:
        """The hub: there may be another writer."""
        if not self._stopping:
            self._news.put(self._wake_all)

    def _wake_all(self) -> None:
        self._polled = 0.0

    def _enter(self, session: Session, line: _Line) -> None:
        self._lines[session.identity.host_id] = line
        self._due.add(session.identity.host_id)

    def _leave(self, session: Session) -> None:
        host = session.identity.host_id
        if (line := self._lines.get(host)) and line.session is session:
            del self._lines[host]
        self._unsettled = {number: other for number, other in self._unsettled.items() if other is not session}

    def _await(self, session: Session, number: Number) -> None:
        self._unsettled[number] = session
        self._moved = True

    def _wake(self, host: int | None) -> None:
        self._due |= self._lines.keys() if host is None else {host} & self._lines.keys()

    def _settled(self) -> None:
        self._moved = True

    def _hear(self) -> None:
        """Wait until there is news, or it is time to look; take all news there are."""
        try:
            if not self._due:
                self._news.get(timeout=max(0.0, self._polled + POLL_S - time.monotonic()))()
            while True:
                self._news.get_nowait()()
        except queue.Empty:
            pass

    def _look(self) -> None:
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
        """What these hosts are to be told; True when there may be more."""
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
        settled = self._unsettled.keys() - placing.still_open(self._unsettled)
        for number in settled:
            posts.append((self._unsettled.pop(number), [wire.encode(wire.Ack(number[1], "Result"))]))

    def _tell_writer(self) -> None:
        """At once, past whatever waits for a slow socket: an agent goes by the highest epoch it has heard."""
        epoch = placement_delegation.epoch()
        told = [line for line in self._lines.values() if line.writes and line.epoch != epoch]
        for line in told:
            line.epoch = epoch
        if told and self._loop and not self._loop.is_closed():
            text = wire.encode(wire.Writer(epoch))
            self._loop.call_soon_threadsafe(lambda: [self._start(_tell(line.session, text)) for line in told])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _post(self, posts: Iterable[tuple[Session, list[str]]]) -> None:
        """On the event loop: each socket at its own pace, in order."""
        for session, texts in posts:
            begun = bool(session.outbox)
            session.outbox += texts[: MAX_OUTBOX - len(session.outbox)]
            if not begun:
                self._start(_send(session))


async def _send(session: Session) -> None:
    try:
        while session.outbox:
            await session.send({"type": "websocket.send", "text": session.outbox[0]})
            del session.outbox[0]
    except (RuntimeError, OSError) as error:
        session.outbox.clear()
        log.debug("%s was gone before it was told: %s", session.identity.host, error)


async def _tell(session: Session, text: str) -> None:
    try:
        await session.send({"type": "websocket.send", "text": text})
    except (RuntimeError, OSError) as error:
        log.debug("%s was gone before it was told who writes: %s", session.identity.host, error)


def _frame(id: int, uuid: str, op: str, arguments: str, start_s: float, end_s: float) -> str:
    values: dict[str, Any] = msgspec.json.decode(arguments)
    values.pop("wanted", None)
    values |= {"number": id, "id": uuid, "op": op, "start_s": max(0.0, start_s), "end_s": max(0.0, end_s)}
    return wire.encode(msgspec.convert(values, wire.Command))
