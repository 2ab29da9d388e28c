"""Django's WSGI application, for the threads of our ASGI applications (`asgi`, `rest`) or any other WSGI server."""

from __future__ import annotations

import io
import os
from typing import Any

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
_django = get_wsgi_application()

from cyborgweb.http.django_threads import UPLOAD_PATH  # noqa: E402  (it needs Django's registry)
from cyborgweb.settings.keys import MAX_BODY_BYTES  # noqa: E402


def application(environ: dict[str, Any], start_response: Any) -> Any:
    """Pass a request to Django. A body that comes in chunks is read first, because Django reads only bodies whose
    length it knows. If a body is too large, only the part is read that Django needs to refuse it.
    """
    is_chunked = "HTTP_TRANSFER_ENCODING" in environ and not environ.get("CONTENT_LENGTH")
    if is_chunked and not UPLOAD_PATH.search(environ["PATH_INFO"]):
        body = environ["wsgi.input"].read(MAX_BODY_BYTES + 1)
        environ |= {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
    return _django(environ, start_response)
