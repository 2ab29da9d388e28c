"""Placement's API as far as we need it, on a keystoneauth1 session. Free of Django: it ships to compute hosts too.

Called by `sync` and `witness`. One method a call, each with the microversion it needs. Errors say what to do: `Away`
is tried again later, `Conflict` after another look, `Rejected` is a person's business.
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
"""in_tree · create with an answer · traits · classes by PUT · reserved equal to total · another parent."""
CODES = "1.23"
"""From here on errors have codes."""
CONSUMER = "1.28"
"""From here on consumers have generations. Later versions want a consumer's type, which this one leaves as it is."""


class Away(Exception):
    """Placement cannot be reached, is too slow, or answers 5xx or rubbish."""


class Conflict(Exception):
    """Somebody else was faster, or something is in use; `code` is Placement's."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Rejected(Exception):
    """Placement does not want it, and will not want it later either."""


class Stopped(Exception):
    """Somebody else writes now, or may: raised by `before_call`, and nobody is called any more."""


CONCURRENT = "placement.concurrent_update"
IN_USE = frozenset({"placement.inventory.inuse", "placement.resource_provider.inuse"})


class Placement:
    """One conversation with Placement; not to be shared by threads. Counts its calls.

    `before_call` may raise Stopped; `words` are the custom classes and traits that are known to be there.
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
        """The compute provider of that name, None while there is none."""
        found = self._get(f"/resource_providers?name={quote(name, safe='')}", TREE)["resource_providers"]
        return _observed(found[0]) if found else None

    def tree(self, root: str) -> dict[str, Observed]:
        """Every provider of the root's tree, in one read: names, parents, generations."""
        found = self._get(f"/resource_providers?in_tree={root}", TREE)["resource_providers"]
        return {entry["uuid"]: _observed(entry) for entry in found}

    def provider(self, uuid: str) -> Observed | None:
        """One provider wherever it is, with its inventories and traits; None when there is none."""
        answer = self._call("GET", f"/resource_providers/{uuid}", TREE, missing=True)
        return None if answer is None else self.filled(_observed(answer))

    def filled(self, bare: Observed) -> Observed:
        """The same provider with its inventories and traits; the generation is the one of the later read."""
        inventories = self._get(f"/resource_providers/{bare.uuid}/inventories", INVENTORY)
        traits = self._get(f"/resource_providers/{bare.uuid}/traits", TRAITS)
        known = {name: _inventory(entry) for name, entry in inventories["inventories"].items()}
        generation = max(inventories["resource_provider_generation"], traits["resource_provider_generation"])
        if inventories["resource_provider_generation"] != traits["resource_provider_generation"]:
            raise Conflict("placement.concurrent_update", f"provider {bare.uuid} changed while it was read")
        return Observed(bare.uuid, bare.name, bare.parent, generation, known, frozenset(traits["traits"]))

    def allocations(self, uuid: str) -> dict[str, dict[str, int]]:
        """Consumer → what it has of this provider."""
        found = self._call("GET", f"/resource_providers/{uuid}/allocations", TREE, missing=True)
        if found is None:
            return {}
        return {consumer: dict(entry["resources"]) for consumer, entry in found["allocations"].items()}

    def consumer(self, uuid: str) -> Consumer:
        """All that a consumer has, with its generation."""
        found = self._get(f"/allocations/{uuid}", CONSUMER)
        try:
            has = {provider: dict(entry["resources"]) for provider, entry in found["allocations"].items()}
            if not has:
                return Consumer(uuid)
            return Consumer(uuid, int(found["consumer_generation"]), has, found["project_id"], found["user_id"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Away(f"GET /allocations/{uuid}: the answer is no consumer") from None

    def allocate(self, uuid: str, body: Mapping[str, Any]) -> None:
        """Replace all that a consumer has; Conflict with the code CONCURRENT when its generation is another."""
        self._write("PUT", f"/allocations/{uuid}", CONSUMER, body)

    def create(self, uuid: str, name: str, parent: str) -> int:
        """Make a provider; returns its generation."""
        body = {"uuid": uuid, "name": name, "parent_provider_uuid": parent}
        return int(self._write("POST", "/resource_providers", WRITE, body)["generation"])

    def move(self, uuid: str, name: str, parent: str) -> int:
        """Another name or parent; returns the generation."""
        body = {"name": name, "parent_provider_uuid": parent}
        return int(self._write("PUT", f"/resource_providers/{uuid}", MOVE, body)["generation"])

    def set_inventories(self, uuid: str, generation: int, inventories: Mapping[str, Inventory]) -> int:
        """Replace all; returns the new generation."""
        self._ensure(inventories, "/resource_classes/", CLASSES)
        body = {"resource_provider_generation": generation, "inventories": inventories}
        answer = self._write("PUT", f"/resource_providers/{uuid}/inventories", INVENTORY, body)
        return int(answer["resource_provider_generation"])

    def set_traits(self, uuid: str, generation: int, traits: Iterable[str]) -> int:
        """Replace all; returns the new generation."""
        names = sorted(traits)
        self._ensure(names, "/traits/", TRAITS)
        body = {"resource_provider_generation": generation, "traits": names}
        return int(
            self._write("PUT", f"/resource_providers/{uuid}/traits", TRAITS, body)["resource_provider_generation"]
        )

    def delete(self, uuid: str) -> None:
        """Take it away; Conflict with a code of IN_USE while something is allocated. Gone already is well."""
        self._write("DELETE", f"/resource_providers/{uuid}", CODES, None, missing=True)

    def _ensure(self, names: Iterable[str], path: str, version: str) -> None:
        """Custom words are made before they are used; standard ones are there."""
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
            raise Away(f"{_line(error)}: put one into Keystone's catalogue, or set CYBORG_PLACEMENT_ENDPOINT") from None
        except ClientException as error:
            took = time.monotonic() - began
            raise Away(f"{method} {path.partition('?')[0]}: {_line(error)} after {took:.1f} s") from None
        what = f"{method} {path.partition('?')[0]}"
        body = _outcome(answer, what, missing)
        if body == {} and method == "GET":  # it would be read as: nobody has anything
            raise Away(f"{what}: the answer is empty")
        return body


def _outcome(answer: Any, what: str, missing: bool) -> dict[str, Any] | None:
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
            raise Away(f"{what}: the answer is no JSON object")
        return body
    code, text = _error(answer)
    sentence = f"{what}: {status} {text}"
    if status == 409 or (status == 500 and "concurrently updated" in text):  # seen of traits, under two writers
        raise Conflict(code, sentence)
    if status in (401, 403, 408, 429) or status >= 500:
        raise Away(sentence)
    raise Rejected(sentence)


def _error(answer: Any) -> tuple[str, str]:
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
