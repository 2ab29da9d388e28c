"""The model of Placement behind the part of a keystoneauth1 session that `placement_sync.client` uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import requests
from keystoneauth1.exceptions import ConnectFailure

from placement_sync.client import PlacementConflictError
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.model import PlacementModel
from tests.support import callguard

FIRST_VERSION, ERROR_CODES_VERSION = (1, 0), (1, 23)
FIELD_VERSIONS = {
    "consumer_generation": (1, 28),
    "project_id": (1, 12),
    "user_id": (1, 12),
    "parent_provider_uuid": (1, 14),
}
"""The microversion that introduced each of these fields; answers to older ones lack the field."""


@dataclass
class PlacementModelSession:
    """A session that answers from the model.

    With `away` every call fails, with `empty` every answer is a 200 without a body. `seen_calls` lists all calls.
    """

    model: PlacementModel = field(default_factory=PlacementModel)
    away: bool = False
    empty: bool = False
    seen_calls: list[str] = field(default_factory=list)

    def request(
        self, url: str, method: str, json: Any = None, headers: Mapping[str, str] | None = None, **_: Any
    ) -> requests.Response:
        """Answer one call. Fields that the microversion does not have are left out, as in Placement."""
        callguard.refuse_call_in_transaction(f"{method} {url}")
        self.seen_calls.append(f"{method} {url}")
        version = _parse_microversion(headers or {})
        if self.away:
            raise ConnectFailure("nobody is there")
        if self.empty:
            return _make_response(200, None)
        parts = urlsplit(url)
        words = parts.path.strip("/").split("/")
        try:
            found = self._call(method, words, parse_qs(parts.query), json)
            return _make_response(
                200, {name: found[name] for name in found if version >= FIELD_VERSIONS.get(name, FIRST_VERSION)}
            )
        except PlacementConflictError as conflict:
            code = {"code": conflict.code} if version >= ERROR_CODES_VERSION else {}
            return _make_response(409, {"errors": [{"detail": str(conflict)} | code]})
        except KeyError:
            return _make_response(404, {"errors": [{"detail": "no such provider"}]})

    def _call(self, method: str, words: list[str], query: dict[str, list[str]], body: Any) -> dict[str, Any]:
        if words[0] == "allocations":
            found = self._consumer(method, words[1], body)
        elif method == "GET":
            found = self._tree(query) if len(words) == 1 else self._provider(*words[1:])
        elif words[0] == "resource_providers":
            found = self._write(method, words[1:], body)
        else:
            found = {}  # creating a resource class or a trait does not change the model
        return found

    def _consumer(self, method: str, uuid: str, body: Any) -> dict[str, Any]:
        if method == "PUT":
            self.model.replace_allocations(uuid, body)
            return {}
        one = self.model.read_consumer(uuid)
        if one.generation is None:
            return {"allocations": {}}
        held = {rp: {"resources": amounts, "generation": 1} for rp, amounts in one.allocations.items()}
        who = {"project_id": one.project, "user_id": one.user}
        return {"allocations": held, "consumer_generation": one.generation} | who

    def _tree(self, query: dict[str, list[str]]) -> dict[str, Any]:
        if "name" in query:
            root = self.model.find_compute_provider(query["name"][0])
            return {"resource_providers": [_render_provider(root)] if root else []}
        return {
            "resource_providers": [_render_provider(one) for one in self.model.read_tree(query["in_tree"][0]).values()]
        }

    def _provider(self, uuid: str, part: str = "") -> dict[str, Any]:
        now = self.model.providers[uuid]
        held = {consumer: {"resources": amount} for consumer, amount in self.model.read_allocations(uuid).items()}
        return {
            "": _render_provider(now),
            "inventories": {"resource_provider_generation": now.generation, "inventories": dict(now.inventories)},
            "traits": {"resource_provider_generation": now.generation, "traits": sorted(now.traits)},
            "allocations": {"allocations": held},
        }[part]

    def _write(self, method: str, words: list[str], body: Any) -> dict[str, Any]:
        model, generation = self.model, (body or {}).get("resource_provider_generation")
        match method, words:
            case "POST", []:
                now = model.create_provider(body["uuid"], body["name"], body["parent_provider_uuid"])
            case "PUT", [uuid]:
                now = model.move_provider(uuid, body["name"], body["parent_provider_uuid"])
            case "PUT", [uuid, "inventories"]:
                now = model.set_inventories(uuid, generation, body["inventories"])
            case "PUT", [uuid, "traits"]:
                now = model.set_traits(uuid, generation, body["traits"])
            case "DELETE", [uuid]:
                model.delete_provider(uuid)
                now = 0
        return {"generation": now, "resource_provider_generation": now}


COMPUTE_PROVIDER = "11111111-1111-1111-1111-111111111111"
"""The compute provider of the host cmp1."""
placement_session = PlacementModelSession()


@contextmanager
def using_placement_model() -> Iterator[PlacementModelSession]:
    """Make the product use an empty model of Placement that has only the compute provider of cmp1."""
    placement_session.__init__()  # type: ignore[misc]  # tests import this object, so it is reset, not replaced
    placement_session.model.providers[COMPUTE_PROVIDER] = ObservedProvider(COMPUTE_PROVIDER, "cmp1", "", 0)
    with SERVICE_SESSION.replaced("keystone", lambda: placement_session):
        yield placement_session


def _parse_microversion(headers: Mapping[str, str]) -> tuple[int, int]:
    found = re.fullmatch(r"placement (\d+)\.(\d+)", headers.get("OpenStack-API-Version", "placement 1.0"))
    assert found, f"not a microversion: {headers}"
    return int(found[1]), int(found[2])


def _render_provider(provider: ObservedProvider) -> dict[str, Any]:
    return {
        "uuid": provider.uuid,
        "name": provider.name,
        "parent_provider_uuid": provider.parent or None,
        "generation": provider.generation,
    }


def _make_response(status: int, body: Any) -> requests.Response:
    answer = requests.Response()
    answer.status_code, answer._content = status, b"" if body is None else json.dumps(body).encode()
    return answer
