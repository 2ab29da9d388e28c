"""The end of the agent's own log, kept for the command `logs`. Made by `main`."""

from __future__ import annotations

import logging
from collections import deque

LINES, WIDTH, SIZE = 200, 500, 64 * 1024
"""Lines that are kept, characters of one, bytes of all of them together."""


class Tail(logging.Handler):
    """A handler that forgets all but the last lines."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(layout))
        self._lines: deque[str] = deque(maxlen=LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """logging: a record."""
        try:
            lines = self.format(record).splitlines()
        except Exception:  # noqa: BLE001 - as logging itself does with a record that cannot be formatted
            self.handleError(record)
            return
        self._lines.extend(line[:WIDTH] for line in lines)

    def text(self) -> str:
        """The last lines, the newest last."""
        return "\n".join(self._lines).encode(errors="replace")[-SIZE:].decode(errors="ignore")
