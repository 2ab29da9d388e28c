"""Client for the part of Placement's API that this product uses, on a keystoneauth1 session. Free of Django.

Agents use it on compute hosts, too. Each call sends the microversion that it needs. The errors tell the caller how to
react: after `PlacementUnavailableError` retry later, after `PlacementConflictError` read again and retry, after
`PlacementRejectedError` a person has to act.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from placement_sync.allocations import Consumer
from placement_sync.reconcile import Inventory, Observed

TIMEOUT_S = 10.0
TREE, WRITE, TRAITS, CLASSES, INVENTORY, MOVE = "1.14", "1.20", "1.6", "1.7", "1.26", "1.37"
"""Microversions, in this order: for `in_tree`; for a POST that returns the provider; for traits; for PUT of a resource
class; for `reserved` equal to `total`; for a change of the parent.
"""
CODES = "1.23"
"""Microversion from which errors have codes."""
CONSUMER = "1.28"
"""Microversion from which consumers have generations. From 1.38 on a write must name the consumer type; with 1.28 the
type stays as it is.
"""


class PlacementUnavailableError(Exception):
    """Placement cannot be reached, is too slow, throttles, refuses the credentials, or answers unusably.

    Statuses: 401, 403, 408, 429 and 5xx. An answer is unusable if it is not a JSON object, or is empty after a GET.
    """


class PlacementConflictError(Exception):
    """Another writer changed the object first, or the object is in use; `code` is Placement's error code."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class PlacementRejectedError(Exception):
    """Placement refuses the request; a retry would be refused, too."""


class WriterStoppedError(Exception):
    """The caller may not write any more, for example because the writer changed.

    `before_call` raises it; no further call is sent.
    """


CONCURRENT = "placement.concurrent_update"
IN_USE = frozenset({"placement.inventory.inuse", "placement.resource_provider.inuse"})


class Placement:
    """A connection to Placement that counts its calls in `reads` and `writes`. Not thread-safe.

    `before_call` runs before each call and may raise WriterStoppedError. `known_names` caches which custom resource
    classes and traits exist; several clients may share one set.
    """

    def __init__(
        self,
        session: Any,
        endpoint: str = "",
        timeout_s: float = TIMEOUT_S,
        before_call: Callable[[], None] = lambda: None,
        words: set[str] | None = None,
    ) -> None:
        self._session, self._timeout_s = session, timeout_s
        self._where = {"endpoint_override": endpoint} if endpoint else {}
        self._before_call = before_call
        self._words = set() if words is None else words
        self.reads = self.writes = 0

    def root(self, name: str) -> Observed | None:
        """Return the compute provider with this name, without inventories and traits, or None if there is none."""
        found = self._get(f"/resource_providers?name={quote(name, safe='')}", TREE)["resource_providers"]
        return _observed(found[0]) if found else None

    def tree(self, root: str) -> dict[str, Observed]:
        """Return every provider of the tree by uuid, in one read.

        Each has its name, parent and generation, but no inventories and no traits.
        """
        found = self._get(f"/resource_providers?in_tree={root}", TREE)["resource_providers"]
        return {entry["uuid"]: _observed(entry) for entry in found}

    def provider(self, uuid: str) -> Observed | None:
        """Return one provider of any tree with its inventories and traits, or None if it does not exist.

        Costs up to 3 reads.
        """
        answer = self._call("GET", f"/resource_providers/{uuid}", TREE, missing=True)
        return None if answer is None else self.filled(_observed(answer))

    def filled(self, bare: Observed) -> Observed:
        """Read the provider's inventories and traits, and return it with them. Costs 2 reads.

        Raises PlacementConflictError if the provider changed between the two reads.
        """
        inventories = self._get(f"/resource_providers/{bare.uuid}/inventories", INVENTORY)
        traits = self._get(f"/resource_providers/{bare.uuid}/traits", TRAITS)
        known = {name: _inventory(entry) for name, entry in inventories["inventories"].items()}
        generation = max(inventories["resource_provider_generation"], traits["resource_provider_generation"])
        if inventories["resource_provider_generation"] != traits["resource_provider_generation"]:
            raise PlacementConflictError(
                "placement.concurrent_update", f"provider {bare.uuid} changed while it was read"
            )
        return Observed(bare.uuid, bare.name, bare.parent, generation, known, frozenset(traits["traits"]))

    def allocations(self, uuid: str) -> dict[str, dict[str, int]]:
        """Return the allocations of one provider: consumer → resource class → amount.

        Empty if the provider does not exist.
        """
        found = self._call("GET", f"/resource_providers/{uuid}/allocations", TREE, missing=True)
        if found is None:
            return {}
        return {consumer: dict(entry["resources"]) for consumer, entry in found["allocations"].items()}

    def consumer(self, uuid: str) -> Consumer:
        """Return all allocations of one consumer, with its generation (None if it has no allocations)."""
        found = self._get(f"/allocations/{uuid}", CONSUMER)
        try:
            has = {provider: dict(entry["resources"]) for provider, entry in found["allocations"].items()}
            if not has:
                return Consumer(uuid)
            return Consumer(uuid, int(found["consumer_generation"]), has, found["project_id"], found["user_id"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PlacementUnavailableError(
                f"GET /allocations/{uuid}: the answer does not describe a consumer"
            ) from None

    def allocate(self, uuid: str, body: Mapping[str, Any]) -> None:
        """Replace all allocations of one consumer.

        Raises PlacementConflictError with the code CONCURRENT_UPDATE if its generation has changed.
        """
        self._write("PUT", f"/allocations/{uuid}", CONSUMER, body)

    def create(self, uuid: str, name: str, parent: str) -> int:
        """Create a provider and return its generation."""
        body = {"uuid": uuid, "name": name, "parent_provider_uuid": parent}
        return int(self._write("POST", "/resource_providers", WRITE, body)["generation"])

    def move(self, uuid: str, name: str, parent: str) -> int:
        """Set the name and the parent of a provider and return its new generation."""
        body = {"name": name, "parent_provider_uuid": parent}
        return int(self._write("PUT", f"/resource_providers/{uuid}", MOVE, body)["generation"])

    def set_inventories(self, uuid: str, generation: int, inventories: Mapping[str, Inventory]) -> int:
        """Replace all inventories of a provider and return its new generation.

        Creates missing custom resource classes first.
        """
        self._ensure(inventories, "/resource_classes/", CLASSES)
        body = {"resource_provider_generation": generation, "inventories": inventories}
        answer = self._write("PUT", f"/resource_providers/{uuid}/inventories", INVENTORY, body)
        return int(answer["resource_provider_generation"])

    def set_traits(self, uuid: str, generation: int, traits: Iterable[str]) -> int:
        """Replace all traits of a provider and return its new generation. Creates missing custom traits first."""
        names = sorted(traits)
        self._ensure(names, "/traits/", TRAITS)
        body = {"resource_provider_generation": generation, "traits": names}
        return int(
            self._write("PUT", f"/resource_providers/{uuid}/traits", TRAITS, body)["resource_provider_generation"]
        )

    def delete(self, uuid: str) -> None:
        """Delete a provider; succeed if it does not exist.

        Raises PlacementConflictError with a code of IN_USE_CODES while something is allocated.
        """
        self._write("DELETE", f"/resource_providers/{uuid}", CODES, None, missing=True)

    def _ensure(self, names: Iterable[str], path: str, version: str) -> None:
        """Create each custom resource class or trait that is not known to exist. Standard names always exist."""
        for name in names:
            if name.startswith("CUSTOM_") and path + name not in self._words:
                self._write("PUT", path + name, version, None)
                self._words.add(path + name)

    def _get(self, path: str, version: str) -> dict[str, Any]:
        return self._call("GET", path, version) or {}

    def _write(self, method: str, path: str, version: str, body: Any, missing: bool = False) -> dict[str, Any]:
        return self._call(method, path, version, body, missing=missing) or {}

    def _call(
        self, method: str, path: str, version: str, body: Any = None, missing: bool = False
    ) -> dict[str, Any] | None:
        """Send one call and return the decoded answer: `{}` if it has no content, None for a 404 if `may_be_missing`.

        Raises PlacementUnavailableError, PlacementConflictError, PlacementRejectedError, and whatever `before_call`
        raises.
        """
        from keystoneauth1.exceptions import ClientException, EndpointNotFound

        self._before_call()
        self.reads, self.writes = (self.reads + 1, self.writes) if method == "GET" else (self.reads, self.writes + 1)
        began = time.monotonic()
        try:
            answer = self._session.request(
                path,
                method,
                endpoint_filter={"service_type": "placement"},
                headers={"OpenStack-API-Version": f"placement {version}", "Accept": "application/json"},
                timeout=self._timeout_s,
                connect_retries=0,
                raise_exc=False,
                log=False,
                **({} if body is None else {"json": body}),
                **self._where,
            )
        except EndpointNotFound as error:
            raise PlacementUnavailableError(
                f"{_line(error)}: add one for Placement to Keystone's catalogue, or set CYBORG_PLACEMENT_ENDPOINT"
            ) from None
        except ClientException as error:
            took = time.monotonic() - began
            raise PlacementUnavailableError(
                f"{method} {path.partition('?')[0]}: {_line(error)} after {took:.1f} s"
            ) from None
        what = f"{method} {path.partition('?')[0]}"
        body = _outcome(answer, what, missing)
        if body == {} and method == "GET":  # an empty answer would look as if nothing were allocated
            raise PlacementUnavailableError(f"{what}: the answer is empty")
        return body


def _outcome(answer: Any, what: str, missing: bool) -> dict[str, Any] | None:
    """Return the body of Placement's answer, or raise the error that its status stands for."""
    status = answer.status_code
    if status == 404 and missing:
        return None
    if status < 300:
        if not answer.content:
            return {}
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise PlacementUnavailableError(f"{what}: the answer is not a JSON object")
        return body
    code, text = _error(answer)
    sentence = f"{what}: {status} {text}"
    # Placement can answer 500 instead of 409 when two writers set traits at the same time (observed).
    if status == 409 or (status == 500 and "concurrently updated" in text):
        raise PlacementConflictError(code, sentence)
    if status in (401, 403, 408, 429) or status >= 500:
        raise PlacementUnavailableError(sentence)
    raise PlacementRejectedError(sentence)


def _error(answer: Any) -> tuple[str, str]:
    """Return the code and the text of the first error in the answer, or two empty strings."""
    try:
        (first, *_) = answer.json()["errors"]
        return str(first.get("code", "")), _line(first.get("detail") or first.get("title") or "")
    except (ValueError, KeyError, TypeError):
        return "", ""


def _observed(entry: Mapping[str, Any]) -> Observed:
    return Observed(entry["uuid"], entry["name"], entry.get("parent_provider_uuid") or "", int(entry["generation"]))


def _inventory(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "resource_provider_generation"}


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]
