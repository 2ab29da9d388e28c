"""The one thread that asks the database for all watchers: what moved, which of their rows differ, who may still look.

Called by `live.socket`. News are not waited for but read: generations (`accelerators.runtime.generations`) tell in one
statement, twice a second, whether anything was written, by whomever: nothing has to ring and nothing can be missed. It
bounds its work itself: after each piece it rests in proportion, and what changed meanwhile is told once, as it then is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import Error, InterfaceError, OperationalError, connection

from accelerators.runtime import metrics
from cyborgweb.live import session_permissions
from cyborgweb.live.list_snapshot import Cells, Shown, fingerprint

log = logging.getLogger(__name__)
_watching = metrics.gauge("cyborg_console_watchers", "Pages of the console that somebody looks at.")

ROWS_PER_LOOK = 15
"""So many changed rows are told to one page in one look, the others in the next ones."""
RENDERED_PER_LOOK = 300
MOST_ROWS = 1000
"""So many rows of one list are kept rendered at most."""
HINTS_PER_LOOK = 2
"""So many pages in all are told to fetch themselves anew: a thousand open ones make four requests a second."""
BEHIND_S = 5.0
"""A page that waits longer for its turn no longer calls itself live."""
BEAT_S = 8.0
CLOCK_CELLS_S = 10.0
"""Lists that no generation covers are rendered afresh so often, as some of their words depend on the time, …"""
NEW_S = 30.0
"""… and asked for new rows so often, unless something that is counted moved."""
SLOW_S = 10.0
"""Who has not taken in a message after this long is dropped."""
STATEMENT_MS = 5000

SIGNED_OUT, NOT_ALLOWED, MALFORMED, SLOW, LATER = 4401, 4403, 4400, 4408, 1013
"""Close codes; `live.js` knows them."""

GENERATIONS = """
SELECT collection, sum(value)::bigint, set_config('statement_timeout', %s, false) FROM generation GROUP BY collection
"""
UNCOUNTED = """
SELECT (SELECT concat(count(*), ' ', sum(attempts), ' ', max(id)) FROM accelerators_intent),
  (SELECT concat(count(*) FILTER (WHERE seen_at >= %s), ' ', count(*) FILTER (WHERE seen_at >= %s)) FROM agents_lease),
  (SELECT max(changed_at) FROM agents_agent)
"""
"""What pages show besides: intents, agents up and late, who came or went."""


Rendered = tuple[object, Cells, dict[str, int]]
"""A row's version, its cells, and what tells each of them from another content."""


GONE: Rendered = ("gone", {}, {})
NEVER: Rendered = (None, {}, {})


@dataclass(frozen=True)
class Pace:
    """Seconds between two looks (each tells a row once at most), two looks at who may watch, two hints to one page, and
    two looks at what no generation counts (leases, intents, users)."""

    look: float = 0.5
    rights: float = 2.0
    hint: float = 2.0
    clock: float = 2.0


@dataclass(eq=False)
class Watcher:
    """A page that somebody looks at. `post` hands a text to be sent, or a close code, to its socket from any thread."""

    session: str
    post: Callable[[str | int], None]
    user: Any = None
    rights: str = ""
    is_page: bool = False
    """It said what it shows, and that is no list."""
    shown: Shown | None = None
    seen: dict[Any, tuple[object, dict[str, int]]] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)
    mark: object = None
    """Where everything stood when it was last brought up to date."""
    live: bool = False
    told_live: bool = False
    say: dict[str, Any] = field(default_factory=dict)
    sending_since: float | None = None
    beat_at: float = 0.0
    hinted_at: float = 0.0
    waits_since: float | None = None
    new: int = 0
    new_mark: object = None
    new_at: float = 0.0


class Feed:
    """`enter`, `show` and `leave` are for the event loop; all else is the thread's, which starts with the first."""

    def __init__(self, pace: Pace = Pace()) -> None:
        self._pace = pace
        self._asked: queue.SimpleQueue[tuple[Callable[..., None], Any]] = queue.SimpleQueue()
        self._watchers: set[Watcher] = set()
        self._generations: dict[str, int] = {}
        self._uncounted: object = None
        self._rendered: dict[object, dict[Any, Rendered]] = {}
        self._outages = 0
        self._next = self._rights_at = self._uncounted_at = 0.0
        self._thread: threading.Thread | None = None
        self._stopping = False

    def enter(self, watcher: Watcher) -> None:
        """Find out who it is; closed with SIGNED_OUT if nobody who may enter the console."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="live", daemon=True)
            self._thread.start()
        self._asked.put((self._enter, (watcher,)))

    def show(self, watcher: Watcher, path: str, query: str, rows: list[str]) -> None:
        """From now on it looks at these rows of the list at `path`; without one, at a page that is no list."""
        self._asked.put((self._show, (watcher, path, query, rows)))

    def leave(self, watcher: Watcher) -> None:
        """It is gone."""
        self._asked.put((self._watchers.discard, (watcher,)))

    def stop(self) -> None:
        """End the thread and its connection (tests; a real process just ends)."""
        self._stopping = True
        self._asked.put((lambda: None, ()))
        if self._thread:
            self._thread.join(15)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._take()
                _watching.set(len(self._watchers))
                if self._watchers and time.monotonic() >= self._next:
                    took = _timed(self._look)
                    self._next = time.monotonic() + max(self._pace.look - took, 3 * took)
            except Exception as error:  # noqa: BLE001 without this thread every page would stand still
                self._next = time.monotonic() + self._pace.look
                self._lost(error)
        connection.close()

    def _take(self) -> None:
        """Do what is asked until the next look is due; with nobody there wait, without a connection."""
        if not self._watchers:
            connection.close()
        wait = max(0.0, self._next - time.monotonic()) if self._watchers else None
        with suppress(queue.Empty):
            act, arguments = self._asked.get(timeout=wait)
            time.sleep(min(0.5, _timed(lambda: act(*arguments))))

    def _enter(self, watcher: Watcher) -> None:
        try:
            self._read_generations()
            watcher.user = session_permissions.who(watcher.session)
            if watcher.user:
                watcher.rights = session_permissions.of([watcher.user.pk]).get(watcher.user.pk, "")
        except Exception as error:  # noqa: BLE001 it may come again
            log.warning("nobody can be let in: %s", type(error).__name__)
            watcher.post(LATER)
            return
        if watcher.rights:
            self._watchers.add(watcher)
        else:
            watcher.post(SIGNED_OUT)

    def _show(self, watcher: Watcher, path: str, query: str, rows: list[str]) -> None:
        if watcher not in self._watchers:
            return
        watcher.shown, watcher.mark, watcher.live, watcher.new, watcher.new_mark = None, None, False, 0, None
        watcher.say.clear()
        watcher.is_page = not path
        if watcher.is_page:
            return
        try:
            shown = Shown(path, query, watcher.user, session_permissions.session(watcher.session))
            keys = shown.keys(rows)
            watcher.shown, watcher.names = shown, {key: text for text, key in keys.items()}
            watcher.seen = {key: (None, {}) for key in keys.values()}
            stands = self._stands(shown, self._pace.clock)
            watcher.new_mark = self._stands(shown, NEW_S)
            self._bring([watcher], {watcher: stands}, RENDERED_PER_LOOK)
            if new := len(shown.first - watcher.seen.keys()):
                watcher.new = watcher.say["new"] = new
            self._tell(watcher)
        except PermissionDenied:
            watcher.post(NOT_ALLOWED)
        except Exception as error:  # noqa: BLE001 whatever a crafted or costly query does harms its own page alone
            log.info("a page cannot be followed: %s", type(error).__name__)
            watcher.post(MALFORMED if connection.is_usable() else LATER)

    def _look(self) -> None:
        """One look for all."""
        now = time.monotonic()
        try:
            self._read_generations()
            if now >= self._rights_at:
                self._check_rights()
                self._rights_at = now + self._pace.rights
            ready = [one for one in list(self._watchers) if not self._is_slow(one, now)]
            stands = {one: self._stands(one.shown, self._pace.clock) for one in ready if one.shown}
            alike = {one.shown.alike for one in self._watchers if one.shown}
            self._rendered = {
                key: rows for key, rows in self._rendered.items() if key in alike and len(rows) < MOST_ROWS
            }
            self._bring_all([one for one in stands if one.mark != stands[one]], stands)
            self._count_new([one for one in stands if one in self._watchers], now)
            self._hint([one for one in ready if one.is_page], now)
        except Exception as error:  # noqa: BLE001 all are told that nothing is known
            self._lost(error)
            ready = [one for one in self._watchers if one.sending_since is None]
        for watcher in self._watchers.intersection(ready):
            if watcher.say or watcher.live != watcher.told_live or (watcher.live and now >= watcher.beat_at):
                self._tell(watcher)

    def _read_generations(self) -> None:
        """The first statement of everything, so it bounds the following ones as well."""
        with connection.cursor() as cursor:
            cursor.execute(GENERATIONS, [str(STATEMENT_MS)])
            self._generations = {name: value for name, value, _ in cursor.fetchall()}

    def _lost(self, error: Exception) -> None:
        """The database does not answer, or worse: nobody is live, and afterwards everything is compared."""
        log.warning("live pages wait: %s", type(error).__name__, exc_info=None if isinstance(error, Error) else error)
        self._outages += 1
        for watcher in self._watchers:
            watcher.live = False
        connection.close()

    def _check_rights(self) -> None:
        """Whoever lost their session or any permission is sent away; who comes back is let in by what holds then."""
        sessions = session_permissions.alive({one.session for one in self._watchers})
        now = session_permissions.of({one.user.pk for one in self._watchers})
        for one in list(self._watchers):
            if one.session not in sessions or now.get(one.user.pk) != one.rights:
                self._watchers.discard(one)
                one.post(SIGNED_OUT)

    def _is_slow(self, watcher: Watcher, now: float) -> bool:
        since = watcher.sending_since
        if since is not None and now - since > SLOW_S:
            self._watchers.discard(watcher)
            watcher.post(SLOW)
        return since is not None

    def _stands(self, shown: Shown, clock_s: float) -> tuple[object, ...]:
        """Where everything stands that this list reads; what no generation counts may move with the clock."""
        counted = tuple(self._generations.get(name, 0) for name in sorted(shown.collections))
        return self._outages, counted, None if shown.counted else time.monotonic() // clock_s

    def _bring_all(self, watchers: list[Watcher], stands: dict[Watcher, tuple[object, ...]]) -> None:
        """List by list; who looks at one that fails hears LATER, the others go on."""
        by_list: dict[Any, list[Watcher]] = defaultdict(list)
        for watcher in watchers:
            if watcher.shown:
                by_list[watcher.shown.admin, watcher.shown.sees].append(watcher)
        budget = RENDERED_PER_LOOK
        for (admin, _), some in by_list.items():
            try:
                budget -= self._bring(some, stands, budget)
            except Exception as error:
                if isinstance(error, OperationalError | InterfaceError) or not connection.is_usable():
                    raise
                log.exception("the list of %s cannot be followed", admin.opts.label_lower)
                self._watchers.difference_update(some)
                for one in some:
                    one.post(LATER)

    def _bring(self, some: list[Watcher], stands: dict[Watcher, tuple[object, ...]], budget: int) -> int:
        """Compare what pages of one list show with the database, every row, and note what is to be told; returns how
        many rows were rendered."""
        shown, before = some[0].shown, budget
        assert shown
        versions: dict[Any, object] = dict(shown.versions({key for one in some for key in one.seen}))
        if not shown.counted:
            tick = time.monotonic() // CLOCK_CELLS_S
            versions = {key: (version, tick) for key, version in versions.items()}
        alike: dict[Any, list[tuple[Watcher, list[Any]]]] = defaultdict(list)
        for one in some:
            differ = [key for key, (version, _) in one.seen.items() if versions.get(key, "gone") != version]
            if one.live:
                one.mark = stands[one] if len(differ) <= ROWS_PER_LOOK else None
                differ = differ[:ROWS_PER_LOOK]
            assert one.shown
            alike[one.shown.alike].append((one, differ))
        for pairs in alike.values():
            budget -= self._render(pairs, versions, budget, stands)
        return before - budget

    def _render(
        self,
        pairs: list[tuple[Watcher, list[Any]]],
        versions: dict[Any, object],
        budget: int,
        stands: dict[Watcher, tuple[object, ...]],
    ) -> int:
        """Render what differs once for all who see it alike; returns how many rows. What is beyond it is for later."""
        shown = pairs[0][0].shown
        assert shown
        known = self._rendered.setdefault(shown.alike, {})
        served, wanted = [], set[Any]()
        for one, differ in pairs:
            more = {key for key in differ if key in versions and known.get(key, NEVER)[0] != versions[key]}
            if len(wanted | more) > budget:
                one.mark = None
                continue
            wanted |= more
            served.append((one, differ))
        for key, cells in (shown.cells(wanted) if wanted else {}).items():
            known[key] = versions[key], cells, {name: fingerprint(html) for name, html in cells.items()}
        for one, differ in served:
            for key in differ:
                _note(one, key, known.get(key, NEVER) if key in versions else GONE)
            if not one.live:
                one.mark, one.live = stands[one], True
        return len(wanted)

    def _count_new(self, watchers: list[Watcher], now: float) -> None:
        """How many rows each page would show now that it does not show. Costly queries are asked the less often."""
        pages: dict[object, set[Any]] = {}
        for one in watchers:
            stand = self._stands(one.shown, NEW_S) if one.shown and one.live and now >= one.new_at else one.new_mark
            if not one.shown or stand == one.new_mark:
                continue
            took = _timed(partial(self._read_page, one.shown, pages))
            one.new_mark = stand
            one.new_at = now + max(self._pace.clock, 20 * took)
            if (new := len(pages[one.shown.alike] - one.seen.keys())) != one.new:
                one.new = one.say["new"] = new

    @staticmethod
    def _read_page(shown: Shown, pages: dict[object, set[Any]]) -> None:
        if shown.alike in pages:
            return
        try:
            pages[shown.alike] = shown.page()
        except Exception:
            if not connection.is_usable():
                raise
            pages[shown.alike] = set()  # it took too long: nothing is known to be new

    def _hint(self, pages: list[Watcher], now: float) -> None:
        """Pages that are no lists fetch themselves anew when anything moved, the longest waiting first."""
        if pages and now >= self._uncounted_at:
            self._uncounted_at = now + self._pace.clock
            self._uncounted = session_permissions.facts(UNCOUNTED)
        stand = self._outages, tuple(sorted(self._generations.items())), self._uncounted
        waiting = []
        for one in pages:
            if one.mark != stand:
                one.waits_since = one.waits_since or now
                one.live = one.live and now - one.waits_since < BEHIND_S
                if now >= one.hinted_at + self._pace.hint:
                    waiting.append(one)
        for one in sorted(waiting, key=lambda one: one.waits_since or now)[:HINTS_PER_LOOK]:
            one.mark, one.live, one.hinted_at, one.waits_since = stand, True, now, None
            one.say["moved"] = True

    @staticmethod
    def _tell(watcher: Watcher) -> None:
        from msgspec import json

        watcher.sending_since = time.monotonic()
        watcher.beat_at = watcher.sending_since + BEAT_S
        watcher.told_live = watcher.live
        watcher.post(json.encode({"live": watcher.live} | watcher.say).decode())
        watcher.say = {}


def _note(one: Watcher, key: Any, now: Rendered) -> None:
    """What is to be told of this row, if its cells are others than those told last."""
    before = one.seen[key][1]
    version, cells, prints = now
    one.seen[key] = version, prints
    if now is GONE:
        one.say.setdefault("gone", []).append(one.names[key])
    elif changed := {name: html for name, html in cells.items() if before.get(name) != prints[name]}:
        one.say.setdefault("rows", {})[one.names[key]] = changed


def _timed(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began
