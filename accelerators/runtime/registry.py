"""The shape of every extension point: a registry with named entries, which other packages add when they start.

A package that declares a registry imports nothing of the packages that fill it. They register in `AppConfig.ready()`.
`docs/architecture.md` lists all registries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from accelerators.domain.errors import AcceleratorsError

Entry = TypeVar("Entry")


class RegistrationError(AcceleratorsError):
    """The name is taken by another entry, or the registry takes no more entries."""


class Registry(Mapping[str, Entry]):
    """Entries of one kind by name, in the order in which they were registered.

    `kind` names an entry in error messages. A `single` registry takes only one entry.
    """

    def __init__(self, kind: str, *, single: bool = False) -> None:
        self._kind, self._single = kind, single
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, entry: Entry) -> None:
        """Add `entry` under `name`; do nothing if an equal entry is registered under this name already.

        Raises RegistrationError if a different entry has this name, or if the registry is `single` and has an entry
        under another name.
        """
        if self._entries.get(name, entry) != entry:
            raise RegistrationError(f"Another {self._kind} is already registered as {name!r}.")
        if self._single and any(other != name for other in self._entries):
            raise RegistrationError(f"The {self._kind} {name!r} is one too many: {', '.join(self)} is registered.")
        self._entries[name] = entry

    def only(self) -> Entry:
        """Return the entry of a `single` registry. Raises LookupError if nothing is registered."""
        if not self._entries:
            raise LookupError(f"No {self._kind} is registered.")
        return next(iter(self._entries.values()))

    @contextmanager
    def replaced(self, name: str, entry: Entry | None) -> Iterator[None]:
        """Register `entry` under `name` until the block ends, instead of the present one; for tests.

        If `entry` is None, the name has no entry meanwhile. A `single` registry has no other entry meanwhile.
        """
        before, entries = self._entries, {} if self._single else dict(self._entries)
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry
        self._entries = entries
        try:
            yield
        finally:
            self._entries = before

    def __getitem__(self, name: str) -> Entry:
        """Return the entry with this name. Raises KeyError, which lists the registered names."""
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(self._entries) or "none"
            raise KeyError(f"no {self._kind} {name!r} is registered; registered are: {known}") from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of registration."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)
