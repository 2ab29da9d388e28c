"""Test the policy: the measured matrix of contract section 3.1, scopes, the operator's policy file, and the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.test import Client

from accelerators.domain.caller import Caller
from cyborgweb.auth import policy
from cyborgweb.auth.policy import Policy
from cyborgweb.auth.policy_rules import BUILDING_BLOCKS, OWN_RULES, RULES, UPSTREAM_RULES
from cyborgweb.management.commands.policy_sample import render_policy_sample
from cyborgweb.models import ApiToken
from tests.support.keystone import Keystone, vouching

PERSONAS = {
    "admin": ["admin", "manager", "member", "reader"],
    "bare admin": ["admin"],
    "manager": ["manager", "member", "reader"],
    "member": ["member", "reader"],
    "reader": ["reader"],
    "service": ["service"],
    "no role": [],
}
PROFILE, ARQ = "cyborg:device_profile:", "cyborg:arq:"
READS = [f"cyborg:{of}:get_{n}" for of in ("device", "deployable", "attribute") for n in ("all", "one")]
ADMIN_ACTIONS = ["cyborg:device:enable", "cyborg:device:disable", "cyborg:deployable:program"]
UPSTREAM_MATRIX = [
    # rules, allowed personas with the legacy rules, allowed personas with the new defaults only
    ([PROFILE + "get_all", PROFILE + "get_one"], "+++++++", "+++++--"),
    ([PROFILE + "create", PROFILE + "delete"], "++-----", "++-----"),
    ([ARQ + "get_all", ARQ + "get_one"], "+++++++", "+++++--"),
    ([ARQ + "create", ARQ + "delete", ARQ + "update"], "+++++++", "+-++-+-"),
    (READS, "+++++++", "+++----"),
    ([*ADMIN_ACTIONS, "cyborg:attribute:create", "cyborg:attribute:delete"], "++-----", "++-----"),
]
"""Contract section 3.1, measured. Each column of a row is a persona, in the order of PERSONAS."""
OWN_MATRIX = [
    (["host:get_all", "agent:get_one", "attach_handle:get_all", "inventory:get_one"], "+++----", "+++----"),
    (["accelerator:elevated"], "+++----", "+++----"),
    (["accelerator:get_all", "event:get_one"], "+++++--", "+++++--"),
    (["request:get_one", "profile:get_all", "subscription:get_all", "inbox:get_one"], "+++++--", "+++++--"),
    (["subscription:hand_over"], "+++----", "+++----"),
    (["accelerator:update"], "++++---", "++++---"),
    (["accelerator:update_elevated", "arq:by_session"], "++-----", "++-----"),
    (["device:update", "device_profile:update"], "++-----", "++-----"),
    (["backend:get", "service:get", "driver:get"], "+++----", "+++----"),
    (["service:discover", "driver:rollout"], "++-----", "++-----"),
    ([f"attachment:{verb}" for verb in ("create", "delete", "elevated")], "++-----", "++-----"),
    (["attachment:get", "attachment:get_elevated", "event:elevated", "request:elevated"], "++-----", "++-----"),
    (["accelerator:create", "accelerator:delete"], "++-----", "++-----"),
]
MATRIX_CASES = [
    pytest.param(rule, new, row, id=f"{rule}-{'new' if new else 'legacy'}")
    for rules, legacy, defaults in [
        *UPSTREAM_MATRIX,
        *((["cyborg:" + r for r in rules], *rows) for rules, *rows in OWN_MATRIX),
    ]
    for rule in rules
    for new, row in ((False, legacy), (True, defaults))
]
MISSING_FILE = Path("/nonexistent/policy.yaml")
RULE = "cyborg:device:get_all"


def make_caller(*roles: str, **changes: str) -> Caller:
    return replace(Caller("alice", "u1", frozenset(roles), "p1"), **changes)


@pytest.fixture(scope="module")
def defaults() -> dict[bool, Policy]:
    return {new: Policy(MISSING_FILE, new) for new in (False, True)}


@pytest.mark.parametrize(("rule", "new", "row"), MATRIX_CASES)
def test_each_rule_allows_exactly_the_personas_of_the_matrix(
    defaults: dict[bool, Policy], rule: str, new: bool, row: str
) -> None:
    may = {who: defaults[new].allows(make_caller(*roles), rule) for who, roles in PERSONAS.items()}
    assert may == {who: told == "+" for who, told in zip(PERSONAS, row, strict=True)}


def test_the_matrix_contains_every_upstream_rule_and_rule_names_are_unique() -> None:
    assert {rule.name for rule in UPSTREAM_RULES} == {rule for rules, *_ in UPSTREAM_MATRIX for rule in rules}
    assert len({rule.name for rule in RULES}) == len(RULES)


WITHOUT_A_PROJECT = [{"project_id": ""}, {"system_scope": "all"}, {"domain_id": "d1"}]
OPEN_POLICY = "\n".join(f'"{rule.name}": "@"' for rule in (*UPSTREAM_RULES, *OWN_RULES))


@pytest.mark.parametrize("scope", WITHOUT_A_PROJECT, ids=["unscoped", "system", "domain"])
@pytest.mark.parametrize("new", [False, True], ids=["legacy", "new"])
def test_a_token_without_a_project_is_denied_even_by_a_policy_file_that_allows_everything(
    tmp_path: Path, defaults: dict[bool, Policy], scope: dict[str, str], new: bool
) -> None:
    (tmp_path / "policy.yaml").write_text(OPEN_POLICY)
    admin = make_caller(*PERSONAS["admin"], "service")
    opened = Policy(tmp_path / "policy.yaml", new)
    for rule in (*UPSTREAM_RULES, *OWN_RULES):
        assert opened.allows(admin, rule.name)
        for which in (opened, defaults[new]):
            assert not which.allows(replace(admin, **scope), rule.name)


@pytest.mark.parametrize("scope", WITHOUT_A_PROJECT, ids=["unscoped", "system", "domain"])
def test_a_denied_token_without_a_project_is_advised_to_use_a_project_scoped_token(scope: dict[str, str]) -> None:
    member = make_caller(*PERSONAS["member"])
    assert policy.describe_remedy(replace(member, **scope), "cyborg:device:disable") == "Use a project-scoped token."
    assert policy.describe_remedy(member, "cyborg:device:disable") == "The role admin would be sufficient."


def test_a_caller_whom_no_usual_role_would_help_is_referred_to_the_policy_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.yaml").write_text(f'"{RULE}": "!"')
    monkeypatch.setattr(policy, "_get_policy", lambda: Policy(tmp_path / "policy.yaml", False))
    assert "policy file" in policy.describe_remedy(make_caller("reader"), RULE)


@pytest.mark.parametrize("has_session", [False, True], ids=["token", "session"])
def test_a_role_that_is_named_as_sufficient_is_one_that_the_caller_lacks_and_that_helps(
    defaults: dict[bool, Policy], monkeypatch: pytest.MonkeyPatch, has_session: bool
) -> None:
    helped = 0
    for which, roles in product(defaults.values(), (*PERSONAS.values(), ["auditor", "reader"], ["auditor"])):
        monkeypatch.setattr(policy, "_get_policy", lambda which=which: which)
        caller = replace(make_caller(*roles), has_session=has_session)
        for rule in (*UPSTREAM_RULES, *OWN_RULES):
            if which.allows(caller, rule.name):
                continue
            role = policy.find_sufficient_role(caller, rule.name)
            added = replace(caller, roles=caller.roles | policy.IMPLIED_ROLES[role])
            assert role not in roles and which.allows(added, rule.name), (roles, rule.name, role)
            helped += 1
    assert helped > 500


def test_a_refused_caller_is_advised_to_use_the_role_with_the_fewest_rights() -> None:
    auditor, reader = make_caller("auditor", "reader"), make_caller("reader")
    for verb in ("create", "delete", "update"):
        assert policy.describe_remedy(auditor, f"cyborg:arq:{verb}") == "The role member would be sufficient."
    assert policy.find_sufficient_role(reader, "cyborg:host:get_all") == "auditor"
    assert policy.find_sufficient_role(reader, "cyborg:subscription:hand_over") == "manager"
    assert policy.find_sufficient_role(reader, "cyborg:driver:rollout") == "accelerator_operator"


@pytest.fixture
def keystone(db: None) -> Iterator[Keystone]:
    with vouching() as known:
        yield known


V2_URLS = ["/v2/devices", "/v2/deployables", "/v2/attributes", "/v2/device_profiles", "/v2/accelerator_requests"]


@pytest.mark.parametrize("url", V2_URLS)
def test_cve_2026_40213_system_and_domain_scoped_tokens_are_denied_every_v2_list(
    client: Client, keystone: Keystone, url: str
) -> None:
    for token in (keystone.token("admin", "reader", system=True), keystone.token("admin", "reader", domain="d1")):
        response = client.get(url, headers={"X-Auth-Token": token})
        assert response.status_code == 403
        assert "Access was denied to the following resource: cyborg:" in response.content.decode()


@pytest.mark.parametrize("url", V2_URLS)
def test_cve_2026_40214_unscoped_tokens_can_neither_read_nor_delete_requests(
    client: Client, keystone: Keystone, url: str
) -> None:
    for token in (keystone.token(unscoped=True), keystone.token("admin", unscoped=True)):
        assert client.get(url, headers={"X-Auth-Token": token}).status_code == 403
    nova = keystone.token("service")
    both = {"X-Auth-Token": keystone.token(unscoped=True), "X-Service-Token": nova}
    uuid = "604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d"
    assert client.delete(f"/v2/accelerator_requests?arqs={uuid}", headers=both).status_code == 403


@pytest.mark.django_db
def test_a_denied_v2_call_is_answered_with_upstreams_sentence(client: Client) -> None:
    token = ApiToken.create_with_secret("ci", User.objects.create_user("ci"), ["member"], "p1")
    path = "/v2/devices/604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d/disable"
    response = client.post(path, headers={"X-Auth-Token": token})
    fault = json.loads(json.loads(response.content)["error_message"])["faultstring"]
    assert (response.status_code, fault) == (403, "Access was denied to the following resource: cyborg:device:disable")


CHECK_INTERVAL_S = 0.5
"""The manual says that the file is checked twice a second."""


@dataclass
class PolicyFile:
    """The operator's policy file and a clock. `edit` writes the file and advances the clock to its next check."""

    path: Path
    now: float = 100.0
    edits: int = field(default=0)

    def edit(self, text: str | None) -> None:
        self.edits += 1
        if text is None:
            self.path.unlink()
        else:
            self.path.write_text(text)
            os.utime(self.path, ns=(self.edits, self.edits))
        self.now += CHECK_INTERVAL_S


@pytest.fixture
def clock(tmp_path: Path) -> PolicyFile:
    return PolicyFile(tmp_path / "policy.yaml")


@pytest.fixture
def edited(clock: PolicyFile) -> Policy:
    return Policy(clock.path, False, monotonic=lambda: clock.now)


def test_an_edited_policy_file_takes_effect(clock: PolicyFile, edited: Policy) -> None:
    assert edited.allows(make_caller("member"), RULE)
    clock.edit(f'"{RULE}": "role:auditor"')
    assert not edited.allows(make_caller("member"), RULE) and edited.allows(make_caller("auditor"), RULE)
    clock.edit(f'"{RULE}": "rule:admin_api or user_id:u1"\n"admin_api": "role:boss"')
    assert edited.allows(make_caller("boss", user_id="u2"), RULE) and edited.allows(make_caller(), RULE)
    assert not edited.allows(make_caller("admin", user_id="u2"), RULE)
    clock.edit("")
    assert edited.allows(make_caller("member"), RULE)


def test_the_policy_file_is_checked_for_changes_twice_a_second_at_most(clock: PolicyFile, edited: Policy) -> None:
    assert edited.allows(make_caller("member"), RULE)
    clock.edit(f'"{RULE}": "!"')
    clock.now -= CHECK_INTERVAL_S / 2
    assert edited.allows(make_caller("member"), RULE)
    clock.now += CHECK_INTERVAL_S / 2
    assert not edited.allows(make_caller("member"), RULE)


BROKEN_FILES = {
    "no YAML": '"a": "b',
    "no mapping": "- a\n- b",
    "no text": f'"{RULE}": 7',
    "no check": f'"{RULE}": "anybody"',
    "no expression": f'"{RULE}": "role:a or and role:b"',
    "no such rule": f'"{RULE}": "rule:reader_of_tea_leaves"',
    "a circle": f'"{RULE}": "rule:a"\n"a": "rule:b"\n"b": "rule:a"',
    "no text at all": "\x00\x01",
    "too much": "#" * (policy.MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("text", BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_a_broken_policy_file_keeps_the_last_valid_one_in_force_and_is_logged_once(
    clock: PolicyFile, edited: Policy, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock.edit(f'"{RULE}": "role:auditor"')
    assert edited.allows(make_caller("auditor"), RULE)
    clock.edit(text)
    for _ in range(3):
        clock.now += CHECK_INTERVAL_S
        assert edited.allows(make_caller("auditor"), RULE) and not edited.allows(make_caller("member"), RULE)
    logged_errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert (
        len(logged_errors) == 1
        and "\n" not in logged_errors[0]
        and str(clock.path) in logged_errors[0]
        and "last good" in logged_errors[0]
    )
    clock.edit(f'"{RULE}": "role:member"')
    assert edited.allows(make_caller("member"), RULE)


def test_without_any_valid_version_of_the_policy_file_everything_is_denied(
    clock: PolicyFile, edited: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    clock.edit('"a": "b')
    assert not edited.allows(make_caller(*PERSONAS["admin"]), RULE)
    assert "nobody may do anything" in caplog.text
    clock.edit(None)
    assert edited.allows(make_caller("admin"), RULE)


def test_a_deleted_policy_file_keeps_the_last_version_in_force(clock: PolicyFile, edited: Policy) -> None:
    clock.edit(f'"{RULE}": "!"')
    assert not edited.allows(make_caller("admin"), RULE)
    clock.edit(None)
    assert not edited.allows(make_caller("admin"), RULE)


def test_unknown_rules_in_the_policy_file_are_named_in_the_log(
    clock: PolicyFile, edited: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    clock.edit('"cyborg:device:getall": "!"\n"my_own_word": "role:x"')
    assert edited.allows(make_caller("admin"), RULE)
    assert "do not exist: cyborg:device:getall" in caplog.text and "my_own_word" not in caplog.text


def test_policy_decisions_are_cached_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Policy(MISSING_FILE, False)
    monkeypatch.setattr(policy, "MAX_DECISIONS", 10)
    for n in range(25):
        assert asked.allows(make_caller("member", user_id=f"u{n}"), RULE)
    assert len(asked._loaded.decisions) <= 10
    enforcer = asked._loaded.enforcer
    monkeypatch.setattr(enforcer, "authorize", None)
    assert asked.allows(make_caller("member", user_id="u24"), RULE)


def test_asking_for_an_unknown_rule_raises_key_error() -> None:
    with pytest.raises(KeyError):
        Policy(MISSING_FILE, False).allows(make_caller("admin"), "cyborg:tea:drink")


def test_the_policy_sample_names_every_rule_and_equals_the_published_file() -> None:
    text = render_policy_sample()
    for rule in (*BUILDING_BLOCKS, *UPSTREAM_RULES, *OWN_RULES):
        assert f'#"{rule.name}": "{rule.check}"' in text
    published = Path(__file__).resolve().parents[3] / "docs" / "policy.yaml.sample"
    assert published.read_text() == text, "run `manage.py policy_sample > docs/policy.yaml.sample`"


@pytest.mark.slow
def test_the_uncommented_policy_sample_equals_the_new_defaults(tmp_path: Path) -> None:
    lines = [line[1:] for line in render_policy_sample().splitlines() if line.startswith('#"')]
    (tmp_path / "policy.yaml").write_text("\n".join(lines))
    written, new = Policy(tmp_path / "policy.yaml", False), Policy(MISSING_FILE, True)
    for rule in (*UPSTREAM_RULES, *OWN_RULES):
        for roles in PERSONAS.values():
            assert written.allows(make_caller(*roles), rule.name) is new.allows(make_caller(*roles), rule.name)
