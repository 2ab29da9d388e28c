"""Tests of driver changes ordered over HTTP and sent to a simulated agent, and of a rollout whose worker is killed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client

from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource, RolloutOp
from accelerators.models import Command, Device, HostDriver, Rollout
from accelerators.workflows import command_endings, driver_rollouts
from accelerators.workflows.driver_config import DriverChange
from agents import jobs, wire
from agents.gateway import command_dispatch
from cyborgweb.models import ApiToken
from drivers.inventory import DriverReport
from tests.support.reports import apply_report, get_or_create_host, make_card
from tests.support.webserver import until
from tests.support.wireagent import OPS, WireAgent, ask, receive_result_ack, send_result, take_command

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("agents_need_not_be_up")]


@pytest.fixture(autouse=True)
def _short_poll_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_dispatch, "POLL_S", 0.1)


class ApiOperator:
    """Client of /api with the token of an operator."""

    def __init__(self) -> None:
        user = User.objects.create_user("rita")
        self.token = ApiToken.create_with_secret("rita", user, ["accelerator_operator", "member", "reader"], "p1")

    def call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body) if body else ""
        response = Client().generic(method, path, data, "application/json", headers={"X-Auth-Token": self.token})
        assert response.status_code in (200, 202), response.content
        return dict(json.loads(response.content))


def make_report(seq: int, *drivers: DriverReport) -> wire.Report:
    return wire.Report.from_driver_reports(1, seq, wire.hash_report_content(drivers), drivers)


def test_a_rollout_is_done_only_after_the_report_of_the_installed_driver_is_merged(agent: WireAgent) -> None:
    rita = ApiOperator()
    with agent.connect_and_say_hello((*OPS, "configure")) as socket:
        absent = make_report(1, DriverReport("pci_driver", state="absent"))
        assert not absent.drivers, "where a conductor from before looks for what is there"
        ask(socket, absent)
        jobs.merge()
        assert rita.call("GET", "/api/drivers/")["results"][0]["seen"]["state"] == "absent"
        made = rita.call(
            "POST",
            "/api/rollouts/",
            op="install",
            driver="pci_driver",
            hosts=["cmp1"],
            settings={"a": [1]},
            generation=0,
        )
        heard = take_command(socket)
        assert (heard.op, heard.driver) == ("configure", "pci_driver")
        assert heard.wish == wire.Wish(1, settings={"a": [1]})
        after = make_report(2, DriverReport("pci_driver", devices=(make_card(1),), version="2", generation=1))
        ask(socket, after)
        send_result(socket, heard, text="pci_driver is enabled", epoch=1, seq=2, hash=after.hash)
        until(lambda: Command.objects.filter(answered_at__isnull=False).exists())
        command_endings.run()
        driver_rollouts.run()
        assert rita.call("GET", made["url"])["state"] == "running", "its report is not applied"
        jobs.merge()
        command_endings.run()
        driver_rollouts.run()
        assert receive_result_ack(socket) == heard.number
        shown = rita.call("GET", made["url"])
        assert (shown["state"], shown["steps"][0]["text"]) == ("done", "pci_driver is enabled")
        (row,) = rita.call("GET", "/api/drivers/")["results"]
        assert (row["devices"], row["version"], row["drifts"], Device.objects.count()) == (1, "2", False, 1)


def test_a_rollout_fails_with_an_agent_that_does_not_support_configure(agent: WireAgent) -> None:
    rita = ApiOperator()
    with agent.connect_and_say_hello(OPS) as socket:
        ask(socket, make_report(1, DriverReport("fake_driver")))
        jobs.merge()
        (row,) = rita.call("GET", "/api/drivers/")["results"]
        assert (row["seen"]["state"], row["seen"]["generation"], row["version"]) == ("ok", 0, "")
        made = rita.call(
            "POST", "/api/rollouts/", op="update", driver="fake_driver", hosts=["cmp1"], enabled=False, generation=0
        )
        send_result(
            socket,
            take_command(socket),
            "refused",
            "this release of the agent does not support the command 'configure': update the agent",
        )
        until(lambda: Command.objects.filter(answered_at__isnull=False).exists())
        command_endings.run()
        driver_rollouts.run()
        (step,) = rita.call("GET", made["url"])["steps"]
        assert (step["state"], step["text"].endswith("update the agent")) == ("failed", True)


class KilledError(BaseException):
    """Stands for SIGKILL: the running transaction is rolled back, and no error handling of the product catches it."""


@pytest.mark.slow
def test_L2_a_rollout_sends_one_command_to_each_host_when_the_worker_is_killed_anywhere() -> None:
    hosts = [get_or_create_host(f"cmp{n}") for n in range(3)]
    for host in hosts:
        apply_report(host, DriverReport("pci_driver", state="absent"))
    olga = Caller("olga", "u", frozenset(), "p1")
    rollout = driver_rollouts.start_rollout(
        DriverChange(RolloutOp.INSTALL, "pci_driver"), hosts, olga, source=EventSource.PERSON
    )
    assert not Command.objects.exists()
    kills = 0
    for statement in range(1, 500):
        left = statement

        def kill_at_statement(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                raise KilledError
            return execute(sql, params, many, context)

        try:
            with connection.execute_wrapper(kill_at_statement):
                driver_rollouts.run()
        except KilledError:
            kills += 1
        else:
            break
        assert Command.objects.count() == rollout.steps.filter(state="ordered").count()
    assert kills > 20
    assert Command.objects.count() == 3
    assert HostDriver.objects.filter(driver="pci_driver", drifts=True, wish__generation=1).count() == 3
    assert Rollout.objects.get().state == "running"
