"""JSON as both APIs write it."""

from __future__ import annotations

from typing import Any

import orjson
from rest_framework.renderers import BaseRenderer


class Json(BaseRenderer):
    """Bytes pass through, everything else is written by orjson; nothing for None. Without a charset, as clients of v2
    expect."""

    media_type, format, charset = "application/json", "json", None

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        """The body."""
        if data is None:
            return b""
        return data if isinstance(data, bytes) else orjson.dumps(data, default=str)
