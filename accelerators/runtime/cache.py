"""Cache of database rows in one process: limited in size, one load per key at a time, checked every `TTL_S` seconds.

An entry stores the generation of its collection. A writer's notification (`pubsub`) drops it at once in every process.
If the notification is lost, the entry is used for at most `TTL_S` seconds; then its generation is compared with the
database's.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from accelerators.runtime import generations, pubsub
from accelerators.runtime.generations import Collection

TTL_S = 15.0
Value = TypeVar("Value")


@dataclass
class _Entry(Generic[Value]):
    value: Value
    generation: int
    until: float


class Cache(Generic[Value]):
    """Cache the results of `load(key)` for at most `size` keys, least recently used dropped first. Thread-safe.

    None (no such row) is not cached. A hit costs no statement. A miss costs two (the generation, and `load`), however
    many threads ask for the key at once. An expired entry whose generation is still current costs one.
    """

    def __init__(
        self,
        collection: Collection,
        load: Callable[[str], Value | None],
        *,
        size: int = 1024,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collection, self._load, self._size, self._ttl_s = collection, load, size, ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, _Entry[Value]] = OrderedDict()
        self._asked: dict[str, Future[Value | None]] = {}
        self._drops = 0
        self._lock = threading.Lock()
        pubsub.subscribe(collection, self.drop)

    def get(self, key: str) -> Value | None:
        """Return the value for `key`, or None if there is none.

        Threads that ask for a key that is being loaded wait for that load. If it raises, all of them get the exception.
        """
        pubsub.listen()
        with self._lock:
            entry = self._entries.get(key)
            if entry and self._clock() < entry.until:
                self._entries.move_to_end(key)
                return entry.value
            asked = self._asked.get(key)
            first = asked is None
            if asked is None:
                asked = self._asked[key] = Future()
            drops = self._drops
        return self._ask(key, entry, asked, drops) if first else asked.result()

    def drop(self, _detail: str | None = None) -> None:
        """Drop all entries. Loads that are under way still return their values, but do not store them."""
        with self._lock:
            self._entries.clear()
            self._asked.clear()
            self._drops += 1

    def _ask(self, key: str, old: _Entry[Value] | None, asked: Future[Value | None], drops: int) -> Value | None:
        """Load the value, or keep that of `old` if its generation is current; give it to the waiting threads.

        `drops` is the count of drops when the load began: the value is stored only if nothing was dropped since.
        """
        try:
            generation = generations.current(self._collection)
            value = old.value if old and old.generation == generation else self._load(key)
        except BaseException as error:
            self._settle(key, asked, None, drops)
            asked.set_exception(error)
            raise
        entry = None if value is None else _Entry(value, generation, self._clock() + self._ttl_s)
        self._settle(key, asked, entry, drops)
        asked.set_result(value)
        return value

    def _settle(self, key: str, asked: Future[Value | None], entry: _Entry[Value] | None, drops: int) -> None:
        """End the load `asked`: store `entry` unless the cache was dropped since; drop the key if it is None."""
        with self._lock:
            if self._asked.get(key) is asked:
                del self._asked[key]
            if entry and drops == self._drops:
                self._entries[key] = entry
                self._entries.move_to_end(key)
                while len(self._entries) > self._size:
                    self._entries.popitem(last=False)
            elif entry is None:
                self._entries.pop(key, None)
