"""Ask Keystone about tokens and passwords, and make the service user's session, which is used for all other services of
the cloud, too.

openstacksdk and keystoneauth1 take as long to import as all of Django, so they are imported only when they are needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from accelerators.domain.caller import Caller
from cyborgweb.auth.token_cache import UNKNOWN_TOKEN, TokenCache, TokenCheckUnavailableError, TokenResult
from cyborgweb.errors import CyborgwebError
from cyborgweb.monitoring import calls
from cyborgweb.settings.keys import get_keys
from drivers.configuration import ConfigurationError

TIMEOUT_S = 5.0
"""Seconds that the service user's session waits for one answer, unless the cloud's configuration sets a timeout."""
DATE_PRECISION_S = 2.0
"""Seconds by which the header `Date` of an answer may differ from the clock that wrote it."""
SomeAnswer = TypeVar("SomeAnswer")
UNREACHABLE = "Keystone cannot be reached"
NOT_ALLOWED = "Keystone does not let the service user validate tokens: it needs the role service or admin"


@lru_cache(maxsize=1)
def service_session() -> Any:
    """Return this process's keystoneauth1 Session for the service user, from `CYBORG_CLOUD` or the `OS_…` variables.

    Creating it sends no request; it logs in when it is used, and again when its token has expired. Raises
    ConfigurationError if no cloud is configured, or if its configuration is not usable.
    """
    if not get_keys().has_cloud:
        raise ConfigurationError(
            "No cloud is configured: set CYBORG_CLOUD to one in clouds.yaml, or OS_AUTH_URL, OS_USERNAME …"
        )
    import openstack.config
    from keystoneauth1.exceptions import ClientException
    from keystoneauth1.identity.generic.base import BaseGenericPlugin
    from openstack.exceptions import ConfigException

    try:
        session = openstack.config.get_cloud_region(cloud=get_keys().cloud or None).get_session()
    except (ConfigException, ClientException) as error:
        raise ConfigurationError(f"The service user's cloud is not usable: {error}") from None
    session.timeout = session.timeout or TIMEOUT_S
    if isinstance(session.auth, BaseGenericPlugin):
        # The generic plugin discovers the Identity version first, and dead-locks on its own lock if the answer is 401
        # (keystoneauth1 5.18).
        session.auth = session.auth.create_plugin(session, (3, 0), _with_v3_path(session.auth.auth_url))
    return calls.count_calls(session)


def _with_v3_path(url: str) -> str:
    """Return the URL with exactly one `/v3` at its end."""
    return url.rstrip("/").removesuffix("/v3") + "/v3"


def get_auth_url() -> str:
    """Return the URL of Keystone, ending in `/v3`, at which the service user logs in. Tokens and passwords are checked
    there, too.

    Raises ConfigurationError if no usable cloud is configured, or if it names no Keystone. Sends no request.
    """
    if url := getattr(service_session().auth, "auth_url", None):
        return _with_v3_path(url)
    raise ConfigurationError("The service user's cloud names no Keystone: it needs an auth_url")


@lru_cache(maxsize=1)
def get_token_cache() -> TokenCache:
    """Return this process's only cache of Keystone's answers about tokens, which is created at the first call."""
    return TokenCache(validate_token)


def validate_token(token: str, allow_expired: bool) -> TokenResult:
    """Ask Keystone about a token, without the cache. Return its answer; UNKNOWN_TOKEN if it does not know the token.

    `allow_expired` also accepts tokens that expired recently. Raises TokenCheckUnavailableError if Keystone gave no
    answer about the token: unreachable, a server error, throttled, the service user refused, or an unreadable answer.
    """
    with _translate_errors():
        response = service_session().get(
            f"{get_auth_url()}/auth/tokens",
            params={"nocatalog": "1"} | ({"allow_expired": "1"} if allow_expired else {}),
            headers={"X-Subject-Token": token},
            raise_exc=False,
            log=False,
        )
    match response.status_code:
        case 200:
            return _parse_token(response.content, response.headers.get("Date", ""))
        case 401 | 403:
            raise TokenCheckUnavailableError(NOT_ALLOWED, unreachable=False)
        case 429:
            raise TokenCheckUnavailableError("Keystone throttles requests (429)", unreachable=False)
        case status if 400 <= status < 500:
            return UNKNOWN_TOKEN
    raise TokenCheckUnavailableError(f"{UNREACHABLE}: it answered {response.status_code}", unreachable=True)


@dataclass(frozen=True)
class AuthenticatedPerson:
    """A person whose password Keystone accepted: `caller` is the person in the project that was named at the login,
    `domain` the name of the domain that the person belongs to.
    """

    caller: Caller
    domain: str


def check_password(
    name: str, password: str, domain: str, project: str, project_domain: str
) -> AuthenticatedPerson | None:
    """Ask Keystone to check a password; return the person, or None if Keystone refuses the login: wrong name, password,
    domain or project.

    `domain` is the name of the user's domain, `project_domain` that of the project's. Password and token are not
    stored. Raises TokenCheckUnavailableError if Keystone cannot be asked.
    """
    from keystoneauth1 import exceptions
    from keystoneauth1.identity.v3 import Password

    with _translate_errors():
        password_plugin = Password(
            get_auth_url(),
            username=name,
            password=password,
            user_domain_name=domain,
            project_name=project,
            project_domain_name=project_domain,
            include_catalog=False,
        )
        try:
            access = password_plugin.get_access(service_session())
        except (exceptions.Unauthorized, exceptions.NotFound, exceptions.BadRequest):
            return None
    # A token of version 3 always names its user, their domain and the roles.
    assert access.username is not None and access.user_id is not None
    assert access.user_domain_name is not None and access.role_names is not None
    caller = Caller(access.username, access.user_id, frozenset(access.role_names), access.project_id or "")
    return AuthenticatedPerson(caller, access.user_domain_name)


class ListingNotAllowedError(CyborgwebError):
    """Keystone does not let the service user read users or role assignments. The text says so."""


class NoAnswerAboutOneError(TokenCheckUnavailableError):
    """Keystone works, but gave no answer about one user or project: it may give answers about others."""


@dataclass(frozen=True)
class Account:
    """A user of Keystone. The roles of one who `is_federated` can come from groups that only a login tells."""

    name: str
    is_enabled: bool
    is_federated: bool


def find_account(user_id: str) -> Account | None:
    """Ask Keystone about the user with this id; return None if it knows none.

    The answer that there is none counts only if the same Keystone finds the service user itself: another one, or a
    wrong address, would know nobody. Raises ListingNotAllowedError if the service user may not ask, and
    TokenCheckUnavailableError if Keystone gives no answer.
    """
    found = _get_identity(f"users/{quote(user_id, safe='')}", _UserAnswer)
    if found is None:
        with _translate_errors():
            own_id = service_session().get_user_id() or ""
        if _get_identity(f"users/{quote(own_id, safe='')}", _UserAnswer) is None:
            raise TokenCheckUnavailableError("Keystone does not find the service user itself", unreachable=False)
        return None
    return Account(found.user.name, found.user.enabled, bool(found.user.federated))


def list_roles(user_id: str, project_id: str) -> frozenset[str]:
    """Ask Keystone for the names of the roles that a user has in a project, also by groups, by inheritance and implied
    by other roles. Empty if the user or the project does not exist: Keystone answers 404 then. Call it only after
    `find_account` has found the user, so that this 404 does not come from a wrong address. Raises like `find_account`;
    ListingNotAllowedError also if the service user's token is for a domain, to which Keystone would limit its answer.
    """
    with _translate_errors():
        scope = service_session().auth.get_access(service_session())
    if not (scope.project_scoped or scope.system_scoped):
        raise ListingNotAllowedError(
            "Keystone tells the service user nothing about the roles in other domains, because its token is for a"
            " domain: give it a project instead of a domain."
        )
    query = {"user.id": user_id, "scope.project.id": project_id, "effective": "1", "include_names": "1"}
    found = _get_identity("role_assignments", _AssignmentsAnswer, query)
    return frozenset(one.role.name for one in found.role_assignments) if found else frozenset()


def is_project_enabled(project_id: str) -> bool:
    """Ask Keystone whether a project and its domain are enabled. True for a project that Keystone does not know: nobody
    has roles in it. Raises like `find_account`.
    """
    found = _get_identity(f"projects/{quote(project_id, safe='')}", _ProjectAnswer)
    if found is None or not found.project.enabled:
        return found is None
    domain = _get_identity(f"domains/{quote(found.project.domain_id, safe='')}", _DomainAnswer)
    return domain is None or domain.domain.enabled


def _get_identity(path: str, answer: type[SomeAnswer], query: dict[str, str] | None = None) -> SomeAnswer | None:
    """Return Keystone's answer to a GET with the service user's token; None for 404. Raises like `find_account`."""
    with _translate_errors():
        url = f"{get_auth_url()}/{path}"
        response = service_session().get(url, params=query or {}, raise_exc=False, log=False)
    match response.status_code:
        case 200:
            try:
                return msgspec.json.decode(response.content, type=answer)
            except msgspec.MsgspecError as error:
                reason = f"Keystone's answer cannot be read: {error}"
                raise NoAnswerAboutOneError(reason, unreachable=False) from None
        case 403:
            raise ListingNotAllowedError(
                "Keystone does not let the service user read users and role assignments (403): it needs the role admin,"
                " or Keystone's rules identity:get_user, identity:list_role_assignments, identity:get_project and"
                " identity:get_domain must allow it."
            )
        case 404:
            return None
        case 500:  # for example, the directory that has this user is broken
            raise NoAnswerAboutOneError("Keystone answered 500", unreachable=True)
        case status:
            raise TokenCheckUnavailableError(f"Keystone answered {status}", unreachable=status >= 500)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn keystoneauth1's errors and ConfigurationError into TokenCheckUnavailableError.

    `unreachable` of that error is True if Keystone did not answer as it should (no connection, a server error, no
    endpoint), and False for everything else, such as a refused service user or an unusable configuration.
    """
    from keystoneauth1 import exceptions

    unreachable_errors = (
        exceptions.ConnectionError,
        exceptions.HttpServerError,
        exceptions.DiscoveryFailure,
        exceptions.EndpointNotFound,
    )
    try:
        yield
    except unreachable_errors as error:
        raise TokenCheckUnavailableError(f"{UNREACHABLE}: {_one_line(error)}", unreachable=True) from None
    except exceptions.Unauthorized as error:
        raise TokenCheckUnavailableError(
            f"Keystone refuses the service user: {_one_line(error)}", unreachable=False
        ) from None
    except (exceptions.ClientException, ConfigurationError) as error:
        raise TokenCheckUnavailableError(_one_line(error), unreachable=False) from None


def _one_line(error: Exception) -> str:
    """Return the error's message on one line, cut to 300 characters."""
    return " ".join(str(error).split())[:300]


def _measure_lead(date: str) -> float:
    """Return by how many seconds this machine's clock is ahead of the one that wrote an HTTP header `Date`; 0 if that
    is no date, or if the difference is no larger than the header's precision."""
    try:
        lead_s = time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return 0.0
    return lead_s if abs(lead_s) > DATE_PRECISION_S else 0.0


class _Reference(msgspec.Struct):
    """A user, role, project or domain in Keystone's answer. A field that is missing is ''."""

    id: str = ""
    name: str = ""


class _TokenDocument(msgspec.Struct):
    """The fields of a token that are read from Keystone's answer; other fields are ignored."""

    expires_at: datetime
    user: _Reference
    roles: list[_Reference] = []
    project: _Reference | None = None
    domain: _Reference | None = None
    system: dict[str, bool] | None = None


class _User(msgspec.Struct):
    """A user in Keystone's answer. `federated` names the identity providers of a federated user."""

    name: str
    enabled: bool = True
    federated: list[Any] = []


class _UserAnswer(msgspec.Struct):
    """Keystone's answer to `GET /v3/users/{id}`."""

    user: _User


class _Enabled(msgspec.Struct):
    """A project or domain in Keystone's answer."""

    enabled: bool = True
    domain_id: str = ""


class _ProjectAnswer(msgspec.Struct):
    """Keystone's answer to `GET /v3/projects/{id}`."""

    project: _Enabled


class _DomainAnswer(msgspec.Struct):
    """Keystone's answer to `GET /v3/domains/{id}`."""

    domain: _Enabled


class _Assignment(msgspec.Struct):
    """A role assignment in Keystone's answer."""

    role: _Reference


class _AssignmentsAnswer(msgspec.Struct):
    """Keystone's answer to `GET /v3/role_assignments`."""

    role_assignments: list[_Assignment]


class _TokenAnswer(msgspec.Struct):
    """Keystone's answer to `GET /v3/auth/tokens`."""

    token: _TokenDocument


def _parse_token(content: bytes, date: str) -> TokenResult:
    """Return Keystone's JSON answer about a token as a TokenResult. Raises TokenCheckUnavailableError if it cannot be
    read.

    The expiry in it is converted from Keystone's clock to this machine's: `date` is the header `Date` of the answer.
    Without it the two clocks count as equal.
    """
    try:
        token = msgspec.json.decode(content, type=_TokenAnswer).token
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
    return TokenResult(caller, token.expires_at.timestamp() + _measure_lead(date))
