"""Keystone: the service user's session, and what Keystone says of a token or a password.

Used by `cyborgweb.auth.authentication` and `cyborgweb.auth.login`; `service_session` also by whoever speaks to
another service of the
cloud. openstacksdk and keystoneauth1 cost as much to import as all of Django, so that waits for the first question.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from accelerators.domain.caller import Caller
from cyborgweb.auth.token_cache import REFUSED, Judged, TokenCheckUnavailableError, Tokens
from cyborgweb.monitoring import calls
from cyborgweb.settings.keys import keys
from drivers.configuration import ConfigurationError

TIMEOUT_S = 5.0
"""How long the service user's session waits for one answer, unless the cloud's configuration names a time."""
UNREACHABLE = "Keystone cannot be reached"
NOT_ALLOWED = "Keystone does not let the service user validate tokens: it needs the role service or admin"


@lru_cache(maxsize=1)
def service_session() -> Any:
    """A keystoneauth1 Session as the service user, of `CYBORG_CLOUD` or the `OS_…` variables; made without asking
    anyone. Logs in again by itself. Raises ConfigurationError with one sentence."""
    if not keys().has_cloud:
        raise ConfigurationError(
            "No cloud is configured: set CYBORG_CLOUD to one in clouds.yaml, or OS_AUTH_URL and its like"
        )
    import openstack.config
    from keystoneauth1.exceptions import ClientException
    from keystoneauth1.identity.generic.base import BaseGenericPlugin
    from openstack.exceptions import ConfigException

    try:
        session = openstack.config.get_cloud_region(cloud=keys().cloud or None).get_session()
    except (ConfigException, ClientException) as error:
        raise ConfigurationError(f"The service user's cloud is not usable: {error}") from None
    session.timeout = session.timeout or TIMEOUT_S
    if isinstance(session.auth, BaseGenericPlugin):
        # It would discover Identity's version first, and wait for its own lock for ever if a 401 is the answer (5.18).
        session.auth = session.auth.create_plugin(session, (3, 0), _v3(session.auth.auth_url))
    return calls.counted(session)


def _v3(url: str) -> str:
    return url.rstrip("/").removesuffix("/v3") + "/v3"


def auth_url() -> str:
    """Where the service user logs in, and everybody else unless told otherwise. Raises ConfigurationError."""
    if url := getattr(service_session().auth, "auth_url", None):
        return _v3(url)
    raise ConfigurationError("The service user's cloud names no Keystone: it needs an auth_url")


@lru_cache(maxsize=1)
def tokens() -> Tokens:
    """This process's memory of validated tokens."""
    return Tokens(judge)


def judge(token: str, allow_expired: bool) -> Judged:
    """Ask Keystone about a token, now. Raises TokenCheckUnavailableError."""
    with _answering():
        response = service_session().get(
            f"{auth_url()}/auth/tokens",
            params={"nocatalog": "1"} | ({"allow_expired": "1"} if allow_expired else {}),
            headers={"X-Subject-Token": token},
            raise_exc=False,
            log=False,
        )
    match response.status_code:
        case 200:
            return _read(response.content)
        case 401 | 403:
            raise TokenCheckUnavailableError(NOT_ALLOWED, unreachable=False)
        case 429:
            raise TokenCheckUnavailableError("Keystone has had too many questions", unreachable=False)
        case status if 400 <= status < 500:
            return REFUSED
    raise TokenCheckUnavailableError(f"{UNREACHABLE}: it answered {response.status_code}", unreachable=True)


@dataclass(frozen=True)
class Person:
    """Somebody who knew their password: who they are in the project they named, and their own domain's name."""

    caller: Caller
    domain: str


def log_in(name: str, password: str, domain: str, project: str) -> Person | None:
    """Ask Keystone about a password; None: it says no. Nothing is kept. Raises TokenCheckUnavailableError."""
    from keystoneauth1 import exceptions
    from keystoneauth1.identity.v3 import Password

    with _answering():
        person = Password(
            auth_url(),
            username=name,
            password=password,
            user_domain_name=domain,
            project_name=project,
            project_domain_name=domain,
            include_catalog=False,
        )
        try:
            access = person.get_access(service_session())
        except (exceptions.Unauthorized, exceptions.NotFound, exceptions.BadRequest):
            return None
    caller = Caller(access.username, access.user_id, frozenset(access.role_names), access.project_id or "")
    return Person(caller, access.user_domain_name)


@contextmanager
def _answering() -> Iterator[None]:
    """What keystoneauth1 raises, told as Unavailable: whether Keystone is away, or refuses the service user."""
    from keystoneauth1 import exceptions

    away = (
        exceptions.ConnectionError,
        exceptions.HttpServerError,
        exceptions.DiscoveryFailure,
        exceptions.EndpointNotFound,
    )
    try:
        yield
    except away as error:
        raise TokenCheckUnavailableError(f"{UNREACHABLE}: {_line(error)}", unreachable=True) from None
    except exceptions.Unauthorized as error:
        raise TokenCheckUnavailableError(
            f"Keystone refuses the service user: {_line(error)}", unreachable=False
        ) from None
    except (exceptions.ClientException, ConfigurationError) as error:
        raise TokenCheckUnavailableError(_line(error), unreachable=False) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _Named(msgspec.Struct):
    id: str = ""
    name: str = ""


class _Token(msgspec.Struct):
    expires_at: datetime
    user: _Named
    roles: list[_Named] = []
    project: _Named | None = None
    domain: _Named | None = None
    system: dict[str, bool] | None = None


class _Answer(msgspec.Struct):
    token: _Token


def _read(content: bytes) -> Judged:
    try:
        token = msgspec.json.decode(content, type=_Answer).token
    except msgspec.MsgspecError as error:
        raise TokenCheckUnavailableError(f"Keystone's answer cannot be read: {error}", unreachable=False) from None
    caller = Caller(
        name=token.user.name,
        user_id=token.user.id,
        roles=frozenset(role.name for role in token.roles),
        project_id=token.project.id if token.project else "",
        system_scope="all" if token.system else "",
        domain_id=token.domain.id if token.domain else "",
    )
    return Judged(caller, token.expires_at.timestamp())
