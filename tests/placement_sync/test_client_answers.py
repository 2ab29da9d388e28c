"""Test how the Placement client reads answers that are not what Placement documents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests

from placement_sync.client import PlacementClient, PlacementRejectedError, PlacementUnavailableError

ROOT_UUID = "11111111-1111-1111-1111-111111111111"


def make_client(status: int, body: bytes) -> PlacementClient:
    """Return a client whose every call gets this answer."""

    class ProxySession:
        def request(self, *arguments: object, **options: object) -> requests.Response:
            answer = requests.Response()
            answer.status_code, answer._content = status, body
            return answer

    return PlacementClient(ProxySession())


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.find_compute_provider("cmp1"),
        lambda client: client.read_tree(ROOT_UUID),
        lambda client: client.read_provider(ROOT_UUID),
        lambda client: client.read_allocations(ROOT_UUID),
        lambda client: client.read_consumer(ROOT_UUID),
        lambda client: client.create_provider(ROOT_UUID, "cmp1", ROOT_UUID),
        lambda client: client.set_inventories(ROOT_UUID, 1, {}),
        lambda client: client.set_traits(ROOT_UUID, 1, []),
    ],
)
@pytest.mark.parametrize("body", [b'{"status": "under maintenance"}', b'{"allocations": 5, "resource_providers": [5]}'])
def test_a_json_object_of_a_proxy_counts_as_placement_being_away(
    call: Callable[[PlacementClient], object], body: bytes
) -> None:
    with pytest.raises(PlacementUnavailableError, match="not what Placement documents"):
        call(make_client(200, body))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 429, 500, 503])
def test_only_answers_that_may_change_by_waiting_count_as_placement_being_away(status: int) -> None:
    expected = PlacementRejectedError if status in (400, 404) else PlacementUnavailableError
    with pytest.raises(expected, match=str(status)):
        make_client(status, b"{}").read_tree(ROOT_UUID)
