"""Test that the settings of drivers are checked by the drivers' own code before anything is stored or sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.setting_edits import SettingEdits
from accelerators.domain.states import DeviceOutcome, EventSource, RolloutOp
from accelerators.models import Command, DriverWish, Host, Rollout
from accelerators.workflows import driver_config, driver_rollouts, driver_settings, rollout_previews
from accelerators.workflows.driver_config import DriverChange
from drivers import catalogue
from drivers.errors import Failed
from drivers.generic.driver import GenericDriver
from drivers.inventory import DriverReport
from tests.accelerators.workflows.test_rollouts import INSTALL, OLGA, answer_as_agent, run_rollout, start_rollout
from tests.support.reports import apply_report, get_or_create_host

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
GPUS = {"kind": "pci", "match": [{"vendor": "10de"}]}


def create_hosts(driver: str, version: str = "", *names: str) -> list[Host]:
    """Create hosts that report this driver as absent, in this version."""
    hosts = [get_or_create_host(name) for name in names or ("cmp1",)]
    for host in hosts:
        apply_report(host, DriverReport(driver, state="absent", version=version))
    return [Host.objects.get(pk=host.pk) for host in hosts]


def order(change: DriverChange, hosts: list[Host], is_draft: bool = False) -> Rollout:
    if is_draft:
        return driver_rollouts.store_draft(change, hosts, OLGA, source=EventSource.PERSON).rollout
    return driver_rollouts.start_rollout(change, hosts, OLGA, source=EventSource.PERSON)


@pytest.mark.parametrize(
    ("driver", "settings", "says"),
    [
        ("generic_driver", {"mtu": 1}, "generic_driver has no setting 'mtu'"),
        ("generic_driver", {"backends": []}, "must be a table of at most 64 named sections"),
        ("generic_driver", {"backends": {"a b": GPUS}}, "cannot be called 'a b'"),
        ("generic_driver", {"backends": {"gpus": {"kind": "gpu"}}}, "kind is one of pci, mdev"),
        ("generic_driver", {"backends": {"gpus": GPUS | {"enabld": False}}}, "backend gpus of generic_driver"),
        ("pci_driver", {"rules": [{"vendor": "0x10DE"}]}, "hex digits in lower case without 0x"),
        ("pci_driver", {"rules": [{}]}, "rule 1 of pci_driver selects every function"),
        ("nvidia_gpu_driver", {"rules": [{"colour": "red"}]}, "the rules of nvidia_gpu_driver are not usable"),
        ("fake_driver", {"control_file": 3}, "the settings of fake_driver are not usable"),
    ],
)
def test_settings_that_the_driver_cannot_use_are_refused_before_anything_is_stored(
    driver: str, settings: dict[str, Any], says: str
) -> None:
    hosts = create_hosts(driver, "", "cmp1", "cmp2")
    for chosen, is_draft in ((hosts[:1], False), (hosts, True)):
        with pytest.raises(RefusedError) as refused:
            order(DriverChange(RolloutOp.INSTALL, driver, settings=settings), chosen, is_draft)
        assert refused.value.reason is RefusalReason.INVALID and says in refused.value.text
        assert refused.value.text.endswith("Nothing was changed: correct the settings.")
    assert not (Rollout.objects.exists() or DriverWish.objects.exists() or Command.objects.exists())


def test_edits_that_lead_to_unusable_settings_are_refused_on_each_host() -> None:
    hosts = create_hosts("generic_driver", "", "cmp1", "cmp2")
    for host in hosts:
        start_rollout(INSTALL, [host], "generic_driver", settings={"backends": {"gpus": GPUS}})
        answer_as_agent(Command.objects.latest("id"), version=GenericDriver.version)
        run_rollout(Rollout.objects.latest("id"))
    edits = SettingEdits({"backends/gpus/limits": {"max_devces": 4}})
    change = DriverChange(RolloutOp.UPDATE, "generic_driver", edits=edits)
    with pytest.raises(RefusedError, match="backend gpus of generic_driver is not usable"):
        order(change, hosts[:1])
    assert Rollout.objects.count() == 2 and [wish.generation for wish in DriverWish.objects.all()] == [1, 1]
    preview = rollout_previews.preview_rollout(order(change, hosts, is_draft=True))
    assert preview.count_hosts(DeviceOutcome.REFUSED) == 2 and "is not usable" in preview.hosts[0].text
    usable = DriverChange(RolloutOp.UPDATE, "generic_driver", edits=SettingEdits({"backends/gpus/enabled": False}))
    order(usable, hosts[:1])
    assert DriverWish.objects.filter(generation=2).count() == 1


@pytest.mark.parametrize(("driver", "version"), [("vendor_driver", ""), ("generic_driver", "99")])
def test_settings_of_a_driver_or_version_that_is_not_known_here_are_left_to_the_agent(
    driver: str, version: str
) -> None:
    (host,) = create_hosts(driver, version)
    assert not driver_settings.is_checked_here(driver, host.drivers[driver])
    order(DriverChange(RolloutOp.INSTALL, driver, settings={"mtu": 1}), [host])
    assert DriverWish.objects.get().settings == {"mtu": 1}


def test_settings_that_only_other_versions_of_the_driver_can_use_are_refused_on_the_hosts_with_this_version() -> None:
    hosts = [
        *create_hosts("generic_driver", GenericDriver.version, "cmp1"),
        *create_hosts("generic_driver", "99", "cmp2"),
    ]
    draft = order(DriverChange(RolloutOp.INSTALL, "generic_driver", settings={"mtu": 1}), hosts, is_draft=True)
    first, second = rollout_previews.preview_rollout(draft).hosts
    assert first.outcome == DeviceOutcome.REFUSED and "generic_driver has no setting 'mtu'" in first.text
    assert second.outcome == DeviceOutcome.MOVED
    assert driver_rollouts.confirm_rollout(draft, "")
    driver_rollouts.run()
    assert {step.host_name: step.state for step in draft.steps.all()} == {"cmp1": "skipped", "cmp2": "ordered"}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which the settings are appended that the code of the generic driver checks."""
    checked, check = list[dict[str, Any]](), GenericDriver.check_settings

    def note_and_check(driver: GenericDriver, settings: dict[str, Any]) -> None:
        checked.append(settings)
        check(driver, settings)

    monkeypatch.setattr(GenericDriver, "check_settings", note_and_check)
    return checked


def test_the_settings_of_a_change_are_checked_once_for_all_hosts(checked: list[dict[str, Any]]) -> None:
    hosts = create_hosts("generic_driver", GenericDriver.version, "cmp1", "cmp2", "cmp3", "cmp4")
    change = DriverChange(RolloutOp.INSTALL, "generic_driver", settings={"backends": {"gpus": GPUS}})
    draft = order(change, hosts, is_draft=True)
    assert checked == [change.settings], "for the order, and for the forecasts that are stored with the draft"
    checked.clear()
    assert rollout_previews.preview_rollout(draft).count_hosts(DeviceOutcome.MOVED) == 4
    assert checked == [change.settings]


def test_edits_are_checked_once_for_all_hosts_with_the_same_settings(
    checked: list[dict[str, Any]],
) -> None:
    hosts = create_hosts("generic_driver", "", "cmp1", "cmp2", "cmp3", "cmp4")
    for host, limit in zip(hosts, (4, 4, 4, 8), strict=True):
        section = GPUS | {"limits": {"max_devices": limit}}
        start_rollout(INSTALL, [host], "generic_driver", settings={"backends": {"gpus": section}})
        answer_as_agent(Command.objects.latest("id"), version=GenericDriver.version)
        run_rollout(Rollout.objects.latest("id"))
    edits = SettingEdits({"backends/gpus/enabled": False})
    draft = order(DriverChange(RolloutOp.UPDATE, "generic_driver", edits=edits), hosts, is_draft=True)
    checked.clear()
    assert rollout_previews.preview_rollout(draft).count_hosts(DeviceOutcome.MOVED) == 4
    limits = [settings["backends"]["gpus"]["limits"]["max_devices"] for settings in checked]
    assert limits == [4, 8]


@pytest.fixture
def driver_cache() -> Iterator[None]:
    """Forget the loaded drivers before and after a test that replaces one."""
    driver_settings.find_own_driver.cache_clear()
    yield
    driver_settings.find_own_driver.cache_clear()


@pytest.mark.usefixtures("driver_cache")
@pytest.mark.parametrize("fault", ["import", "check"])
def test_settings_are_left_to_the_agent_with_a_log_line_if_the_code_of_the_driver_fails(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise Failed("libfoo.so is missing") if fault == "import" else KeyError("backends")

    monkeypatch.setattr(*((catalogue, "load_driver") if fault == "import" else (GenericDriver, "check_settings")), fail)
    hosts = create_hosts("generic_driver", GenericDriver.version, "cmp1", "cmp2")
    change = DriverChange(RolloutOp.INSTALL, "generic_driver", settings={"backends": {}})
    order(change, hosts[:1])
    assert DriverWish.objects.get().settings == {"backends": {}}
    preview = rollout_previews.preview_rollout(order(change, hosts[1:], is_draft=True))
    assert preview.count_hosts(DeviceOutcome.MOVED) == 1
    assert "checked by the agent" in caplog.text and ("libfoo.so" in caplog.text or "KeyError" in caplog.text)


@pytest.mark.usefixtures("driver_cache")
def test_the_code_of_a_driver_is_loaded_before_the_order_locks_the_host() -> None:
    (host,) = create_hosts("generic_driver")
    change = DriverChange(RolloutOp.UPDATE, "generic_driver", settings={"backends": {}})
    driver_config.ask_holders_for_change(host, change)  # the driver is not installed: nothing is asked
    assert driver_settings.find_own_driver.cache_info().currsize == 1


def test_the_drivers_of_this_product_are_checked_here_and_accept_no_settings() -> None:
    own = [name for name in catalogue.list_driver_names() if driver_settings.is_checked_here(name)]
    assert {"generic_driver", "pci_driver", "nvidia_gpu_driver", "fake_driver"} <= set(own)
    for name in own:
        assert driver_settings.find_settings_error(name, {}) == ""
