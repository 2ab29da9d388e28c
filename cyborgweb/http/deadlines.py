"""The deadlines and limits for HTTP clients, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from cyborgweb.settings.keys import Keys, get_keys


@dataclass(frozen=True)
class ClientLimits:
    """Seconds that an HTTP client may take for each part of an exchange, and the limits of what it may occupy."""

    header_s: float
    body_s: float
    write_s: float
    keep_alive_s: float
    body_buffer_bytes: int
    answer_buffer_bytes: int
    connections: int


def make_client_limits(keys: Keys | None = None) -> ClientLimits:
    """Return the limits that `keys` configure; without `keys`, this process's configuration."""
    keys = keys or get_keys()
    return ClientLimits(
        header_s=keys.header_timeout_s,
        body_s=keys.body_timeout_s,
        write_s=keys.write_timeout_s,
        keep_alive_s=keys.keep_alive_s,
        body_buffer_bytes=keys.body_buffer_bytes,
        answer_buffer_bytes=keys.answer_buffer_bytes,
        connections=keys.http_connections,
    )
