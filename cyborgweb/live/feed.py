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
from math import ceil
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import Error, InterfaceError, OperationalError, connection

from accelerators.runtime import metrics
from agents.liveness import compute_thresholds
from cyborgweb.auth.sessions import SessionStore
from cyborgweb.live import session_permissions
from cyborgweb.live.list_snapshot import Cells, ListSnapshot, hash_cell
from cyborgweb.live.page_version import EVERYTHING, PageContent, PageSubject, find_page_content, load_versions

log = logging.getLogger(__name__)
_watcher_gauge = metrics.create_gauge("cyborg_console_watchers", "Console pages that are open in a browser.")

MAX_ROWS_PER_PAGE = 15
"""Largest number of changed rows sent to one page per look; the others follow in the next looks."""
MAX_RENDERED_ROWS = 300
"""Largest number of rows that are rendered per look, for all pages together; also when one page begins to follow a
list.
"""
MAX_CACHED_ROWS = 1000
"""Rendered rows kept in memory per list; a list that reaches this number is rendered again."""
MIN_RELOAD_HINTS = 2
"""How many of all open pages are told per look to reload themselves, at least, if they wait for it."""
MAX_RELOADS_PER_S = 20.0
"""How many pages are told per second to reload themselves, at most, however many pages are open."""
RELOAD_TARGET_S = 10.0
"""Seconds in which all waiting pages are told to reload themselves, unless MAX_RELOADS_PER_S prevents it."""
MAX_RELOAD_DELAY_S = 30.0
"""Seconds after which a page that still waits for its reload hint is no longer shown as live. MAX_RELOADS_PER_S lets
500 pages reload themselves in 25 s."""
BEHIND_NOTICE_S = 3.0
"""Seconds after which a live page that waits for its reload hint is told so: its badge then says how far it is behind.
"""
UNVERSIONED_INTERVAL_S = 60.0
"""Seconds after which a page with a subject is also told to reload itself for any other change. Versions contain all
that such pages are known to show; this corrects a page that shows more."""
VERSION_INTERVAL_S = 2.0
"""Seconds after which versions are read again even if no generation has changed: some of their tables have none."""
KEEPALIVE_INTERVAL_S = 8.0
"""Seconds after which a live page gets a message even if nothing has changed."""
CLOCK_RENDER_INTERVAL_S = 10.0
"""Seconds between two renderings of lists that read tables without a generation, because some of their text depends
on the time.
"""
NEW_ROWS_BUDGET_S = 0.2
"""Seconds per look for searches for new rows; lists that are left over wait for the next look."""
NEW_ROWS_INTERVAL_S = 30.0
"""Seconds between two searches for new rows in such lists, unless a counted table changed."""
SEND_TIMEOUT_S = 10.0
"""Seconds after which a page that has not accepted a message is disconnected."""
STATEMENT_TIMEOUT_MS = 5000

SIGNED_OUT, NOT_ALLOWED, MALFORMED, TOO_SLOW, TRY_AGAIN_LATER = 4401, 4403, 4400, 4408, 1013
"""WebSocket close codes, also used by `live.js`."""

SELECT_GENERATIONS = """
SELECT collection, sum(value)::bigint, set_config('statement_timeout', %s, false) FROM generation GROUP BY collection
"""
"""Plain SQL, because it also sets the statement timeout of the connection in the same round trip."""
SELECT_UNCOUNTED = """
SELECT (SELECT concat(count(*), ' ', sum(attempts), ' ', max(id)) FROM accelerators_intent),
  (SELECT concat(count(*) FILTER (WHERE seen_at >= %s), ' ', count(*) FILTER (WHERE seen_at >= %s)) FROM agents_lease),
  (SELECT max(changed_at) FROM agents_agent)
"""
"""Facts that no generation counts but pages show: intents, agents that are up or late, agents that changed.

Plain SQL, because it reads three tables in one statement.
"""


RenderedRow = tuple[object, Cells, dict[str, int]]
"""A row's version, its cells, and a fingerprint of each cell."""


GONE_ROW: RenderedRow = ("gone", {}, {})
NEVER_RENDERED: RenderedRow = (None, {}, {})


@dataclass(frozen=True)
class FeedIntervals:
    """Shortest intervals in seconds.

    `look_s`: between two searches for changed rows (each sends a row at most once to a page). `permission_check_s`:
    between two checks of who may watch. `reload_hint_s`: between two reload hints to the same page; `bounded_hint_s`:
    the same for a page without a subject, such as the overview, which shows changes of many rows.
    `uncounted_query_s`: between two queries of data whose changes no Generation row counts (leases, intents, agents).
    """

    look_s: float = 0.5
    permission_check_s: float = 2.0
    reload_hint_s: float = 2.0
    bounded_hint_s: float = 10.0
    uncounted_query_s: float = 2.0


@dataclass(eq=False)
class ConsoleWatcher:
    """An open console page. `post` can be called from any thread; it passes a text to send, or a close code, to the
    page's socket.
    """

    session_key: str
    post: Callable[[str | int], None]
    user: Any = None
    permission_fingerprint: str = ""
    """The user's `session_permissions.fingerprint_permissions` when the page was admitted."""
    is_plain_page: bool = False
    """Whether the page has reported that it is not a list."""
    content: PageContent = EVERYTHING
    """What the page shows, if it is not a list."""
    snapshot: ListSnapshot | None = None
    """The list that the page shows; None for a page that is not a list."""
    sent_rows: dict[Any, tuple[object, dict[str, int]]] = field(default_factory=dict)
    """Primary key of each row on the page → the row's version and the fingerprints of its cells, as they were sent
    last."""
    row_names: dict[Any, str] = field(default_factory=dict)
    """Primary key → the text by which the page names the row."""
    synced_state: object = None
    """The state (see `LiveFeed._compute_list_state`) at which the page was last up to date; None if it still waits for
    rows.
    """
    is_live: bool = False
    """Whether the page is being kept up to date now."""
    announced_live: bool = False
    """The value of `is_live` that was sent to the page last."""
    pending_message: dict[str, Any] = field(default_factory=dict)
    """The content of the next message to the page."""
    sending_since: float | None = None
    """When the message was posted that the page has not accepted yet (monotonic clock); None if there is none."""
    next_keepalive_at: float = 0.0
    hinted_at: float = 0.0
    """When the page was told last to reload itself (monotonic clock)."""
    hinted_state: object = None
    """The state of all data when the page was told last to reload itself."""
    waiting_since: float | None = None
    """Since when the page waits to be told to reload itself; None if it does not."""
    is_told_behind: bool = False
    """Whether the page was told that it waits."""
    new_count: int = 0
    """The number of new rows that was noted for the page last."""
    counted_state: object = None
    """The state at which its new rows were counted last."""
    next_count_at: float = 0.0


class LiveFeed:
    """The thread that keeps open console pages up to date, and its queue of calls.

    `add_watcher`, `follow_rows` and `remove_watcher` are called from the event loop and do not block. The private
    methods run in the thread, which starts with the first `add_watcher`.
    """

    def __init__(self, intervals: FeedIntervals = FeedIntervals()) -> None:
        self._intervals = intervals
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], Any]] = queue.SimpleQueue()
        self._watchers: set[ConsoleWatcher] = set()
        self._generations: dict[str, int] = {}
        self._uncounted: object = None
        self._versions: dict[PageSubject, int] = {}
        self._next_versions_at = 0.0
        self._versioned_state: object = None
        self._hints_sent_at = 0.0
        self._rendered_rows: dict[object, dict[Any, RenderedRow]] = {}
        self._outages = 0
        self._next_look_at = self._permissions_checked_at = self._next_uncounted_at = 0.0
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add_watcher(self, watcher: ConsoleWatcher) -> None:
        """Register an open console page, and find out who is logged in with its session. The feed's thread does it
        later.

        SIGNED_OUT is posted to the page if nobody is logged in with the session or the user may not enter the console,
        and TRY_AGAIN_LATER if the database fails. The page is not registered then.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="live", daemon=True)
            self._thread.start()
        self._calls.put((self._admit_watcher, (watcher,)))

    def follow_rows(self, watcher: ConsoleWatcher, path: str, query: str, rows: list[str], page: str = "") -> None:
        """Follow these rows (keys as texts) of the list at `path?query` for this page from now on, in place of all rows
        that it followed before. An empty `path` means that the page is not a list; `page` is its path then. The feed's
        thread does it later.

        If the list cannot be followed, a close code is posted to the page.
        """
        self._calls.put((self._start_following, (watcher, path, query, rows, page)))

    def remove_watcher(self, watcher: ConsoleWatcher) -> None:
        """Remove a page that has disconnected; the feed's thread does it later. Nothing is posted to the page."""
        self._calls.put((self._watchers.discard, (watcher,)))

    def stop(self) -> None:
        """Stop the feed's thread, which closes its database connection, and wait for it for at most 15 s.

        For tests; a real process just ends.
        """
        self._stopping = True
        self._calls.put((lambda: None, ()))
        if self._thread:
            self._thread.join(15)

    def _run(self) -> None:
        """The loop of the feed's thread: process queued calls and check all pages until `stop`. After an error all
        pages are marked as not live, and the loop goes on.
        """
        while not self._stopping:
            try:
                self._process_next_call()
                _watcher_gauge.set(len(self._watchers))
                if self._watchers and time.monotonic() >= self._next_look_at:
                    duration = _measure_duration(self._check_all_pages)
                    self._next_look_at = time.monotonic() + max(self._intervals.look_s - duration, 3 * duration)
            except Exception as error:  # noqa: BLE001 if this thread ended, no page would be updated any more
                self._next_look_at = time.monotonic() + self._intervals.look_s
                self._mark_all_not_live(error)
        connection.close()

    def _process_next_call(self) -> None:
        """Process one queued call; if none comes, return when the next look is due.

        Without watchers it closes the database connection and waits for a call. After a call it rests as long as the
        call took, but at most 0.5 s.
        """
        if not self._watchers:
            connection.close()
        timeout = max(0.0, self._next_look_at - time.monotonic()) if self._watchers else None
        with suppress(queue.Empty):
            method, arguments = self._calls.get(timeout=timeout)
            time.sleep(min(0.5, _measure_duration(lambda: method(*arguments))))

    def _admit_watcher(self, watcher: ConsoleWatcher) -> None:
        """Find out the user of the page's session and add the page to the watchers. Post SIGNED_OUT instead if there is
        no user or the user may not enter the console, and TRY_AGAIN_LATER if that cannot be found out.
        """
        try:
            self._read_generations()
            watcher.user = session_permissions.user_of_session(watcher.session_key)
            if watcher.user:
                watcher.permission_fingerprint = session_permissions.fingerprint_permissions([watcher.user.pk]).get(
                    watcher.user.pk, ""
                )
        except Exception as error:  # noqa: BLE001 the page is told to connect again later
            log.warning("a console page cannot be admitted to the live feed: %s", type(error).__name__)
            watcher.post(TRY_AGAIN_LATER)
            return
        if watcher.permission_fingerprint:
            self._watchers.add(watcher)
        else:
            watcher.post(SIGNED_OUT)

    def _start_following(self, watcher: ConsoleWatcher, path: str, query: str, rows: list[str], page: str) -> None:
        """Follow the rows of the page's list from now on, compare them once, and send the first message. A page that is
        not a list is only noted, with what it shows.

        Post NOT_ALLOWED if the user may not view the list, MALFORMED if it cannot be followed, and TRY_AGAIN_LATER if
        the database connection is lost. A page that is not registered is ignored.
        """
        if watcher not in self._watchers:
            return
        watcher.snapshot, watcher.synced_state, watcher.is_live, watcher.new_count, watcher.counted_state = (
            None,
            None,
            False,
            0,
            None,
        )
        watcher.pending_message.clear()
        watcher.is_plain_page, watcher.content = not path, EVERYTHING
        try:
            if watcher.is_plain_page:
                watcher.content = find_page_content(page)
                return
            shown = ListSnapshot(path, query, watcher.user, SessionStore(watcher.session_key))
            key_by_name = shown.parse_keys(rows)
            watcher.snapshot, watcher.row_names = shown, {key: text for text, key in key_by_name.items()}
            watcher.sent_rows = {key: (None, {}) for key in key_by_name.values()}
            state = self._compute_list_state(shown, self._intervals.uncounted_query_s)
            watcher.counted_state = self._compute_list_state(shown, NEW_ROWS_INTERVAL_S)
            self._update_pages_of_list([watcher], {watcher: state}, MAX_RENDERED_ROWS)
            if new := len(shown.first_keys - watcher.sent_rows.keys()):
                watcher.new_count = watcher.pending_message["new"] = new
            self._send_pending_message(watcher)
        except PermissionDenied:
            watcher.post(NOT_ALLOWED)
        except Exception as error:  # noqa: BLE001 an error of a crafted or costly query affects its own page only
            log.info("a list cannot be followed for one page: %s", type(error).__name__)
            watcher.post(MALFORMED if connection.is_usable() else TRY_AGAIN_LATER)

    def _check_all_pages(self) -> None:
        """Check all pages once: read generations, periodically check permissions, then send changed rows, counts of new
        rows and reload hints, and a keep-alive message where one is due.

        If this fails, mark all pages as not live and send them that. Pages that have not accepted their last message
        yet are left out.
        """
        now = time.monotonic()
        try:
            self._read_generations()
            if now >= self._permissions_checked_at:
                self._check_permissions()
                self._permissions_checked_at = now + self._intervals.permission_check_s
            ready = [one for one in list(self._watchers) if not self._is_still_sending(one, now)]
            state_by_watcher = {
                one: self._compute_list_state(one.snapshot, self._intervals.uncounted_query_s)
                for one in ready
                if one.snapshot
            }
            shared_keys = {one.snapshot.shared_key for one in self._watchers if one.snapshot}
            self._rendered_rows = {
                key: rows
                for key, rows in self._rendered_rows.items()
                if key in shared_keys and len(rows) < MAX_CACHED_ROWS
            }
            self._update_pages(
                [one for one in state_by_watcher if one.synced_state != state_by_watcher[one]], state_by_watcher
            )
            self._count_new_rows([one for one in state_by_watcher if one in self._watchers], now)
            self._send_reload_hints([one for one in ready if one.is_plain_page], now)
        except Exception as error:  # noqa: BLE001 every page is shown as not live
            self._mark_all_not_live(error)
            ready = [one for one in self._watchers if one.sending_since is None]
        for watcher in self._watchers.intersection(ready):
            if (
                watcher.pending_message
                or watcher.is_live != watcher.announced_live
                or (watcher.is_live and now >= watcher.next_keepalive_at)
            ):
                self._send_pending_message(watcher)

    def _read_generations(self) -> None:
        """Read all generations, which count the writes to tables, and set the connection's statement timeout.

        This must be the first statement of every piece of work.
        """
        with connection.cursor() as cursor:
            cursor.execute(SELECT_GENERATIONS, [str(STATEMENT_TIMEOUT_MS)])
            self._generations = {name: value for name, value, _ in cursor.fetchall()}

    def _mark_all_not_live(self, error: Exception) -> None:
        """Handle a failed look: log the error, mark all pages as not live, close the database connection, and make the
        next look compare all rows. Sends nothing.
        """
        log.warning(
            "live pages cannot be updated now: %s",
            type(error).__name__,
            exc_info=None if isinstance(error, Error) else error,
        )
        self._outages += 1
        for watcher in self._watchers:
            watcher.is_live = False
        connection.close()

    def _check_permissions(self) -> None:
        """Remove the pages whose session has ended, or whose user's password or permissions have changed in any way,
        and post SIGNED_OUT to them. A page that connects again gets the permissions that are valid then.
        """
        live_sessions = session_permissions.filter_live_sessions({one.session_key for one in self._watchers})
        fingerprints = session_permissions.fingerprint_permissions({one.user.pk for one in self._watchers})
        for watcher in list(self._watchers):
            if (
                watcher.session_key not in live_sessions
                or fingerprints.get(watcher.user.pk) != watcher.permission_fingerprint
            ):
                self._watchers.discard(watcher)
                watcher.post(SIGNED_OUT)

    def _is_still_sending(self, watcher: ConsoleWatcher, now: float) -> bool:
        """Return whether the page has not accepted its last message yet. After `SEND_TIMEOUT_S` seconds, remove the
        page and post TOO_SLOW.
        """
        sending_since = watcher.sending_since
        if sending_since is not None and now - sending_since > SEND_TIMEOUT_S:
            self._watchers.discard(watcher)
            watcher.post(TOO_SLOW)
        return sending_since is not None

    def _compute_list_state(self, snapshot: ListSnapshot, clock_s: float) -> tuple[object, ...]:
        """Return a value that changes when anything this list reads may have changed. If the list reads tables
        without a generation, it also changes every `clock_s` seconds.
        """
        generations = tuple(self._generations.get(name, 0) for name in sorted(snapshot.collections))
        return self._outages, generations, None if snapshot.is_fully_counted else time.monotonic() // clock_s

    def _update_pages(
        self, watchers: list[ConsoleWatcher], state_by_watcher: dict[ConsoleWatcher, tuple[object, ...]]
    ) -> None:
        """Find the rows that differ on these pages, list by list, and note them in the pages' pending messages.

        At most MAX_RENDERED_ROWS rows are rendered; pages beyond that wait for a later look. If one list fails, its
        pages are removed and closed with TRY_AGAIN_LATER, and the other lists go on. But OperationalError and
        InterfaceError are raised, and every error is raised if the database connection is lost.
        """
        by_list: dict[Any, list[ConsoleWatcher]] = defaultdict(list)
        for watcher in watchers:
            if watcher.snapshot:
                by_list[watcher.snapshot.admin, watcher.snapshot.visible_rows_sql].append(watcher)
        budget = MAX_RENDERED_ROWS
        for (admin, _), same_list in by_list.items():
            try:
                budget -= self._update_pages_of_list(same_list, state_by_watcher, budget)
            except Exception as error:
                if isinstance(error, OperationalError | InterfaceError) or not connection.is_usable():
                    raise
                log.exception("the list of %s cannot be followed", admin.opts.label_lower)
                self._watchers.difference_update(same_list)
                for failed_watcher in same_list:
                    failed_watcher.post(TRY_AGAIN_LATER)

    def _update_pages_of_list(
        self, watchers: list[ConsoleWatcher], state_by_watcher: dict[ConsoleWatcher, tuple[object, ...]], budget: int
    ) -> int:
        """Compare all rows that these pages of one list show with the database, and note in the pages' pending messages
        what differs. Render at most `budget` rows, and return how many were rendered.

        A page that is live gets at most MAX_ROWS_PER_PAGE rows; the others follow in a later look.
        """
        snapshot, budget_before = watchers[0].snapshot, budget
        assert snapshot
        versions: dict[Any, object] = dict(snapshot.load_versions({key for one in watchers for key in one.sent_rows}))
        if not snapshot.is_fully_counted:
            tick = time.monotonic() // CLOCK_RENDER_INTERVAL_S
            versions = {key: (version, tick) for key, version in versions.items()}
        pages_by_shared_key: dict[Any, list[tuple[ConsoleWatcher, list[Any]]]] = defaultdict(list)
        for one in watchers:
            changed_keys = [key for key, (version, _) in one.sent_rows.items() if versions.get(key, "gone") != version]
            if one.is_live:
                one.synced_state = state_by_watcher[one] if len(changed_keys) <= MAX_ROWS_PER_PAGE else None
                changed_keys = changed_keys[:MAX_ROWS_PER_PAGE]
            assert one.snapshot
            pages_by_shared_key[one.snapshot.shared_key].append((one, changed_keys))
        for pairs in pages_by_shared_key.values():
            budget -= self._render_changed_rows(pairs, versions, budget, state_by_watcher)
        return budget_before - budget

    def _render_changed_rows(
        self,
        changed_by_watcher: list[tuple[ConsoleWatcher, list[Any]]],
        versions: dict[Any, object],
        budget: int,
        state_by_watcher: dict[ConsoleWatcher, tuple[object, ...]],
    ) -> int:
        """Render the rows that differ, once for these pages, which all see them alike, and note them in the pages'
        pending messages. Return how many rows were rendered; those already rendered in this version are reused.

        A page with which the number would exceed `budget` gets nothing now and waits for a later look. The other pages
        are live from now on.
        """
        snapshot = changed_by_watcher[0][0].snapshot
        assert snapshot
        cached_rows = self._rendered_rows.setdefault(snapshot.shared_key, {})
        served, keys_to_render = [], set[Any]()
        for one, differ in changed_by_watcher:
            additional_keys = {
                key for key in differ if key in versions and cached_rows.get(key, NEVER_RENDERED)[0] != versions[key]
            }
            if len(keys_to_render | additional_keys) > budget:
                one.synced_state = None
                continue
            keys_to_render |= additional_keys
            served.append((one, differ))
        for key, cells in (snapshot.render_rows(keys_to_render) if keys_to_render else {}).items():
            cached_rows[key] = versions[key], cells, {name: hash_cell(html) for name, html in cells.items()}
        for one, differ in served:
            for key in differ:
                _add_row_to_message(one, key, cached_rows.get(key, NEVER_RENDERED) if key in versions else GONE_ROW)
            if not one.is_live:
                one.synced_state, one.is_live = state_by_watcher[one], True
        return len(keys_to_render)

    def _count_new_rows(self, watchers: list[ConsoleWatcher], now: float) -> None:
        """Count, for each live page, the rows that its list would show now and the page does not show. Note the number
        in the page's pending message if it has changed.

        The pages that have waited longest come first, until NEW_ROWS_BUDGET_S is spent. A page is counted only if its
        list may have changed since the last count. The slower the query, the less often it runs.
        """
        keys_by_list: dict[object, set[Any]] = {}
        spent = 0.0
        for one in sorted(watchers, key=lambda watcher: watcher.next_count_at):
            state = (
                self._compute_list_state(one.snapshot, NEW_ROWS_INTERVAL_S)
                if one.snapshot and one.is_live and now >= one.next_count_at
                else one.counted_state
            )
            if not one.snapshot or state == one.counted_state:
                continue
            if spent > NEW_ROWS_BUDGET_S and one.snapshot.shared_key not in keys_by_list:
                continue
            duration = _measure_duration(partial(self._read_page_keys, one.snapshot, keys_by_list))
            spent += duration
            one.counted_state = state
            one.next_count_at = now + max(self._intervals.uncounted_query_s, 20 * duration)
            if (new := len(keys_by_list[one.snapshot.shared_key] - one.sent_rows.keys())) != one.new_count:
                one.new_count = one.pending_message["new"] = new

    @staticmethod
    def _read_page_keys(snapshot: ListSnapshot, keys_by_list: dict[object, set[Any]]) -> None:
        """Load the primary keys that this page of the list would show now into `keys_by_list`, unless they are there.

        If the query fails, for example because it takes too long, store the empty set; but if the connection is lost,
        raise the error.
        """
        if snapshot.shared_key in keys_by_list:
            return
        try:
            keys_by_list[snapshot.shared_key] = snapshot.load_page_keys()
        except Exception:
            if not connection.is_usable():
                raise
            keys_by_list[snapshot.shared_key] = set()  # usually a query that took too long: report no new rows

    def _send_reload_hints(self, pages: list[ConsoleWatcher], now: float) -> None:
        """Note in the pending messages of `pages`, which are not lists, that they must reload, if something has changed
        that they show.

        At most MAX_RELOADS_PER_S pages per second get the hint, but MIN_RELOAD_HINTS per call, those that have waited
        longest first, and each live page at most once in `reload_hint_s` seconds, or `bounded_hint_s` if it has no
        subject. A page that waits for BEHIND_NOTICE_S seconds is told how long it has waited; after MAX_RELOAD_DELAY_S
        seconds it is not live until the hint.
        """
        if pages and now >= self._next_uncounted_at:
            self._next_uncounted_at = now + self._intervals.uncounted_query_s
            with connection.cursor() as cursor:
                cursor.execute(SELECT_UNCOUNTED, compute_thresholds())
                self._uncounted = cursor.fetchone()
        state = self._outages, tuple(sorted(self._generations.items())), self._uncounted
        self._update_versions(pages, state, now)
        waiting = []
        for one in pages:
            own_state, subject = self._compute_page_state(one.content, state), one.content.subject
            is_overdue = one.hinted_state != state and now >= one.hinted_at + UNVERSIONED_INTERVAL_S
            if one.synced_state == own_state and not (subject and is_overdue):
                continue
            one.waiting_since = one.waiting_since or now
            delay = now - one.waiting_since
            one.is_live = one.is_live and delay < MAX_RELOAD_DELAY_S
            interval = self._intervals.reload_hint_s if subject else self._intervals.bounded_hint_s
            if not one.is_live or now >= one.hinted_at + interval:
                waiting.append((one, own_state))
            if one.is_live and delay >= BEHIND_NOTICE_S and not one.is_told_behind:
                one.is_told_behind, one.pending_message["behind"] = True, round(delay, 1)
        rate = min(len(waiting) / RELOAD_TARGET_S, MAX_RELOADS_PER_S)
        number = max(MIN_RELOAD_HINTS, ceil(rate * min(now - self._hints_sent_at, RELOAD_TARGET_S)))
        self._hints_sent_at = now
        for one, own_state in sorted(waiting, key=lambda pair: pair[0].waiting_since or now)[:number]:
            one.synced_state, one.hinted_state, one.is_live = own_state, state, True
            one.hinted_at, one.waiting_since, one.is_told_behind = now, None, False
            one.pending_message.pop("behind", None)
            one.pending_message["moved"] = True

    def _compute_page_state(self, content: PageContent, state: object) -> object:
        """Return a value that changes when something changes that a page with this content shows. `state` is the value
        for everything."""
        if content.subject:
            return self._outages, self._versions.get(content.subject)
        if content.collections is not None:
            return self._outages, tuple(self._generations.get(name, 0) for name in sorted(content.collections))
        return state

    def _update_versions(self, pages: list[ConsoleWatcher], state: object, now: float) -> None:
        """Load the versions of the subjects of `pages`, if `state` is not that of the last versions, if a subject is
        new, or after VERSION_INTERVAL_S seconds."""
        subjects = {one.content.subject for one in pages if one.content.subject}
        if state != self._versioned_state or now >= self._next_versions_at or not subjects <= self._versions.keys():
            self._versions, self._versioned_state = load_versions(subjects), state
            self._next_versions_at = now + VERSION_INTERVAL_S

    @staticmethod
    def _send_pending_message(watcher: ConsoleWatcher) -> None:
        """Post the page's pending message, and whether the page is live, as one JSON text. Then nothing is pending."""
        from msgspec import json

        watcher.sending_since = time.monotonic()
        watcher.next_keepalive_at = watcher.sending_since + KEEPALIVE_INTERVAL_S
        watcher.announced_live = watcher.is_live
        watcher.post(json.encode({"live": watcher.is_live} | watcher.pending_message).decode())
        watcher.pending_message = {}


def _add_row_to_message(watcher: ConsoleWatcher, key: Any, rendered: RenderedRow) -> None:
    """Note in the page's pending message that this row is gone, or the cells that differ from those sent last.

    `watcher.sent_rows` is updated. If no cell differs, nothing is noted.
    """
    sent_fingerprints = watcher.sent_rows[key][1]
    version, cells, fingerprints = rendered
    watcher.sent_rows[key] = version, fingerprints
    if rendered is GONE_ROW:
        watcher.pending_message.setdefault("gone", []).append(watcher.row_names[key])
    elif changed := {name: html for name, html in cells.items() if sent_fingerprints.get(name) != fingerprints[name]}:
        watcher.pending_message.setdefault("rows", {})[watcher.row_names[key]] = changed


def _measure_duration(function: Callable[[], None]) -> float:
    """Call the function and return how many seconds it took."""
    started_at = time.monotonic()
    function()
    return time.monotonic() - started_at
