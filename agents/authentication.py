"""Enrolment of agents: join tokens, binding a key to a host, and the challenge of each connection.

`Challenges`, `verify_credential`, `read_credential` and `build_denial` use no database, so that they can be called on
the event loop; `find_enrolled`, `identify_or_enrol` and `create_join_token` use it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from django.conf import settings
from django.core.signing import BadSignature, Signer
from django.db import connection, transaction
from django.db.models.functions import Greatest, Now

from accelerators import conductor
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import Host
from accelerators.runtime import database_clock
from accelerators.runtime.registry import Registry
from agents import credentials, key_revocation, wire
from agents.errors import AgentsError
from agents.models import Agent, JoinToken, Lease

CONDUCTOR_ADDRESS: Registry[Callable[[str, bool], tuple[str, str]]] = Registry("address for agents", single=True)
"""Function that returns the address at which agents reach the conductor, and the certificate fingerprint that they
pin. It gets the requested address ('' for the default), and whether nothing is to be pinned. `manage.py join_token`
calls it."""
CHALLENGE_LIFETIME_S = 30.0
"""Seconds for which a challenge is valid, by the database's clock. It is also refused if it was issued more than this
number of seconds in the future."""
MAX_EPOCH_LEAP = 2**33
"""Maximum difference between a new epoch and the highest known one, or the current Unix time if that is greater.

An agent's epoch begins with its clock's seconds and counts up. The limit keeps somebody who has the key for a while
from using up all epochs of the agent."""
MAX_REMEMBERED_NONCES = 100_000
"""Maximum number of nonces of which this process remembers that they were presented."""
AUTOMATIC_CREATOR = "prepare"
"""`created_by` of the tokens that every start of the one-command mode makes. They can enrol an agent, but they cannot
lift a bar, which only a person may do."""

FIND_ENROLLED_AGENTS = """
WITH asked AS (
  SELECT x.*, x.has_token OR EXISTS (SELECT FROM agents_agent a WHERE a.public_key = x.public_key) AS may_be_admitted
  FROM unnest(%(keys)s::text[], %(has_token)s::bool[], %(nonces)s::text[], %(issued)s::float8[]) WITH ORDINALITY
    AS x(public_key, has_token, nonce, issued_at, n)
), used AS (
  INSERT INTO agents_usednonce (nonce) SELECT nonce FROM asked
  WHERE may_be_admitted AND abs(extract(epoch FROM now()) - issued_at) <= %(lifetime)s
  ON CONFLICT DO NOTHING RETURNING nonce
)
SELECT used.nonce IS NOT NULL OR NOT asked.may_be_admitted, extract(epoch FROM now())::float8, a.public_key,
       h.id, h.name, h.node, coalesce(l.epoch, 0),
       CASE WHEN EXISTS (SELECT 1 FROM spool s WHERE s.host_id = h.id) THEN '' ELSE h.applied_hash END,
       CASE WHEN a.id IS NOT NULL THEN nextval('agents_connection') END,
       a.barred, a.barred_reason, a.rotate_asked_at IS NOT NULL, l.seen_at
FROM asked LEFT JOIN used USING (nonce) LEFT JOIN agents_agent a ON a.public_key = asked.public_key
LEFT JOIN accelerators_host h ON h.id = a.host_id LEFT JOIN agents_lease l ON l.host_id = h.id ORDER BY asked.n
"""
"""Record nonces as used, and read the fields of EnrolledAgent for enrolled keys; each takes a new connection number.

A nonce that is recorded already, by whichever gateway, is not recorded again, and neither is one that is expired by the
database's clock. That of a client with neither an enrolled key nor a token is not recorded, because this client is
refused in any case, and must not fill the table. Plain SQL, because every handshake runs it (measured: the rows of the
storm in `make bench`), and `nextval` is a function of PostgreSQL.
"""


class ConnectionRejectedError(AgentsError):
    """Raised to refuse a request of an agent: an HTTP status, a code for programs, a sentence for people.

    `retry_after` is sent with a 503: the seconds after which the agent should come back. `proven_host` is the host
    whose enrolled key or known join token the client has used, '' if it has proven nothing.
    """

    def __init__(self, status: int, code: str, reason: str, retry_after: int = 5, proven_host: str = "") -> None:
        super().__init__(reason)
        self.status, self.code, self.reason = status, code, reason
        self.retry_after, self.proven_host = retry_after, proven_host


def read_credential(scope: Any) -> credentials.Credential:
    """Return the credential in an ASGI request's Authorization header. Its signature is not verified here.

    Raise ConnectionRejectedError (401) if the header is missing or malformed.
    """
    value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    try:
        return credentials.parse_authorization(value.decode("latin-1"))
    except wire.MalformedMessageError as error:
        raise ConnectionRejectedError(401, "credential", str(error)) from None


def build_denial(refused: ConnectionRejectedError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the JSON body (`error`, `code`) of the HTTP response for a refusal.

    A 401 gets `WWW-Authenticate`, a 503 `Retry-After`.
    """
    body = msgspec.json.encode({"error": refused.reason, "code": refused.code})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", credentials.SCHEME.encode()))
    if refused.status == 503:
        headers.append((b"retry-after", str(refused.retry_after).encode()))
    return headers, body


@dataclass(frozen=True, slots=True)
class EnrolledAgent:
    """An enrolled agent, at the time it connects.

    `epoch` is the highest one seen from it. `applied_hash` is the hash of the report last applied for its host; '' if
    there is none, and while a report waits to be merged. `connection_number` belongs to this connection: later
    connections have higher numbers, also at other gateways. `barred` is a `BarKind`, '' if the agent may connect.
    `rotation_requested`: an operator has asked for a new key. `last_heard` is what its lease says, None if it
    has none.
    """

    public_key: str
    host_id: int
    host: str
    node: str
    epoch: int
    applied_hash: str
    connection_number: int
    barred: str = ""
    barred_reason: str = ""
    rotation_requested: bool = False
    last_heard: datetime | None = None


def highest_allowed_epoch(known: int) -> int:
    """Return the highest epoch to accept from an agent whose highest known epoch is `known`.

    The limit is MAX_EPOCH_LEAP above `known`, or above the database's Unix time in seconds if that is greater.
    """
    return max(known, int(database_clock.estimate_timestamp())) + MAX_EPOCH_LEAP


class IssuedNonce(NamedTuple):
    """A nonce with a valid signature: its random part, and when it was issued (Unix time of the database's clock)."""

    random: str
    issued_at: float


class Challenges:
    """Makes challenges that every gateway of this installation can check, because it has the same secret key.

    A nonce consists of random characters, the time of its issue, and a signature with Django's secret key; one with a
    key of SECRET_KEY_FALLBACKS is valid, too. `find_enrolled` checks its age, and that no gateway has accepted it. The
    nonces that were presented here are also kept in memory, so that repeated ones cost no work.
    """

    def __init__(self) -> None:
        self._signer = Signer(salt="agents.challenge")
        self._presented: dict[str, float] = {}

    def create(self) -> credentials.Challenge:
        """Make a new challenge. Nothing is stored. It contains the database's time, so the clocks of the gateways may
        differ."""
        issued_at = database_clock.estimate_timestamp()
        nonce = self._signer.sign(f"{secrets.token_urlsafe(18)}.{issued_at:.3f}")
        return credentials.Challenge(nonce, CHALLENGE_LIFETIME_S, wire.VERSIONS)

    def open_nonce(self, nonce: str) -> IssuedNonce | None:
        """Return the parts of a nonce; None if its signature is not valid, or if it was presented here before."""
        now = time.monotonic()
        while self._presented:
            oldest = next(iter(self._presented))
            if self._presented[oldest] > now - 3 * CHALLENGE_LIFETIME_S and (
                len(self._presented) < MAX_REMEMBERED_NONCES
            ):
                break
            del self._presented[oldest]
        try:
            random, _, issued_at = self._signer.unsign(nonce).partition(".")
        except BadSignature:
            return None
        if random in self._presented:
            return None
        self._presented[random] = now
        return IssuedNonce(random, float(issued_at))


def reject_nonce() -> ConnectionRejectedError:
    """Return the error (401) for a nonce that is not valid, or not any more."""
    return ConnectionRejectedError(401, "challenge", "the challenge is unknown, used or expired: ask for a new one")


def verify_credential(
    credential: credentials.Credential, challenges: Challenges, fingerprints: Iterable[str]
) -> tuple[str, IssuedNonce]:
    """Check that a credential signs one of our challenges with its own key; raise ConnectionRejectedError (401)
    otherwise.

    Return the fingerprint in the signed bytes, which is that of the certificate that the agent pins ('' for none), and
    the nonce, which `find_enrolled` has yet to accept. The fingerprint must be one of `fingerprints`: otherwise the
    agent meant another server.
    """
    nonce = challenges.open_nonce(credential.nonce)
    if nonce is None:
        raise reject_nonce()
    signed_fields = credential.host, credential.node, credential.epoch, credential.nonce
    for fingerprint in fingerprints:
        if credentials.is_valid_signature(
            credential.public_key, credential.signature, credentials.build_connect_bytes(*signed_fields, fingerprint)
        ):
            return fingerprint, nonce
    raise ConnectionRejectedError(
        401, "signature", "the signature does not fit this key, our challenge and our certificate"
    )


def create_join_token(
    host: str,
    *,
    address: str,
    hours: int,
    created_by: str,
    fingerprint: str = "",
    source: EventSource = EventSource.PERSON,
) -> str:
    """Create a join token for `host`, valid for `hours`, and return its join string. Record the event `agent.invited`.

    The row of the host, if there is one, is locked, so that its removal cannot begin meanwhile: a token that was made
    before the removal expires with it. Only a hash of the secret is stored, so the string cannot be shown again.
    `address`, `fingerprint` (of the pinned certificate, '' for none) and, with a pinned certificate, the announcement
    key go into the string only. Raises RefusedError CONFLICT while the host is being removed.
    """
    secret = secrets.token_urlsafe(24)
    source = EventSource.SYSTEM if created_by == AUTOMATIC_CREATOR else source
    with conductor.writing():
        row = Host.objects.select_for_update(no_key=True).filter(name=host).first()
        if row is not None and row.removing_since:
            raise RefusedError(RefusalReason.CONFLICT, f"host {host} is being removed: wait until it is gone")
        JoinToken.objects.create(
            host_name=host,
            secret_hash=_hash_secret(secret),
            created_by=created_by,
            expires_at=database_clock.now() + timedelta(hours=hours),
        )
        changes = {"join token": [None, f"valid for {hours} hours"]}
        conductor.record_event("agent.invited", source, created_by or "join token", host_name=host, changes=changes)
    announcement_key = settings.KEYS.agent_announcement_key if fingerprint else ""
    return credentials.encode_join_string(address, fingerprint, host, secret, announcement_key)


def find_join_token(join_string: str) -> JoinToken:
    """Return the row of the join token in a join string; raise JoinToken.DoesNotExist if there is none."""
    return JoinToken.objects.get(secret_hash=_hash_secret(credentials.parse_join_string(join_string).secret))


def _hash_secret(secret: str) -> str:
    """Return the SHA-256 of a join token's secret in hexadecimal; only this hash is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Lookup(NamedTuple):
    """The result of looking up the key and the nonce of one request in the database.

    `is_accepted` is False if the nonce is expired, or was used before at any gateway. `agent` is None if the key is not
    enrolled. `database_time` is the database's Unix time.
    """

    is_accepted: bool
    database_time: float
    agent: EnrolledAgent | None


def find_enrolled(requests: Sequence[tuple[str, bool, IssuedNonce | None]]) -> list[Lookup]:
    """Look up the keys of requests, and use up their nonces; return what was found, in the same order. Costs one
    statement.

    A request is a key, whether the credential has a token, and a nonce; a nonce of None was accepted earlier. The nonce
    of a client without a token whose key is not enrolled is neither recorded nor checked. Each enrolled agent gets a
    new connection number.
    """
    nonces = [nonce or (None, None) for _, _, nonce in requests]
    parameters: dict[str, Any] = {
        "keys": [key for key, _, _ in requests],
        "has_token": [has_token for _, has_token, _ in requests],
        "nonces": [random for random, _ in nonces],
        "issued": [issued_at for _, issued_at in nonces],
        "lifetime": CHALLENGE_LIFETIME_S,
    }
    with connection.cursor() as cursor:
        cursor.execute(FIND_ENROLLED_AGENTS, parameters)
        return [
            Lookup(is_recorded or nonce is None, now, EnrolledAgent(*row) if row[0] else None)
            for (_, _, nonce), (is_recorded, now, *row) in zip(requests, cursor.fetchall(), strict=True)
        ]


def needs_enrolment(credential: credentials.Credential, identity: EnrolledAgent | None) -> bool:
    """Return whether `identify_or_enrol` has to write: it enrols the agent by a token, or stores its changed node."""
    if identity is not None and identity.host == credential.host and not identity.barred:
        return identity.node != credential.node
    return bool(credential.token)


def identify_or_enrol(credential: credentials.Credential, identity: EnrolledAgent | None) -> EnrolledAgent:
    """Return the identity for a verified credential; enrol the agent if necessary.

    `identity` is what `find_enrolled` has found for the credential's key, None if it is not enrolled. If it belongs to
    the same host and is not barred, it is returned, and a changed `node` is stored; then no report counts as applied
    any more. Another host's `node` is refused. Otherwise the agent is enrolled by its token in a transaction. Using a
    token expires the older tokens of its host, so that a replaced key cannot come back with the token it once had.
    Raise ConnectionRejectedError (403) if there is no token, if the token is not valid for this host and key, if the
    node belongs to another host, or if a bar forbids the enrolment. Its `proven_host` is the host of the key, else that
    of the token.
    """
    with naming_proven_host(identity.host if identity else ""):
        if identity is not None and identity.host == credential.host and not identity.barred:
            if identity.node != credential.node:
                _ensure_host(credential, credential.host)
                return replace(identity, node=credential.node, applied_hash="")
            return identity
        if not credential.token:
            if identity is not None and identity.barred:
                reason = key_revocation.explain_bar(identity.barred, identity.barred_reason, identity.host)
                raise ConnectionRejectedError(403, identity.barred, reason)
            reason = f"this key belongs to host {identity.host!r}" if identity else "this key is not enrolled"
            raise ConnectionRejectedError(
                403, "not-enrolled", f"{reason}: make a token with `manage.py join_token {credential.host}`"
            )
        return _enrol_with_token(credential)


@contextmanager
def naming_proven_host(host: str) -> Iterator[None]:
    """Store `host`, unless it is '', as the `proven_host` of a ConnectionRejectedError raised in the `with` block."""
    try:
        yield
    except ConnectionRejectedError as refused:
        refused.proven_host = host or refused.proven_host
        raise


def _ensure_host(credential: credentials.Credential, actor: str) -> Host:
    """Return the credential's host, locked; create it, or store its node, if needed (`conductor.ensure_host`).

    Raise ConnectionRejectedError (403) if its node belongs to another host.
    """
    try:
        return conductor.ensure_host(credential.host, credential.node, actor)
    except RefusedError as refused:
        raise ConnectionRejectedError(403, "foreign-node", refused.text) from None


def _enrol_with_token(credential: credentials.Credential) -> EnrolledAgent:
    """Bind the credential's key to its host by its token, and return the identity.

    The token and the host's agent are locked. The host is created if it is new. A host's agent with another key, and
    another host's agent with this key, are deleted. The new agent has a lease from now on, as after a heartbeat. Raise
    ConnectionRejectedError (403) if the token is not valid for this host and key, or if a bar forbids it.
    """
    with transaction.atomic():
        token = JoinToken.objects.select_for_update().filter(secret_hash=_hash_secret(credential.token)).first()
        if token is None:
            raise ConnectionRejectedError(
                403, "token-unknown", f"the join token is not known here: {_explain_new_token(credential)}"
            )
        with naming_proven_host(token.host_name), conductor.writing():
            _check_token(token, credential)
            host = _ensure_host(credential, token.created_by or "join token")
            if host.removing_since:
                reason = f"host {host.name!r} is being removed: wait until it is gone, then join again"
                raise ConnectionRejectedError(403, "host-removing", reason)
            agent = Agent.objects.select_for_update().filter(host=host).first()
            _check_bar(agent, token, credential)
            if agent is None or agent.public_key != credential.public_key:
                Agent.objects.filter(host=host).delete()
                Agent.objects.filter(public_key=credential.public_key).delete()
                Agent.objects.create(host=host, public_key=credential.public_key)
                _renew_lease(host)
                change = {"public_key": [agent.public_key if agent else None, credential.public_key]}
                conductor.record_event(
                    "agent.enrolled", EventSource.AGENT, host.name, host=host, changes=change, reason="join token"
                )
        JoinToken.objects.filter(host_name=host.name, pk__lt=token.pk).update(expires_at=Now())
        JoinToken.objects.filter(pk=token.pk).update(public_key=credential.public_key, used_at=Now())
    (lookup,) = find_enrolled([(credential.public_key, False, None)])
    assert lookup.agent
    return lookup.agent


def _renew_lease(host: Host) -> None:
    """Store that the agent of the host was heard now; create the lease if there is none.

    Another transaction may renew the lease while this one waits for the row, so the lease only moves forward.
    """
    Lease.objects.bulk_create([Lease(host=host, seen_at=Now())], ignore_conflicts=True)
    Lease.objects.filter(host=host).update(seen_at=Greatest("seen_at", Now()))


def _check_bar(agent: Agent | None, token: JoinToken, credential: credentials.Credential) -> None:
    """Raise ConnectionRejectedError if a bar forbids this enrolment.

    A barred host can come back only with a token that a person made, and never with a barred key.
    """
    if agent is not None and agent.barred and token.created_by == AUTOMATIC_CREATOR:
        raise ConnectionRejectedError(
            403, agent.barred, key_revocation.explain_bar(agent.barred, agent.barred_reason, credential.host)
        )
    if Agent.objects.filter(public_key=credential.public_key).exclude(barred="").exists():
        sentence = "the token is valid, but this key is barred: move identity.key away and join with a new key"
        raise ConnectionRejectedError(403, wire.CODE_KEY_BARRED, sentence)


def _explain_new_token(credential: credentials.Credential) -> str:
    """Return the remedy for a token that cannot be used."""
    return f"make a new one with `manage.py join_token {credential.host}`"


def _check_token(token: JoinToken, credential: credentials.Credential) -> None:
    """Raise ConnectionRejectedError unless the token is for this host, has not expired, and has not bound another
    key."""
    remedy = _explain_new_token(credential)
    if token.host_name != credential.host:
        raise ConnectionRejectedError(
            403, "token-host", f"the join token is for host {token.host_name!r}, not {credential.host!r}: {remedy}"
        )
    if token.expires_at < database_clock.now():
        raise ConnectionRejectedError(
            403, "token-expired", f"the join token expired at {token.expires_at:%Y-%m-%d %H:%M} UTC: {remedy}"
        )
    if token.public_key and token.public_key != credential.public_key:
        raise ConnectionRejectedError(403, "token-used", f"the join token has bound another key: {remedy}")
