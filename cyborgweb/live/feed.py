"""One thread that queries the database for all open console pages: what changed, which of their rows differ, and who
may still watch.

Changes are polled, not notified: twice a second one statement reads the generations
(`accelerators.runtime.generations`), which count all writes by any process, so no change can be missed. The thread
limits its own load: after each look it rests for at least three times as long as the look took. Rows that changed
several times meanwhile are sent once, in their latest form.
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
_watching = metrics.gauge("cyborg_console_watchers", "Console pages that are open in a browser.")

ROWS_PER_LOOK = 15
"""Changed rows sent to one page per look; the others follow in the next looks."""
RENDERED_PER_LOOK = 300
MOST_ROWS = 1000
"""Rendered rows kept in memory per list; a list that reaches this number is rendered again."""
HINTS_PER_LOOK = 2
"""Pages per look, of all, that are told to reload themselves: with a thousand open pages this makes four requests a
second.
"""
BEHIND_S = 5.0
"""Seconds after which a page that still waits for its reload is no longer shown as live."""
BEAT_S = 8.0
CLOCK_CELLS_S = 10.0
"""Seconds between two renderings of lists that read tables without a generation, because some of their text depends
on the time.
"""
NEW_S = 30.0
"""Seconds between two searches for new rows in such lists, unless a counted table changed."""
SLOW_S = 10.0
"""Seconds after which a page that has not accepted a message is disconnected."""
STATEMENT_MS = 5000

SIGNED_OUT, NOT_ALLOWED, MALFORMED, SLOW, LATER = 4401, 4403, 4400, 4408, 1013
"""WebSocket close codes, also used by `live.js`."""

GENERATIONS = """
SELECT collection, sum(value)::bigint, set_config('statement_timeout', %s, false) FROM generation GROUP BY collection
"""
UNCOUNTED = """
SELECT (SELECT concat(count(*), ' ', sum(attempts), ' ', max(id)) FROM accelerators_intent),
  (SELECT concat(count(*) FILTER (WHERE seen_at >= %s), ' ', count(*) FILTER (WHERE seen_at >= %s)) FROM agents_lease),
  (SELECT max(changed_at) FROM agents_agent)
"""
"""Facts that no generation counts but pages show: intents, agents that are up or late, agents that changed."""


Rendered = tuple[object, Cells, dict[str, int]]
"""A row's version, its cells, and a fingerprint of each cell."""


GONE: Rendered = ("gone", {}, {})
NEVER: Rendered = (None, {}, {})


@dataclass(frozen=True)
class Pace:
    """Intervals in seconds: between two looks (each sends a row at most once), two checks of who may watch, two
    reload hints to one page, and two queries of what no generation counts (leases, intents, agents).
    """

    look: float = 0.5
    rights: float = 2.0
    hint: float = 2.0
    clock: float = 2.0


@dataclass(eq=False)
class Watcher:
    """An open console page. `post` can be called from any thread; it passes a text to send, or a close code, to the
    page's socket.
    """

    session: str
    post: Callable[[str | int], None]
    user: Any = None
    rights: str = ""
    is_page: bool = False
    """Whether the page has reported that it is not a list."""
    shown: Shown | None = None
    seen: dict[Any, tuple[object, dict[str, int]]] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)
    mark: object = None
    """The state (see `Feed._stands`) at which the page was last up to date; None if it still waits for rows."""
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
    """The feed thread and its queue. `enter`, `show` and `leave` are called from the event loop and do not block;
    the private methods run in the thread, which starts with the first `enter`.
    """

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
        """Register a page and find out whose session it has. It is closed with SIGNED_OUT if the session's user may
        not enter the console, with LATER if the database fails.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="live", daemon=True)
            self._thread.start()
        self._asked.put((self._enter, (watcher,)))

    def show(self, watcher: Watcher, path: str, query: str, rows: list[str]) -> None:
        """Follow these rows of the list at `path?query` for this page from now on. An empty `path` means that the
        page is not a list.
        """
        self._asked.put((self._show, (watcher, path, query, rows)))

    def leave(self, watcher: Watcher) -> None:
        """Remove a page that has disconnected."""
        self._asked.put((self._watchers.discard, (watcher,)))

    def stop(self) -> None:
        """Stop the thread and close its database connection. For tests; a real process just ends."""
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
            except Exception as error:  # noqa: BLE001 if this thread ended, no page would be updated any more
                self._next = time.monotonic() + self._pace.look
                self._lost(error)
        connection.close()

    def _take(self) -> None:
        """Process one queued call, or wait until the next look is due. Without watchers it closes the database
        connection and waits for a call; after each call it rests as long as the call took, at most 0.5 s.
        """
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
        except Exception as error:  # noqa: BLE001 the page is told to connect again later
            log.warning("a console page cannot be admitted to the live feed: %s", type(error).__name__)
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
        except Exception as error:  # noqa: BLE001 an error of a crafted or costly query affects its own page only
            log.info("a list cannot be followed for one page: %s", type(error).__name__)
            watcher.post(MALFORMED if connection.is_usable() else LATER)

    def _look(self) -> None:
        """Check all pages once: read generations, periodically check permissions, then send changed rows, counts of
        new rows and reload hints.
        """
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
        except Exception as error:  # noqa: BLE001 every page is shown as not live
            self._lost(error)
            ready = [one for one in self._watchers if one.sending_since is None]
        for watcher in self._watchers.intersection(ready):
            if watcher.say or watcher.live != watcher.told_live or (watcher.live and now >= watcher.beat_at):
                self._tell(watcher)

    def _read_generations(self) -> None:
        """Read all generations. This is the first statement of every piece of work, because it also sets the
        statement timeout for the following ones.
        """
        with connection.cursor() as cursor:
            cursor.execute(GENERATIONS, [str(STATEMENT_MS)])
            self._generations = {name: value for name, value, _ in cursor.fetchall()}

    def _lost(self, error: Exception) -> None:
        """Handle a failed look: mark all pages as not live, close the connection, and compare everything at the next
        look.
        """
        log.warning(
            "live pages cannot be updated now: %s",
            type(error).__name__,
            exc_info=None if isinstance(error, Error) else error,
        )
        self._outages += 1
        for watcher in self._watchers:
            watcher.live = False
        connection.close()

    def _check_rights(self) -> None:
        """Disconnect pages whose session has ended or whose user's permissions changed in any way. A page that
        reconnects gets the permissions that hold then.
        """
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
        """Return a value that changes when anything this list reads may have changed. If the list reads tables
        without a generation, it also changes every `clock_s` seconds.
        """
        counted = tuple(self._generations.get(name, 0) for name in sorted(shown.collections))
        return self._outages, counted, None if shown.counted else time.monotonic() // clock_s

    def _bring_all(self, watchers: list[Watcher], stands: dict[Watcher, tuple[object, ...]]) -> None:
        """Bring pages up to date, list by list. If one list fails, its pages are closed with LATER and the others go
        on; an error of the connection is raised.
        """
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
        """Compare all rows that pages of one list show with the database, and note what to send. Return how many
        rows were rendered.
        """
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
        """Render rows that differ, once for all pages that see them alike; return how many. Pages whose rows exceed
        `budget` wait for a later look.
        """
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
        """Count, for each page, the rows that the list would show now and the page does not. The slower the query,
        the less often it runs.
        """
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
            pages[shown.alike] = set()  # it took too long: report no new rows

    def _hint(self, pages: list[Watcher], now: float) -> None:
        """Tell pages that are not lists to reload when anything changed, longest waiting first, at most
        `HINTS_PER_LOOK`.
        """
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
    """Note what to send about this row: that it is gone, or the cells that differ from those sent last."""
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
