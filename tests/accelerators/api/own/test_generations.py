"""Test that nobody overwrites the settings of somebody else: a change that names an older generation is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import HttpResponse

from accelerators.domain.caller import Caller
from accelerators.models import Command, Device, DriverWish, Event, Rollout
from cyborgweb.models.notify import Subscription
from cyborgweb.notify import owners
from drivers.inventory import DriverReport
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.accelerators.workflows.test_rollouts import answer_as_agent, run_rollout
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]

CASES = {
    "rules": ({"name": "gpus", "action": "ready"}, {"name": "cards"}, {"name": "slow"}),
    "profiles": (
        {"name": "gpus", "groups": [{"resources:GPU": "1"}]},
        {"description": "theirs"},
        {"description": "mine"},
    ),
    "subscriptions": (
        {"name": "mine", "kinds": ["request.bound"], "way": "inbox"},
        {"name": "theirs"},
        {"kinds": ["device.failed"]},
    ),
}


def get_body(response: HttpResponse, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, response.content
    return json.loads(response.content)


@pytest.mark.parametrize("collection", CASES)
def test_a_change_or_deletion_based_on_an_older_generation_is_refused_and_shows_the_present_version(
    ask: Ask, collection: str
) -> None:
    new, their_change, my_change = CASES[collection]
    row = get_body(ask(f"/api/{collection}/", method="POST", data=new), 201)
    path = row["url"].removeprefix("http://testserver")
    assert row["generation"] == 1
    theirs = get_body(ask(path, method="PATCH", data=their_change | {"generation": 1}))
    assert theirs["generation"] == 2

    refused = get_body(ask(path, method="PATCH", data=my_change | {"generation": 1}), 409)
    assert "is at generation 2 now, not 1: somebody changed it" in refused["error"]["message"]
    assert refused["error"]["reason"] == "conflict"
    assert refused["current"] == theirs == get_body(ask(path)), "nothing was changed, and their version is shown"
    assert get_body(ask(f"{path}?generation=1", method="DELETE"), 409)["current"] == theirs
    for text in ("x", "-1", "1" * 30):
        assert "say the number" in get_error_message(ask(f"{path}?generation={text}", method="DELETE"), 400)

    unchanged = get_body(ask(path, method="PATCH", data=their_change | {"generation": 1}))
    assert unchanged["generation"] == 2, "what is so already needs no change, and conflicts with nothing"
    mine = get_body(ask(path, method="PATCH", data=my_change | {"generation": 2}))
    assert mine["generation"] == 3 and mine.items() >= my_change.items()
    assert ask(f"{path}?generation=3", method="DELETE").status_code == 204


@pytest.mark.parametrize("collection", CASES)
def test_a_change_or_deletion_without_a_generation_is_refused_and_shows_the_present_version(
    ask: Ask, collection: str
) -> None:
    new, their_change, _ = CASES[collection]
    row = get_body(ask(f"/api/{collection}/", method="POST", data=new), 201)
    path = row["url"].removeprefix("http://testserver")
    shown = get_body(ask(path))
    for response in (ask(path, method="PATCH", data=their_change), ask(path, method="DELETE")):
        refused = get_body(response, 428)
        assert refused["error"]["reason"] == "no_generation" and refused["error"]["title"] == "Precondition Required"
        text = f"{row['name']} is at generation 1 now. Send the generation that you have read, as `generation`"
        assert text in refused["error"]["message"]
        assert refused["current"] == shown == get_body(ask(path)), "nothing was changed"
    assert ask(path, method="PATCH", data={"name": 3}).status_code == 400, "a wrong body is named first"


@pytest.mark.parametrize(("verb", "fields"), [("rotate", {}), ("hand_over", {"owner": "nobody"})])
def test_a_subscription_is_handed_over_and_gets_a_new_secret_only_with_its_generation(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, verb: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(owners, "find_owner", lambda *about: Caller("bob", "u-bob", frozenset(), "p1"))
    hook = {"name": "mine", "kinds": ["request.bound"], "way": "webhook", "target": "https://hook.example/"}
    path = get_body(ask("/api/subscriptions/", method="POST", data=hook), 201)["url"].removeprefix("http://testserver")
    theirs = get_body(ask(path, method="PATCH", data={"name": "theirs", "generation": 1}))
    secret = Subscription.objects.get().secret
    outdated = get_body(ask(f"{path}{verb}/", method="POST", data=fields | {"generation": 1}), 409)
    assert "is at generation 2 now, not 1: somebody changed it" in outdated["error"]["message"]
    missing = get_body(ask(f"{path}{verb}/", method="POST", data=fields), 428)
    assert missing["error"]["reason"] == "no_generation"
    assert outdated["current"] == missing["current"] == theirs == get_body(ask(path))
    assert Subscription.objects.get().secret == secret
    done = get_body(ask(f"{path}{verb}/", method="POST", data=fields | {"generation": 2}))
    assert done["generation"] == 3
    page = ask(path, Accept="text/html").content.decode()
    assert page.count("data-always") == 1 and page.count('name="generation"') == 3, "both actions and the change"


def test_the_layout_of_a_device_is_changed_only_with_its_generation(ask: Ask, fill: Fill) -> None:
    fill(3)
    device = Device.objects.earliest("id")
    refused = get_body(ask(f"/api/devices/{device.uuid}/", method="PATCH", data={"layout": {"vfs": "4"}}), 428)
    assert f"Device {device.uuid} is at generation {device.generation} now" in refused["error"]["message"]
    assert refused["current"]["uuid"] == str(device.uuid) and not Command.objects.filter(op="partition").exists()


def test_a_change_of_a_driver_on_one_host_without_a_generation_is_refused(ask: Ask, installed: None) -> None:
    def post(**fields: Any) -> HttpResponse:
        body = {"driver": "pci_driver", "hosts": ["cmp1"]} | fields
        return ask("/api/rollouts/", "operator", method="POST", data=body)

    for fields in ({"op": "update", "edits": {"set": {"mtu": 9000}}}, {"op": "uninstall"}, {"op": "install"}):
        refused = get_body(post(**fields), 428)
        assert "pci_driver on cmp1 is at generation 1 now. Send the generation" in refused["error"]["message"]
        assert refused["current"] == get_results(ask("/api/drivers/?driver=pci_driver"))[0]
    absent = get_body(post(op="install", driver="new_driver"), 428)
    assert "is at generation 0 now" in absent["error"]["message"] and "current" not in absent
    assert Rollout.objects.count() == 1, "nothing was stored"

    preview = get_body(post(op="update", edits={"set": {"mtu": 9000}}, dry_run=True))
    assert preview["steps"][0]["generation"] == 1
    get_body(post(op="update", edits={"set": {"mtu": 9000}}, token=preview["token"]), 202)


def test_a_retry_on_one_host_without_a_generation_is_refused(ask: Ask, installed: None) -> None:
    get_body(post_rollout(ask, hosts=["cmp1"], edits={"set": {"mtu": 9000}}), 202)
    answer_as_agent(Command.objects.latest("id"), "failed")
    failed = run_rollout(Rollout.objects.latest("id"))
    path = f"/api/rollouts/{failed.uuid}/retry/"
    refused = get_body(ask(path, "operator", method="POST", data={}), 428)
    assert "is at generation 2 now" in refused["error"]["message"] and Rollout.objects.count() == 2
    assert refused["current"]["generation"] == 2
    get_body(ask(path, "operator", method="POST", data={"generation": 2}), 202)


def post_rollout(ask: Ask, **fields: Any) -> HttpResponse:
    """Start a rollout; on one host it is based on the present generation unless the fields name another."""
    driver = fields.get("driver", "pci_driver")
    present = {"generation": get_generation(driver)} if len(fields.get("hosts", ())) == 1 else {}
    return ask("/api/rollouts/", "operator", method="POST", data={"driver": driver, "op": "update"} | present | fields)


def get_generation(driver: str) -> int:
    return DriverWish.objects.filter(driver=driver).values_list("generation", flat=True).first() or 0


def start_and_finish(ask: Ask, **fields: Any) -> None:
    """Start a rollout on cmp1 and let the agent apply it."""
    get_body(post_rollout(ask, hosts=["cmp1"], **fields), 202)
    answer_as_agent(Command.objects.latest("id"))
    run_rollout(Rollout.objects.latest("id"))


@pytest.fixture
def installed(ask: Ask) -> None:
    """Install pci_driver on cmp1 with two settings."""
    apply_report(get_or_create_host(), DriverReport("pci_driver", state="absent"), make_driver_report(make_card(1)))
    start_and_finish(ask, op="install", settings={"mtu": 1500, "backends": {"gpus": {"kind": "pci"}}})


def get_settings() -> Any:
    return DriverWish.objects.get(driver="pci_driver").settings


@pytest.mark.slow
def test_edits_change_single_settings_and_leave_all_others(ask: Ask, installed: None) -> None:
    start_and_finish(ask, edits={"set": {"mtu": 9000, "backends/nics": {"kind": "pci"}}})
    assert get_settings() == {"mtu": 9000, "backends": {"gpus": {"kind": "pci"}, "nics": {"kind": "pci"}}}
    start_and_finish(ask, edits={"set": {"backends/gpus/enabled": False}, "unset": ["mtu", "backends/nics", "a/b/c"]})
    assert get_settings() == {"backends": {"gpus": {"kind": "pci", "enabled": False}}}
    rollout = get_results(ask("/api/rollouts/"))[0]
    assert rollout["edits"]["unset"] == ["mtu", "backends/nics", "a/b/c"] and rollout["settings"] is None


def test_edits_of_two_people_are_both_kept(ask: Ask, installed: None) -> None:
    start_and_finish(ask, edits={"set": {"mtu": 9000}})
    start_and_finish(ask, edits={"set": {"speed": 7}})
    assert get_settings() == {"mtu": 9000, "speed": 7, "backends": {"gpus": {"kind": "pci"}}}


def test_a_change_of_a_driver_based_on_an_older_generation_is_refused_and_shows_the_present_one(
    ask: Ask, installed: None
) -> None:
    (before,) = get_results(ask("/api/drivers/?driver=pci_driver"))
    assert before["generation"] == 1
    start_and_finish(ask, settings={"mtu": 9000}, generation=1)
    refused = get_body(post_rollout(ask, hosts=["cmp1"], settings={"mtu": 1}, generation=1), 409)
    assert "pci_driver on cmp1 is at generation 2 now, not 1" in refused["error"]["message"]
    assert refused["current"] == get_results(ask("/api/drivers/?driver=pci_driver"))[0]
    assert refused["current"]["wanted"]["settings"] == {"mtu": 9000} == get_settings()
    assert Rollout.objects.count() == 2, "nothing was stored"
    absent = get_body(post_rollout(ask, op="install", driver="new_driver", hosts=["cmp1"], generation=3), 409)
    assert "is at generation 0 now, not 3" in absent["error"]["message"] and "current" not in absent
    get_or_create_host("cmp2")
    on_all = post_rollout(ask, selector={"all": True}, enabled=False, generation=1)
    assert "only for a single host" in get_error_message(on_all, 400)


def test_settings_of_the_hosts_own_file_are_not_overwritten_by_edits(ask: Ask) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    refused = post_rollout(ask, driver="test_driver", hosts=["cmp1"], edits={"set": {"mtu": 9000}})
    assert "the settings of the host's own file, which are not known here" in get_error_message(refused, 409)
    assert not Event.objects.filter(action="driver.wanted").exists()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"edits": {}}, "Say what to change"),
        ({"edits": {"set": {}, "unset": []}}, "Say what to change"),
        ({"edits": {"set": {"a": 1}}, "settings": {}}, "not both"),
        ({"edits": {"set": {"a//b": 1}}}, "is no path"),
        ({"edits": {"set": {"": 1}}}, "is no path"),
        ({"edits": {"set": {"a": 1, "a/b": 1}}}, "changed by more than one edit"),
        ({"edits": {"set": {"a": 1}, "unset": ["a"]}}, "changed by more than one edit"),
        ({"edits": {"set": {"mtu/b": 1}}}, "mtu is a single value"),
        ({"edits": {"set": {"acts": ["reset"]}}}, "only CYBORG_DRIVER_SETTINGS on the host"),
        ({"edits": {"set": {"backends/gpus/password": "x"}}}, "looks like a secret"),
        ({"edits": {"set": {f"n{n}": 1 for n in range(65)}}}, "At most 64 settings"),
        ({"edits": {"set": {"a": "x" * 40_000, "b": "x" * 40_000}}}, "at most 65536 bytes"),
        ({"edits": {"other": 1}}, "other: cannot be written"),
        ({"op": "uninstall", "edits": {"unset": ["mtu"]}}, "Uninstalling takes neither"),
    ],
)
def test_invalid_edits_are_refused(ask: Ask, installed: None, fields: dict[str, Any], says: str) -> None:
    assert says in get_error_message(post_rollout(ask, hosts=["cmp1"], **fields), 400)
    assert get_settings() == {"mtu": 1500, "backends": {"gpus": {"kind": "pci"}}}
