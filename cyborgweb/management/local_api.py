"""The client of `/api/` for commands of `manage.py`: it calls the API's views in its own process, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from io import BytesIO
from json import dumps as dump_json
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import orjson
from django.db import close_old_connections
from django.urls import resolve

from accelerators.domain.caller import Caller, request_id
from cyborgweb.auth.authentication import LocalRequest
from cyborgweb.cli.connection import ApiClient, decode_response
from cyborgweb.cli.exit_codes import CliError, ExitCode


class LocalApiClient(ApiClient):
    """A client that acts as `caller`; `spellings` maps a verb of `cyborg` to the command line of `manage.py` for it."""

    server_name = "manage.py"

    def __init__(self, caller: Caller, spellings: Mapping[str, str]) -> None:
        super().__init__()
        self.caller = caller
        self.spellings = spellings

    def spell_verb(self, verb: str) -> str:
        """Return the command line of `manage.py` for a verb or, if it has none, that of `cyborg`."""
        return self.spellings.get(verb) or super().spell_verb(verb)

    def send_request(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, json: Any = None, data: Any = None
    ) -> dict[str, Any]:
        """Call the view of the path and return the decoded answer. The API's middleware is not involved.

        Raises CliError if the API answers with an error, or if the request cannot be encoded; django.urls.Resolver404
        if no view has the path. After a 503 the broken database connections are closed, so that a later request can
        succeed.
        """
        try:
            query = urlencode(params or {}, doseq=True)
            body = dump_json(json, allow_nan=False).encode() if data is None else b""
        except (TypeError, ValueError) as error:
            raise CliError(
                ExitCode.USAGE, f"The request cannot be written as JSON or as an address: {error}."
            ) from None
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": f"/api/{path}",
            "QUERY_STRING": query,
            "CONTENT_TYPE": "application/json" if data is None else "application/octet-stream",
            "CONTENT_LENGTH": str(len(body if data is None else data)),
            "HTTP_ACCEPT": "application/json",
            "wsgi.input": BytesIO(body) if data is None else data,
            "wsgi.url_scheme": "https",
        }
        request = LocalRequest(environ, self.caller)
        match = resolve(request.path_info)
        token = request_id.set(f"req-{uuid4()}")  # the API's middleware does this over HTTP
        try:
            response = match.func(request, *match.args, **match.kwargs)
            response.render()
        finally:
            request_id.reset(token)
        if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            close_old_connections()  # broken ones, so that a command that waits goes on when PostgreSQL is back
        answer = SimpleNamespace(
            status_code=response.status_code, headers=response.headers, json=lambda: orjson.loads(response.content)
        )
        return decode_response(answer, self.server_name)
