"""Test the commands for admission rules: preview, confirmation, conflicts."""

from __future__ import annotations

import json

import pytest

from accelerators import conductor
from accelerators.devices import admission_rules
from accelerators.domain.caller import Caller
from accelerators.models import AdmissionRule, Device
from tests.cyborgweb.cli.conftest import Cyborg, assert_refused
from tests.support.manage import run_verb
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db(transaction=True)


def create_inactive_devices(*hosts: str) -> None:
    """Create hosts with two inactive devices each."""
    for name in hosts:
        create_heard_host(name, 2)
    with conductor.writing():
        Device.objects.update(state="inactive")


@pytest.mark.parametrize("hosts", [("cmp1",), ("cmp1", "cmp2")])
def test_a_rule_that_would_move_devices_is_created_after_its_preview(hosts: tuple[str, ...], cyborg: Cyborg) -> None:
    create_inactive_devices(*hosts)
    words = ("rule-create", "hall3", "--host", "cmp*", "--action", "ready")
    shown = cyborg(*words, "--dry-run", "--format", "csv")
    assert shown.stdout.splitlines()[1] == f"{2 * len(hosts)},will be done,no,becomes ready"
    assert_refused(cyborg(*words), 2, "give --yes")
    assert not AdmissionRule.objects.exists()
    created = json.loads(cyborg(*words, "--yes", "--json").stdout)
    assert (created["name"], created["host"], created["action"]) == ("hall3", "cmp*", "ready")
    assert_refused(cyborg(*words, "--yes"), 1, "already exists")
    assert Device.objects.filter(state="inactive").count() == 2 * len(hosts)


def test_the_preview_of_a_rule_that_would_move_no_device_says_so(cyborg: Cyborg) -> None:
    create_inactive_devices("cmp1")
    text = "The rule would move none of the devices that are inactive now.\n"
    shown = cyborg("rule-create", "hall3", "--host", "other*", "--action", "ready", "--dry-run")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", text)
    assert cyborg("rule-create", "one", "--host", "other*", "--action", "ready").exit_code == 0
    assert cyborg("rule-set", "one", "--action", "quarantined", "--dry-run").stderr.endswith(text)
    assert cyborg("rule-set", "one", "--action", "quarantined", "--dry-run", "--json").stdout == "[]\n"


def test_a_rule_is_changed_in_the_named_fields_alone_and_deleted(cyborg: Cyborg) -> None:
    create_inactive_devices("cmp1")
    assert cyborg("rule-create", "one", "--host", "cmp1", "--driver", "x*", "--action", "ready").exit_code == 0
    assert cyborg("rule-set", "one", "--driver", "", "--rename", "two", "--disabled", "--order", "7").exit_code == 0
    rule = AdmissionRule.objects.get()
    assert (rule.name, rule.host, rule.driver, rule.action, rule.enabled, rule.order) == (
        *("two", "cmp1", "", "ready", False),
        7,
    )
    assert "two" not in cyborg("rule-list", "--enabled").stdout
    assert_refused(cyborg("rule-set", "two"), 2, "Select what to change")
    assert_refused(cyborg("rule-set", "one", "--enabled"), 3, "cyborg rule-list")
    shown = cyborg("rule-set", "two", "--enabled", "--dry-run", "--format", "csv")
    assert shown.stdout.splitlines()[1] == "2,will be done,no,becomes ready"
    assert cyborg("rule-delete", "two", "--dry-run").stdout.startswith("DELETE /api/rules/")
    assert AdmissionRule.objects.exists()
    assert cyborg("rule-delete", "two", "--yes").exit_code == 0
    assert not AdmissionRule.objects.exists()


def test_a_rule_that_somebody_changes_meanwhile_is_left_as_it_is(
    cyborg: Cyborg, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cyborg("rule-create", "one", "--action", "ready").exit_code == 0
    edit_rule = admission_rules.edit_rule

    def edit_after_another(uuid: object, values: dict[str, object], *words: object, **more: object) -> object:
        edit_rule(uuid, {"vendor": "10de"}, Caller("olga", "", frozenset(), ""))  # type: ignore[arg-type]
        return edit_rule(uuid, values, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(admission_rules, "edit_rule", edit_after_another)
    refused = cyborg("rule-set", "one", "--action", "quarantined")
    assert refused.exit_code == 1 and '"vendor": "10de"' in refused.stderr and '"quarantined"' in refused.stderr
    assert AdmissionRule.objects.get().action == "ready"


def test_a_rule_is_deleted_only_in_the_version_that_was_shown(cyborg: Cyborg) -> None:
    assert cyborg("rule-create", "one", "--action", "ready").exit_code == 0
    assert cyborg("rule-set", "one", "--vendor", "10de").exit_code == 0
    refused = cyborg("rule-delete", "one", "--yes", "--generation", "1")
    assert_refused(refused, 1, "one is at generation 2 now, not 1", "[conflict]")
    assert_refused(cyborg("rule-set", "one", "--disabled", "--generation", "1"), 1, "generation 2 now, not 1")
    assert AdmissionRule.objects.get().enabled
    deleted = cyborg("rule-delete", "one", "--yes", "--generation", "2")
    assert deleted.exit_code == 0 and '-  "vendor": "10de"' in deleted.stderr.replace(",", "")


def test_manage_py_has_the_same_commands() -> None:
    run_verb("rule", "create", "one", "--action", "quarantined")
    (row,) = json.loads(run_verb("rule", "list", "--json")[1])
    assert (row["name"], row["action"]) == ("one", "quarantined")
    run_verb("rule", "delete", "one")
    assert not AdmissionRule.objects.exists()
