"""HTTP requests of the `cyborg` command to `/api/`: paging, and API errors as `CliError`.

keystoneauth1 is imported and the login happens only at the first request, so that `--help` costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cyborgweb.cli.logins import HOW, Login, open_session
from cyborgweb.cli.problems import CliError, Exit

PAGE = 500
"""Rows per request: the largest page that the API returns."""
CODES: Mapping[int, Exit] = {
    401: Exit.NOT_ALLOWED,
    403: Exit.NOT_ALLOWED,
    404: Exit.NOT_FOUND,
    429: Exit.AWAY,
    502: Exit.AWAY,
    503: Exit.AWAY,
    504: Exit.AWAY,
}
"""Exit code for each HTTP status of an API error; every other status means `Exit.REFUSED`."""
NEVER_SENT = ("NewConnectionError", "NameResolutionError")
"""Names in an error's text which show that the request never left this machine, so nothing can have been changed."""


class Api:
    """A client of the API below `/api/`. Every method raises CliError, with the API's own error message if any."""

    def __init__(self, login: Login) -> None:
        self.login = login

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Return the decoded answer to a GET; `query` values that are bool are sent as `true` and `false`."""
        written = {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()}
        return self._ask("GET", path, params=written)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send `body` as JSON with POST and return the decoded answer."""
        return self._ask("POST", path, json=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send `body` as JSON with PATCH and return the decoded answer."""
        return self._ask("PATCH", path, json=body)

    def rows(self, path: str, limit: int, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield at most `limit` rows of a list, fetching page after page.

        Only the query of a `next` link is used, so the token is never sent to any address but the configured one.
        """
        query |= {"limit": min(limit, PAGE)}
        while limit > 0:
            page = self.get(path, **query)
            if not isinstance(page.get("results"), list):
                raise CliError(Exit.AWAY, f"{self._opened[1]}/api/{path} answered no list: check --url.")
            yield from page["results"][:limit]
            limit -= len(page["results"])
            if not page.get("next"):
                return
            query = dict(parse_qs(urlsplit(page["next"]).query))

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return open_session(self.login)

    def _ask(self, method: str, path: str, **said: Any) -> dict[str, Any]:
        from keystoneauth1 import exceptions

        where = self.login.url or "Keystone"
        unsure = "" if method == "GET" else " The change may have been made all the same: check before you repeat it."
        try:
            session, where = self._opened
            response = session.request(
                f"{where}/api/{path}", method, raise_exc=False, user_agent="cyborg", headers=ACCEPT, **said
            )
        except exceptions.ConnectTimeout:
            text = f"{where} did not answer within {self.login.timeout:g} s: try again, or give a longer --timeout."
            raise CliError(Exit.AWAY, text + unsure) from None
        except exceptions.SSLError as error:
            text = f"{where} cannot be trusted ({_why(error)}): give the file of its authority in --cacert."
            raise CliError(Exit.AWAY, text) from None
        except (exceptions.ConnectionError, exceptions.DiscoveryFailure) as error:
            text = f"{where} cannot be reached ({_why(error)}): check --url, and whether the service runs."
            raise CliError(
                Exit.AWAY, text + ("" if any(word in str(error) for word in NEVER_SENT) else unsure)
            ) from None
        except exceptions.HttpServerError as error:
            raise CliError(Exit.AWAY, f"{where} cannot log users in now: {_why(error)}") from None
        except exceptions.ClientException as error:
            raise CliError(Exit.NOT_ALLOWED, f"You are not logged in: {_why(error)} Log in with {HOW}.") from None
        return _read(response, where)


ACCEPT = {"Accept": "application/json"}


def _read(response: Any, where: str) -> dict[str, Any]:
    """Return the decoded JSON object of a successful answer; raise CliError for redirects, errors and other content."""
    status = response.status_code
    if 300 <= status < 400:
        to = response.headers.get("Location", "another address")
        raise CliError(Exit.AWAY, f"{where} redirects to {to}: give the right address in --url.")
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise CliError(
            CODES.get(status, Exit.AWAY), f"{where} answered {status}, but not as this API does: check --url."
        )
    if status < 300:
        return body
    error = body.get("error")
    told = error.get("message") if isinstance(error, dict) else body.get("error_message") or error
    request = error.get("request_id") if isinstance(error, dict) and status >= 500 else None
    if status == 401:
        told = f"Your token is not known there, or has expired: log in with {HOW}."
    raise CliError(
        CODES.get(status, Exit.REFUSED),
        f"{told or f'{where} answered {status}.'}" + (f" (request {request})" if request else ""),
    )


def _why(error: Exception) -> str:
    """Return the message of the operating system or of TLS in an error that libraries have wrapped.

    Without such a message return the first 300 characters of the error.
    """
    text = " ".join(str(error).split())
    found = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)|certificate verify failed: ([^(]+)", text)
    return next(filter(None, found.groups())).strip() if found else text[:300]
