"""Keep the last lines of the agent's own log in memory, for the command `logs`."""

from __future__ import annotations

import logging
from collections import deque

MAX_LINES, MAX_LINE_LENGTH, MAX_TEXT_BYTES = 200, 500, 64 * 1024
"""Limits: number of lines kept, characters per line, and bytes that `LogTail.read_text` returns."""


class LogTail(logging.Handler):
    """A logging handler that keeps the last MAX_LINES lines."""

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(log_format))
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and keep its lines, each cut to MAX_LINE_LENGTH characters."""
        try:
            lines = self.format(record).splitlines()
        except Exception:  # noqa: BLE001 - as logging itself does with a record that cannot be formatted
            self.handleError(record)
            return
        self._lines.extend(line[:MAX_LINE_LENGTH] for line in lines)

    def read_text(self) -> str:
        """Return the last lines, the newest last, cut at the beginning to MAX_TEXT_BYTES bytes of UTF-8."""
        return "\n".join(self._lines).encode(errors="replace")[-MAX_TEXT_BYTES:].decode(errors="ignore")
