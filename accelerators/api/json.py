"""The JSON renderer of both APIs."""

from __future__ import annotations

from typing import Any

import orjson
from rest_framework.renderers import BaseRenderer


class JsonRenderer(BaseRenderer):
    """Renders JSON with orjson. Bytes are passed through, and None gives an empty body. The media type has no charset,
    because clients of v2 expect none."""

    media_type, format, charset = "application/json", "json", None

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        """Return the body as bytes; values that JSON does not know become text (`str`)."""
        if data is None:
            return b""
        return data if isinstance(data, bytes) else orjson.dumps(data, default=str)
