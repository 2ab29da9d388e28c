"""The questions about the owners of subscriptions, asked of a real Keystone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cyborgweb.auth import keystone as questions
from tests.support.keystone import clear_process_caches
from tests.system.keystone import PASSWORD, Keystone

pytestmark = pytest.mark.system


@contextmanager
def asking_as(keystone: Keystone, user: str, *, system: bool = False) -> Iterator[None]:
    """Let this process ask Keystone as this service user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CYBORG_AUTH", "keystone")
        for name, value in keystone.environment(user, system=system).items():
            patch.setenv(name, value)
        clear_process_caches()
        yield
    clear_process_caches()


@pytest.fixture
def ann(keystone: Keystone) -> Iterator[str]:
    """The id of a user without any role."""
    user = {"name": f"ann-{uuid.uuid4().hex[:8]}", "password": PASSWORD, "domain_id": "default"}
    made = keystone.call("POST", "/users", {"user": user})["user"]["id"]
    yield made
    if keystone.call("GET", f"/users?name={user['name']}")["users"]:
        keystone.call("DELETE", f"/users/{made}")


def find_role(keystone: Keystone, name: str) -> str:
    """Return the id of a role."""
    return str(keystone.call("GET", f"/roles?name={name}")["roles"][0]["id"])


@pytest.mark.parametrize("system", [False, True], ids=["in a project", "on the system"])
def test_a_service_user_that_may_ask_learns_roles_a_disabled_account_and_that_a_user_has_left(
    keystone: Keystone, ann: str, system: bool
) -> None:
    demo, other, member = keystone.id_of("project", "demo"), keystone.id_of("project", "other"), "member"
    with asking_as(keystone, "admin", system=system):
        assert questions.list_roles(ann, demo) == frozenset()
        keystone.call("PUT", f"/projects/{demo}/users/{ann}/roles/{find_role(keystone, member)}")
        assert questions.list_roles(ann, demo) == {"member", "reader"}
        group = keystone.call("POST", "/groups", {"group": {"name": uuid.uuid4().hex, "domain_id": "default"}})["group"]
        keystone.call("PUT", f"/groups/{group['id']}/users/{ann}")
        keystone.call("PUT", f"/projects/{other}/groups/{group['id']}/roles/{find_role(keystone, 'manager')}")
        assert questions.list_roles(ann, other) == {"manager", "member", "reader"}
        found = questions.find_account(ann)
        assert found and (found.is_enabled, found.is_federated) == (True, False) and found.name.startswith("ann-")
        keystone.call("PATCH", f"/users/{ann}", {"user": {"enabled": False}})
        found = questions.find_account(ann)
        assert found and not found.is_enabled
        project = {"name": uuid.uuid4().hex, "domain_id": "default"}
        deleted = keystone.call("POST", "/projects", {"project": project})["project"]["id"]
        keystone.call("DELETE", f"/projects/{deleted}")
        assert questions.list_roles(ann, deleted) == frozenset()
        keystone.call("DELETE", f"/users/{ann}")
        assert questions.find_account(ann) is None and questions.list_roles(ann, demo) == frozenset()
        assert questions.find_account("no/such?user") is None


def test_a_federated_user_is_known_as_one(keystone: Keystone, ann: str) -> None:
    provider = f"idp-{uuid.uuid4().hex[:8]}"
    path = f"/OS-FEDERATION/identity_providers/{provider}"
    keystone.call("PUT", path, {"identity_provider": {"enabled": True}})
    rules = [{"local": [{"user": {"name": "{0}"}}], "remote": [{"type": "REMOTE_USER"}]}]
    keystone.call("PUT", f"/OS-FEDERATION/mappings/{provider}", {"mapping": {"rules": rules}})
    keystone.call("PUT", f"{path}/protocols/mapped", {"protocol": {"mapping_id": provider}})
    federated = [{"idp_id": provider, "protocols": [{"protocol_id": "mapped", "unique_id": "ann"}]}]
    keystone.call("PATCH", f"/users/{ann}", {"user": {"federated": federated}})
    with asking_as(keystone, "admin"):
        found = questions.find_account(ann)
        assert found and found.is_federated


def test_a_service_user_with_the_role_service_alone_is_told_that_it_may_not_ask(keystone: Keystone, ann: str) -> None:
    with asking_as(keystone, "service"):
        for ask in (lambda: questions.find_account(ann), lambda: questions.list_roles(ann, "p1")):
            with pytest.raises(questions.ListingNotAllowedError, match="identity:list_role_assignments"):
                ask()
        with pytest.raises(questions.ListingNotAllowedError):
            questions.find_account("no-such-user")
