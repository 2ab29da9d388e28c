"""Requests of the command line to `/api/`: paging, and API errors as `CliError`.

`cyborg` sends them over HTTP with `HttpApiClient`. The same verbs of `manage.py` send them within their own process,
with `cyborgweb.management.local_api`.

keystoneauth1 is imported and the login happens only at the first request, so that `--help` costs nothing.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from json import dumps as dump_json
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import click

from cyborgweb.cli.exit_codes import CliError, ExitCode, to_printable_line
from cyborgweb.cli.logins import LOGIN_HELP, LoginOptions, open_session

PAGE_SIZE = 500
"""Rows per request: the largest page that the API returns."""
EXIT_CODE_BY_STATUS: Mapping[int, ExitCode] = {
    401: ExitCode.NOT_ALLOWED,
    403: ExitCode.NOT_ALLOWED,
    404: ExitCode.NOT_FOUND,
    429: ExitCode.AWAY,
    502: ExitCode.AWAY,
    503: ExitCode.AWAY,
    504: ExitCode.AWAY,
}
"""Exit code for each HTTP status of an API error; every other status means `ExitCode.REFUSED`."""
NEVER_SENT_ERRORS = ("NewConnectionError", "NameResolutionError")
"""Names in an error's text which show that the request never left this machine, so nothing can have been changed."""


class ApiClient(ABC):
    """A client of the API below `/api/`. A request that fails raises CliError, with the API's own message if any.

    `answered_changes` has the path and the answer of each change that the server has made so far. `unanswered_change`
    is the path of a change that was sent and not answered yet, '' if there is none. With `is_dry_run` no change is
    sent.
    """

    def __init__(self) -> None:
        self.answered_changes: list[tuple[str, dict[str, Any]]] = []
        self.unanswered_change = ""
        self.is_dry_run = False

    @property
    @abstractmethod
    def server_name(self) -> str:
        """How error messages name the server."""

    @abstractmethod
    def send_request(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, json: Any = None, data: Any = None
    ) -> dict[str, Any]:
        """Send a request to `path` below `/api/` and return the decoded answer, {} if it is empty.

        `params` is the query. The body is `json`, or the bytes that `data` can read. Raises CliError.
        """

    def spell_verb(self, verb: str) -> str:
        """Return the command that a person types to run `verb`, for example `cyborg device-list`; messages quote it.

        It depends on which program uses this client.
        """
        return f"cyborg {verb}"

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Return the decoded answer to a GET; `query` values that are bool are sent as `true` and `false`."""
        parameters = {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()}
        return self.send_request("GET", path, params=parameters)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send `body` as JSON with POST and return the decoded answer."""
        return self.send_change("POST", path, json=body)

    def preview(
        self, path: str, body: Mapping[str, Any], method: str = "POST", store_draft: str = ""
    ) -> dict[str, Any]:
        """Return the preview of a change: the service answers what it would do, and changes nothing.

        `store_draft` says when the service stores a draft for it: `when_needed` or `never`; '' if it never stores one
        for this request. A service of an older release always does.
        """
        if store_draft:
            try:
                return self.send_request(method, path, json={**body, "dry_run": True, "store_draft": store_draft})
            except CliError as problem:
                if problem.reason != "invalid" or "cannot be written" not in problem.message:
                    raise
        return self.send_request(method, path, json={**body, "dry_run": True})

    def preview_if_known(
        self, path: str, body: Mapping[str, Any], method: str = "POST", store_draft: str = ""
    ) -> dict[str, Any] | None:
        """Return the preview of a change; None if the service is of an older release, which has no preview of it."""
        try:
            return self.preview(path, body, method, store_draft)
        except CliError as problem:
            if problem.reason == "invalid" and problem.message.startswith("dry_run: cannot be written"):
                return None
            raise

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send `body` as JSON with PATCH and return the decoded answer."""
        return self.send_change("PATCH", path, json=body)

    def delete(self, path: str) -> None:
        """Send a DELETE; its answer is ignored, unless it is an error."""
        self.send_change("DELETE", path)

    def upload(self, path: str, content: Any, **query: Any) -> dict[str, Any]:
        """Send bytes with POST and return the decoded answer. `content` has `read`, `__iter__` and `__len__`."""
        return self.send_change("POST", path, params=query, data=content)

    def send_change(self, method: str, path: str, **request_options: Any) -> dict[str, Any]:
        """Send a request that changes something, return the decoded answer, and record it in `answered_changes`.

        Raises CliError as `send_request` does. Only an interruption leaves the path in `unanswered_change`. In a dry
        run the request is printed instead, and Exit is raised, which ends the command successfully.
        """
        if self.is_dry_run:
            click.echo(_describe_request(method, path, **request_options))
            raise click.exceptions.Exit(ExitCode.DONE)
        self.unanswered_change = path
        try:
            answer = self.send_request(method, path, **request_options)
        except CliError:
            self.unanswered_change = ""
            raise
        self.unanswered_change = ""
        self.answered_changes.append((path, answer))
        return answer

    def iterate_rows(self, path: str, limit: int, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield at most `limit` rows of a list, fetching page after page. `query` holds the filters.

        A page of the list links to the next page. Only the query of that link is used, not its address, so that the
        token is sent to no address but the configured one. Raises CliError, also if the answer is not a list.
        """
        query |= {"limit": min(limit, PAGE_SIZE)}
        while limit > 0:
            page = self.get(path, **query)
            if not isinstance(page.get("results"), list):
                raise CliError(ExitCode.AWAY, f"{self.server_name}/api/{path} answered no list: check --url.")
            yield from page["results"][:limit]
            limit -= len(page["results"])
            if not page.get("next"):
                return
            query = dict(parse_qs(urlsplit(page["next"]).query))


def _describe_request(
    method: str, path: str, *, params: Mapping[str, Any] | None = None, json: Any = None, data: Any = None
) -> str:
    """Return a request as one line: the method, the address with its query, and the body."""
    query = f"?{urlencode(params, doseq=True)}" if params else ""
    body = f" {dump_json(json, ensure_ascii=False)}" if json else " (the file)" if data is not None else ""
    return to_printable_line(f"{method} /api/{path}{query}{body}")


class HttpApiClient(ApiClient):
    """A client that reaches the API over HTTP, logged in with keystoneauth1."""

    def __init__(self, login: LoginOptions) -> None:
        super().__init__()
        self.login = login

    @property
    def server_name(self) -> str:
        """The server's URL without `/api`; without --url it is looked up in the service catalogue, which costs a login.

        Raises the errors of `open_session`.
        """
        return str(self._session_and_url[1])

    @cached_property
    def _session_and_url(self) -> tuple[Any, str]:
        """The session and the server's URL without `/api`, opened at the first use.

        Raises the errors of `open_session`.
        """
        return open_session(self.login)

    def send_request(self, method: str, path: str, **request_options: Any) -> dict[str, Any]:
        """Send a request, logging in first if necessary, and return the decoded answer.

        Raises CliError if the login fails, the server cannot be reached or trusted, or it answers with an error. If a
        change may have been made although no answer came, the text says so.
        """
        from keystoneauth1 import exceptions

        server_url = self.login.url or "Keystone"
        outcome_unknown = (
            "" if method == "GET" else " The change may have been made all the same: check before you repeat it."
        )
        try:
            session, server_url = self._session_and_url
            response = session.request(
                f"{server_url}/api/{path}",
                method,
                raise_exc=False,
                user_agent="cyborg",
                headers=ACCEPT_HEADERS | (BYTES_HEADERS if "data" in request_options else {}),
                **request_options,
            )
        except exceptions.ConnectTimeout:
            text = (
                f"{server_url} did not answer within {self.login.timeout:g} s: try again, or give a longer --timeout."
            )
            raise CliError(ExitCode.AWAY, text + outcome_unknown) from None
        except exceptions.SSLError as error:
            text = (
                f"{server_url} cannot be trusted ({_describe_cause(error)}):"
                " give the file of its authority in --cacert."
            )
            raise CliError(ExitCode.AWAY, text) from None
        except (exceptions.ConnectionError, exceptions.DiscoveryFailure) as error:
            text = (
                f"{server_url} cannot be reached ({_describe_cause(error)}): check --url, and whether the service runs."
            )
            raise CliError(
                ExitCode.AWAY, text + ("" if any(word in str(error) for word in NEVER_SENT_ERRORS) else outcome_unknown)
            ) from None
        except exceptions.HttpServerError as error:
            raise CliError(ExitCode.AWAY, f"{server_url} cannot log users in now: {_describe_cause(error)}") from None
        except exceptions.ClientException as error:
            raise CliError(
                ExitCode.NOT_ALLOWED, f"You are not logged in: {_describe_cause(error)} Log in with {LOGIN_HELP}."
            ) from None
        return decode_response(response, server_url)


ACCEPT_HEADERS = {"Accept": "application/json"}
BYTES_HEADERS = {"Content-Type": "application/octet-stream"}


def decode_response(response: Any, server_url: str) -> dict[str, Any]:
    """Return the decoded JSON object of a successful answer, {} for 204.

    Raises CliError for redirects, errors and other content, with the exit code of the status.
    """
    status = response.status_code
    if status == 204:
        return {}
    if 300 <= status < 400:
        location = response.headers.get("Location", "another address")
        raise CliError(ExitCode.AWAY, f"{server_url} redirects to {location}: give the right address in --url.")
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise CliError(
            EXIT_CODE_BY_STATUS.get(status, ExitCode.AWAY),
            f"{server_url} answered {status}, but not as this API does: check --url.",
        )
    if status < 300:
        return body
    error = body.get("error")
    fields = error if isinstance(error, dict) else {"message": body.get("error_message") or error}
    message = fields.get("message")
    request_id = fields.get("request_id") if status >= 500 else None
    if status == 401:
        message = f"Your token is not known there, or has expired: log in with {LOGIN_HELP}."
    raise CliError(
        EXIT_CODE_BY_STATUS.get(status, ExitCode.REFUSED),
        f"{message or f'{server_url} answered {status}.'}" + (f" (request {request_id})" if request_id else ""),
        str(fields.get("reason") or ""),
        body.get("current"),
    )


def _describe_cause(error: Exception) -> str:
    """Return the message of the operating system or of TLS that the text of a library's error contains.

    If it contains none, return the first 300 characters of the error on one line.
    """
    text = " ".join(str(error).split())
    found = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)|certificate verify failed: ([^(]+)", text)
    return next(filter(None, found.groups())).strip() if found else text[:300]
