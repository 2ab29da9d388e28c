"""Client for the part of Placement's API that this product uses, on a keystoneauth1 session. It does not use Django.

Agents use it on compute hosts, too. Each call sends the microversion that it needs. The errors tell the caller how to
react: after `PlacementUnavailableError` retry later, after `PlacementConflictError` read again and retry, after
`PlacementRejectedError` a person has to act.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from placement_sync.allocations import ConsumerAllocations
from placement_sync.errors import PlacementSyncError
from placement_sync.reconcile import Inventory, ObservedProvider

TIMEOUT_S = 10.0
TREE_VERSION, WRITE_VERSION, TRAITS_VERSION, CLASSES_VERSION, INVENTORY_VERSION, MOVE_VERSION = (
    "1.14",
    "1.20",
    "1.6",
    "1.7",
    "1.26",
    "1.37",
)
"""Microversions, in this order: for `in_tree`; for a POST that returns the provider; for traits; for PUT of a resource
class; for `reserved` equal to `total`; for a change of the parent.
"""
ERROR_CODES_VERSION = "1.23"
"""Microversion from which errors have codes."""
CONSUMER_VERSION = "1.28"
"""Microversion from which consumers have generations. From 1.38 on a write must name the consumer type; with 1.28 the
type stays as it is.
"""


class PlacementUnavailableError(PlacementSyncError):
    """Placement cannot be reached, is too slow, throttles, refuses the credentials, or answers unusably.

    Statuses: 401, 403, 408, 429 and 5xx. An answer is unusable if it is not a JSON object, or is empty after a GET.
    """


class PlacementConflictError(PlacementSyncError):
    """Another writer changed the object first, or the object is in use; `code` is Placement's error code."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class PlacementRejectedError(PlacementSyncError):
    """Placement refuses the request; a retry would be refused, too."""


class WriterStoppedError(PlacementSyncError):
    """The caller may not write any more, for example because the writer changed.

    `before_call` raises it; no further call is sent.
    """


CONCURRENT_UPDATE = "placement.concurrent_update"
IN_USE_CODES = frozenset({"placement.inventory.inuse", "placement.resource_provider.inuse"})


class PlacementClient:
    """A connection to Placement that counts its calls in `reads` and `writes`. Not thread-safe.

    `before_call` runs before each call and may raise WriterStoppedError or PlacementUnavailableError. `known_names`
    caches which custom resource classes and traits exist; several clients may share one set. Every method that sends a
    call may raise PlacementUnavailableError, PlacementConflictError and PlacementRejectedError, and whatever
    `before_call` raises.
    """

    def __init__(
        self,
        session: Any,
        endpoint: str = "",
        timeout_s: float = TIMEOUT_S,
        before_call: Callable[[], None] = lambda: None,
        known_names: set[str] | None = None,
    ) -> None:
        self._session, self._timeout_s = session, timeout_s
        self._endpoint_options = {"endpoint_override": endpoint} if endpoint else {}
        self._before_call = before_call
        self._known_names = set() if known_names is None else known_names
        self.reads = self.writes = 0

    def find_compute_provider(self, name: str) -> ObservedProvider | None:
        """Return the compute provider with this name, without inventories and traits, or None if there is none."""
        answer = self._get(f"/resource_providers?name={quote(name, safe='')}", TREE_VERSION)
        with _parsing_answer("GET /resource_providers"):
            providers = answer["resource_providers"]
            return _parse_provider(providers[0]) if providers else None

    def read_tree(self, root: str) -> dict[str, ObservedProvider]:
        """Return every provider of the tree by uuid, in one read.

        Each has its name, parent and generation, but no inventories and no traits.
        """
        answer = self._get(f"/resource_providers?in_tree={root}", TREE_VERSION)
        with _parsing_answer("GET /resource_providers"):
            return {entry["uuid"]: _parse_provider(entry) for entry in answer["resource_providers"]}

    def read_provider(self, uuid: str) -> ObservedProvider | None:
        """Return one provider of any tree with its inventories and traits, or None if it does not exist.

        Costs up to 3 reads.
        """
        answer = self._send("GET", f"/resource_providers/{uuid}", TREE_VERSION, may_be_missing=True)
        if answer is None:
            return None
        with _parsing_answer(f"GET /resource_providers/{uuid}"):
            provider = _parse_provider(answer)
        return self.read_details(provider)

    def read_details(self, provider: ObservedProvider) -> ObservedProvider:
        """Read the provider's inventories and traits, and return it with them. Costs 2 reads.

        Raises PlacementConflictError if the provider changed between the two reads.
        """
        inventories = self._get(f"/resource_providers/{provider.uuid}/inventories", INVENTORY_VERSION)
        traits = self._get(f"/resource_providers/{provider.uuid}/traits", TRAITS_VERSION)
        with _parsing_answer(f"GET /resource_providers/{provider.uuid}/…"):
            inventory_by_class = {name: _strip_generation(entry) for name, entry in inventories["inventories"].items()}
            generations = [int(answer["resource_provider_generation"]) for answer in (inventories, traits)]
            trait_names = frozenset(traits["traits"])
        if len(set(generations)) > 1:
            raise PlacementConflictError(
                "placement.concurrent_update", f"provider {provider.uuid} changed while it was read"
            )
        return ObservedProvider(
            provider.uuid, provider.name, provider.parent, generations[0], inventory_by_class, trait_names
        )

    def read_allocations(self, uuid: str) -> dict[str, dict[str, int]]:
        """Return the allocations of one provider: consumer → resource class → amount.

        Empty if the provider does not exist.
        """
        answer = self._send("GET", f"/resource_providers/{uuid}/allocations", TREE_VERSION, may_be_missing=True)
        if answer is None:
            return {}
        with _parsing_answer(f"GET /resource_providers/{uuid}/allocations"):
            return {consumer: dict(entry["resources"]) for consumer, entry in answer["allocations"].items()}

    def read_consumer(self, uuid: str) -> ConsumerAllocations:
        """Return all allocations of one consumer, with its generation (None if it has no allocations)."""
        answer = self._get(f"/allocations/{uuid}", CONSUMER_VERSION)
        with _parsing_answer(f"GET /allocations/{uuid}"):
            allocations = {provider: dict(entry["resources"]) for provider, entry in answer["allocations"].items()}
            if not allocations:
                return ConsumerAllocations(uuid)
            return ConsumerAllocations(
                uuid, int(answer["consumer_generation"]), allocations, answer["project_id"], answer["user_id"]
            )

    def replace_allocations(self, uuid: str, body: Mapping[str, Any]) -> None:
        """Replace all allocations of one consumer.

        Raises PlacementConflictError with the code CONCURRENT_UPDATE if its generation has changed.
        """
        self._send_write("PUT", f"/allocations/{uuid}", CONSUMER_VERSION, body)

    def create_provider(self, uuid: str, name: str, parent: str) -> int:
        """Create a provider and return its generation.

        Raises PlacementConflictError if a provider with this uuid or name exists.
        """
        body = {"uuid": uuid, "name": name, "parent_provider_uuid": parent}
        answer = self._send_write("POST", "/resource_providers", WRITE_VERSION, body)
        return _parse_generation(answer, "generation", "POST /resource_providers")

    def move_provider(self, uuid: str, name: str, parent: str) -> int:
        """Set the name and the parent of a provider and return its new generation."""
        body = {"name": name, "parent_provider_uuid": parent}
        answer = self._send_write("PUT", f"/resource_providers/{uuid}", MOVE_VERSION, body)
        return _parse_generation(answer, "generation", f"PUT /resource_providers/{uuid}")

    def set_inventories(self, uuid: str, generation: int, inventories: Mapping[str, Inventory]) -> int:
        """Replace all inventories of a provider and return its new generation.

        Creates missing custom resource classes first. Raises PlacementConflictError if `generation` is not the current
        one, or a class that would be removed has allocations.
        """
        self._ensure_names_exist(inventories, "/resource_classes/", CLASSES_VERSION)
        body = {"resource_provider_generation": generation, "inventories": inventories}
        path = f"/resource_providers/{uuid}/inventories"
        answer = self._send_write("PUT", path, INVENTORY_VERSION, body)
        return _parse_generation(answer, "resource_provider_generation", f"PUT {path}")

    def set_traits(self, uuid: str, generation: int, traits: Iterable[str]) -> int:
        """Replace all traits of a provider and return its new generation. Creates missing custom traits first.

        Raises PlacementConflictError if `generation` is not the current one.
        """
        names = sorted(traits)
        self._ensure_names_exist(names, "/traits/", TRAITS_VERSION)
        body = {"resource_provider_generation": generation, "traits": names}
        path = f"/resource_providers/{uuid}/traits"
        answer = self._send_write("PUT", path, TRAITS_VERSION, body)
        return _parse_generation(answer, "resource_provider_generation", f"PUT {path}")

    def delete_provider(self, uuid: str) -> None:
        """Delete a provider; succeed if it does not exist.

        Raises PlacementConflictError with a code of IN_USE_CODES while something is allocated.
        """
        self._send_write("DELETE", f"/resource_providers/{uuid}", ERROR_CODES_VERSION, None, may_be_missing=True)

    def _ensure_names_exist(self, names: Iterable[str], path: str, version: str) -> None:
        """Create each custom resource class or trait that is not known to exist. Standard names always exist."""
        for name in names:
            if name.startswith("CUSTOM_") and path + name not in self._known_names:
                self._send_write("PUT", path + name, version, None)
                self._known_names.add(path + name)

    def _get(self, path: str, version: str) -> dict[str, Any]:
        """Send a GET and return the decoded answer. Raises as `_send` does; a 404 is a PlacementRejectedError."""
        return self._send("GET", path, version) or {}

    def _send_write(
        self, method: str, path: str, version: str, body: Any, may_be_missing: bool = False
    ) -> dict[str, Any]:
        """Send a call and return the decoded answer, `{}` if it has no content. Raises as `_send` does."""
        return self._send(method, path, version, body, may_be_missing=may_be_missing) or {}

    def _send(
        self, method: str, path: str, version: str, body: Any = None, may_be_missing: bool = False
    ) -> dict[str, Any] | None:
        """Send one call and return the decoded answer: `{}` if it has no content, None for a 404 if `may_be_missing`.

        Raises PlacementUnavailableError, PlacementConflictError, PlacementRejectedError, and whatever `before_call`
        raises.
        """
        from keystoneauth1.exceptions import ClientException, EndpointNotFound

        self._before_call()
        self.reads, self.writes = (self.reads + 1, self.writes) if method == "GET" else (self.reads, self.writes + 1)
        started = time.monotonic()
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
                **self._endpoint_options,
            )
        except EndpointNotFound as error:
            raise PlacementUnavailableError(
                f"{_one_line(error)}: add one for Placement to Keystone's catalogue, or set CYBORG_PLACEMENT_ENDPOINT"
            ) from None
        except ClientException as error:
            elapsed_s = time.monotonic() - started
            raise PlacementUnavailableError(
                f"{method} {path.partition('?')[0]}: {_one_line(error)} after {elapsed_s:.1f} s"
            ) from None
        call = f"{method} {path.partition('?')[0]}"
        decoded = _decode_answer(answer, call, may_be_missing)
        if decoded == {} and method == "GET":  # an empty answer would look as if nothing were allocated
            raise PlacementUnavailableError(f"{call}: the answer is empty")
        return decoded


@contextmanager
def _parsing_answer(call: str) -> Iterator[None]:
    """Raise PlacementUnavailableError if the block, which reads a decoded answer, fails because a field is missing or
    has a wrong type.

    Such answers occur: a proxy in front of Placement can answer 200 with a JSON object of its own. `call` is the method
    and the path of the request, for the message.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PlacementUnavailableError(f"{call}: the answer is not what Placement documents") from None


def _parse_generation(answer: Mapping[str, Any], member: str, call: str) -> int:
    """Return the provider's new generation from the answer to a write."""
    with _parsing_answer(call):
        return int(answer[member])


def _decode_answer(answer: Any, call: str, may_be_missing: bool) -> dict[str, Any] | None:
    """Return the body of Placement's answer, or raise the error that its status stands for."""
    status = answer.status_code
    if status == 404 and may_be_missing:
        return None
    if status < 300:
        if not answer.content:
            return {}
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise PlacementUnavailableError(f"{call}: the answer is not a JSON object")
        return body
    code, text = _parse_error(answer)
    sentence = f"{call}: {status} {text}"
    # Placement can answer 500 instead of 409 when two writers set traits at the same time (observed).
    if status == 409 or (status == 500 and "concurrently updated" in text):
        raise PlacementConflictError(code, sentence)
    if status in (401, 403, 408, 429) or status >= 500:
        raise PlacementUnavailableError(sentence)
    raise PlacementRejectedError(sentence)


def _parse_error(answer: Any) -> tuple[str, str]:
    """Return the code and the text of the first error in the answer, or two empty strings."""
    try:
        (first, *_) = answer.json()["errors"]
        return str(first.get("code", "")), _one_line(first.get("detail") or first.get("title") or "")
    except (ValueError, KeyError, TypeError):
        return "", ""


def _parse_provider(entry: Mapping[str, Any]) -> ObservedProvider:
    """Convert Placement's record of a provider, without inventories and traits; `parent` is '' for a root provider."""
    return ObservedProvider(
        entry["uuid"], entry["name"], entry.get("parent_provider_uuid") or "", int(entry["generation"])
    )


def _strip_generation(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an inventory record without the provider's generation."""
    return {key: value for key, value in entry.items() if key != "resource_provider_generation"}


def _one_line(error: object) -> str:
    """Return the error's message on one line, cut to 300 characters."""
    return " ".join(str(error).split())[:300]
