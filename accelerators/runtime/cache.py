"""Cache of database rows in one process: limited in size, one load per key at a time, checked every `TTL_S` seconds.

An entry stores the generation that its collection had when it was loaded. A writer's notification about the collection
(`pubsub`) drops all its entries at once in every process. If the notification is lost, an entry is used for at most
`TTL_S` seconds; then its generation is compared with the database's.
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
from accelerators.runtime.generations import CollectionName

TTL_S = 15.0
Value = TypeVar("Value")


@dataclass
class _CacheEntry(Generic[Value]):
    """A cached value, its collection's generation when it was loaded, and the time of the clock when it expires."""

    value: Value
    generation: int
    valid_until: float


class GenerationCache(Generic[Value]):
    """Cache the results of `load(key)` for at most `size` keys, least recently used dropped first. Thread-safe.

    None (no such row) is not cached. A hit costs no statement. A miss costs two (the generation, and `load`), however
    many threads ask for the key at once. An expired entry whose generation is still current costs one.
    """

    def __init__(
        self,
        collection: CollectionName,
        load: Callable[[str], Value | None],
        *,
        size: int = 1024,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collection, self._load, self._size, self._ttl_s = collection, load, size, ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, _CacheEntry[Value]] = OrderedDict()
        self._loading: dict[str, Future[Value | None]] = {}
        self._drop_count = 0
        self._lock = threading.Lock()
        pubsub.subscribe(collection, self.drop_all)

    def get(self, key: str) -> Value | None:
        """Return the value for `key`, from the cache or else from `load`; None if `load` finds none.

        Threads that ask for a key that is being loaded wait for that load. If it raises, all of them get the exception.
        """
        pubsub.start_listener()
        with self._lock:
            entry = self._entries.get(key)
            if entry and self._clock() < entry.valid_until:
                self._entries.move_to_end(key)
                return entry.value
            load_future = self._loading.get(key)
            is_loader = load_future is None
            if load_future is None:
                load_future = self._loading[key] = Future()
            drop_count = self._drop_count
        return self._load_and_share(key, entry, load_future, drop_count) if is_loader else load_future.result()

    def drop_all(self, _detail: str | None = None) -> None:
        """Drop all entries, whatever the notification says.

        Loads that are under way still return their values, but do not store them; later calls of `get` load again.
        """
        with self._lock:
            self._entries.clear()
            self._loading.clear()
            self._drop_count += 1

    def _load_and_share(
        self, key: str, expired_entry: _CacheEntry[Value] | None, load_future: Future[Value | None], drop_count: int
    ) -> Value | None:
        """Load the value, or keep that of `expired_entry` if its generation is current; give it to the waiting threads.

        `drop_count` is the count of drops when the load began: the value is stored only if nothing was dropped since.
        If loading raises, the waiting threads and the caller get the exception.
        """
        try:
            generation = generations.current_generation(self._collection)
            value = expired_entry.value if expired_entry and expired_entry.generation == generation else self._load(key)
        except BaseException as error:
            self._finish_load(key, load_future, None, drop_count)
            load_future.set_exception(error)
            raise
        entry = None if value is None else _CacheEntry(value, generation, self._clock() + self._ttl_s)
        self._finish_load(key, load_future, entry, drop_count)
        load_future.set_result(value)
        return value

    def _finish_load(
        self, key: str, load_future: Future[Value | None], entry: _CacheEntry[Value] | None, drop_count: int
    ) -> None:
        """End the load `load_future`: store `entry`, unless the entries were dropped since the load began.

        If `entry` is None, a stored entry of the key is removed.
        """
        with self._lock:
            if self._loading.get(key) is load_future:
                del self._loading[key]
            if entry and drop_count == self._drop_count:
                self._entries[key] = entry
                self._entries.move_to_end(key)
                while len(self._entries) > self._size:
                    self._entries.popitem(last=False)
            elif entry is None:
                self._entries.pop(key, None)
