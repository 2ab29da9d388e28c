"""The live feed at its socket: who may watch, what is told of a change, and that an outage is said and made good."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest, Device, DeviceProfile
from cyborgweb.auth import roles
from cyborgweb.live import session_permissions
from cyborgweb.live.feed import FeedIntervals, LiveFeed
from cyborgweb.live.list_snapshot import ListSnapshot
from cyborgweb.live.socket import ConsoleSocket
from tests.support.reports import a_heard_host, a_host, answer, apply, card
from tests.support.webserver import PATIENCE, serving

pytestmark = pytest.mark.django_db(transaction=True)
DEVICES = "/admin/accelerators/device/"


class House:
    """Serves whichever console is in it."""

    console: Any = None
    port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.console(scope, receive, send)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    made = House()
    with serving(made) as made.port:
        yield made


@pytest.fixture
def port(house: House) -> Iterator[int]:
    house.console = ConsoleSocket(
        LiveFeed(FeedIntervals(look_s=0.02, permission_check_s=0.02, reload_hint_s=0.1, uncounted_query_s=0.02))
    )
    yield house.port
    house.console.feed.stop()


@pytest.fixture
def person() -> User:
    user = User.objects.create(username="olga", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_device"))
    return user


@pytest.fixture
def page(person: User) -> Client:
    client = Client()
    client.force_login(person)
    return client


class Tab:
    """A page somebody looks at: its cells, as the browser keeps them."""

    def __init__(self, port: int, client: Client, path: str = DEVICES, query: str = "", origin: str = "") -> None:
        html = client.get(f"{path}?{query}").content.decode()
        self.cells = {key: cells for key, cells in rows(html, path).items()}
        self.live, self.gone, self.new, self.moved = False, set[str](), 0, 0
        self.told: list[dict[str, Any]] = []
        host = f"127.0.0.1:{port}"
        cookie = f"sessionid={client.cookies['sessionid'].value}" if "sessionid" in client.cookies else ""
        opened = connect(
            f"ws://{host}/ws/console",
            additional_headers={"Cookie": cookie},
            origin=origin or f"http://{host}",  # type: ignore[arg-type]
        )
        self.socket: ClientConnection = opened.__enter__()
        with suppress(ConnectionClosed):
            self.say(path=path if path != "/admin/" else "", query=query, rows=list(self.cells))

    def say(self, **what: Any) -> None:
        self.socket.send(json.dumps(what))

    def hear(self, deadline_s: float = 20.0) -> None:
        said = json.loads(self.socket.recv(deadline_s))
        self.told.append(said)
        for key, cells in said.get("rows", {}).items():
            self.cells[key] |= cells
        self.gone |= set(said.get("gone", ()))
        self.live, self.new = said["live"], said.get("new", self.new)
        self.moved += said.get("moved", False)

    def until(self, condition: Any, deadline_s: float = 20.0) -> None:
        end = time.monotonic() + PATIENCE * deadline_s
        while not condition():
            self.hear(max(0.01, end - time.monotonic()))

    def closed(self) -> int:
        """The code it is closed with."""
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                self.hear()
        assert closed.value.rcvd
        return closed.value.rcvd.code


def rows(html: str, path: str) -> dict[str, dict[str, str]]:
    """The cells of a list's HTML by key and column."""
    found = {}
    for row in re.findall(r'<tr class="data-row.*?</tr>', html, re.DOTALL):
        key = re.search(rf'href="{path}([^/"]+)/change/', row)
        if key:
            cells = re.findall(r'<t[dh] class="(field-\w+)[^>]*>(.*?)</t[dh]>', row, re.DOTALL)
            found[key[1]] = dict(cells)
    return found


def without_ages(cells: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {
        key: {name: re.sub(r"(<time[^>]*>)[^<]*", r"\1", html) for name, html in row.items()}
        for key, row in cells.items()
    }


def move(state: str, *pks: int) -> None:
    with conductor.writing():
        Device.objects.filter(pk__in=pks or list(Device.objects.values_list("pk", flat=True))).update(state=state)


def test_cells_are_those_the_list_renders_and_only_the_changed_ones_are_told_again(port: int, page: Client) -> None:
    apply(a_host(), answer(card(1), card(2)))
    tab = Tab(port, page)
    tab.until(lambda: tab.live)
    assert without_ages(tab.cells) == without_ages(rows(page.get(DEVICES).content.decode(), DEVICES))
    one = Device.objects.order_by("pk")[0]
    move("ready", one.pk)
    tab.told.clear()
    tab.until(lambda: "ready" in tab.cells[str(one.pk)]["field-shown_state"])
    assert [list(said["rows"]) for said in tab.told if "rows" in said] == [[str(one.pk)]]
    assert list(tab.told[-1]["rows"][str(one.pk)]) == ["field-shown_state"]
    assert "●" in tab.cells[str(one.pk)]["field-shown_state"]


def test_links_keep_the_filter_of_the_page_and_rows_that_left_it_stay_true(port: int, page: Client) -> None:
    apply(a_host(), answer(card(1)))
    tab = Tab(port, page, query="state__exact=inactive")
    tab.until(lambda: tab.live)
    (key,) = tab.cells
    assert "_changelist_filters=state__exact%3Dinactive" in tab.cells[key]["field-shown_model"]
    move("ready")
    tab.until(lambda: "ready" in tab.cells[key]["field-shown_state"])


def test_new_rows_are_counted_and_gone_ones_named(port: int, page: Client) -> None:
    host = a_host()
    apply(host, answer(card(1), card(2)))
    tab = Tab(port, page)
    tab.until(lambda: tab.live)
    apply(host, answer(card(1), card(2), card(3)), seq=2)
    tab.until(lambda: tab.new == 1)
    with connection.cursor() as cursor, conductor.writing():
        cursor.execute("SET LOCAL session_replication_role TO replica")
        cursor.execute("DELETE FROM accelerators_device WHERE id = %s", [int(min(tab.cells))])
        cursor.execute("UPDATE generation SET value = value + 1")
    tab.until(lambda: tab.gone == {min(tab.cells)})


def test_what_no_generation_counts_is_told_as_well(port: int, page: Client, person: User) -> None:
    person.user_permissions.add(Permission.objects.get(codename="view_agent"))
    agent = a_heard_host("cmp1", 1).agent
    tab = Tab(port, page, "/admin/agents/agent/")
    tab.until(lambda: tab.live)
    agent.version = "9.9"
    agent.save()
    tab.until(lambda: "9.9" in tab.cells[str(agent.pk)]["field-version"])


def test_who_sees_one_project_s_rows_and_who_sees_all_are_each_told_of_their_own(port: int) -> None:
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="small", groups=[{"resources:FPGA": "1"}])
        make = {"state": "Initial", "profile": profile, "group": {}}
        made = [AcceleratorRequest.objects.create(project_id=project, **make) for project in ("p1", "p2")]
        conductor.record_event("request.created", EventSource.SYSTEM, "test")
    mine, theirs = (str(one.pk) for one in made)
    requests, tabs = "/admin/accelerators/acceleratorrequest/", []
    for group in ("project:p1", "role:administrator"):
        user = User.objects.create(username=group, is_staff=True, is_superuser=group == "role:administrator")
        user.groups.add(roles.get_group(group))
        client = Client()
        client.force_login(user)
        tabs.append(Tab(port, client, requests))
    tenant, admin = tabs
    assert (set(tenant.cells), set(admin.cells)) == ({mine}, {mine, theirs})
    tenant.say(path=requests, query="", rows=[mine, theirs])  # what its page never showed
    tenant.until(lambda: tenant.live and theirs in tenant.gone)
    admin.until(lambda: admin.live)
    with conductor.writing():
        AcceleratorRequest.objects.update(hostname="cmp77")
        conductor.record_event("request.bound", EventSource.SYSTEM, "test")
    admin.until(lambda: all("cmp77" in cells["field-hostname"] for cells in admin.cells.values()))
    tenant.until(lambda: "cmp77" in tenant.cells[mine]["field-hostname"])
    assert not admin.gone and set(tenant.cells) == {mine}


def test_other_pages_are_told_to_fetch_themselves_once_for_many_changes(port: int, page: Client) -> None:
    apply(a_host(), answer(card(1)))
    tab = Tab(port, page, "/admin/")
    tab.until(lambda: tab.moved == 1)
    for state in ("ready", "maintenance", "ready"):
        move(state)
    tab.until(lambda: tab.moved == 2)
    assert tab.live


def test_an_outage_is_said_and_afterwards_every_row_is_as_stored(port: int, page: Client) -> None:
    apply(a_host(), answer(*(card(bus) for bus in range(1, 31))))
    tab = Tab(port, page)
    tab.until(lambda: tab.live)
    name = connection.settings_dict["NAME"]
    with psycopg.connect(**connection.get_connection_params() | {"dbname": "postgres"}, autocommit=True) as outside:
        outside.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            own = connection.connection.info.backend_pid
            outside.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> %s", [name, own]
            )
            tab.until(lambda: not tab.live)
            for state in ("ready", "maintenance"):
                move(state)
        finally:
            outside.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    tab.until(lambda: tab.live)
    tab.until(lambda: all("maintenance" in row["field-shown_state"] for row in tab.cells.values()))
    assert without_ages(tab.cells) == without_ages(rows(page.get(DEVICES).content.decode(), DEVICES))


def test_a_logout_or_a_lost_permission_closes_the_feed(port: int, page: Client, person: User) -> None:
    other = Client()
    other.force_login(person)
    first, second = Tab(port, page), Tab(port, other)
    first.until(lambda: first.live)
    second.until(lambda: second.live)
    page.logout()
    assert first.closed() == 4401
    person.user_permissions.clear()
    assert second.closed() == 4401
    with pytest.raises(ConnectionClosed):
        Tab(port, other).until(lambda: False)


def test_only_what_one_may_view_is_followed_and_from_our_own_pages_alone(port: int, page: Client, person: User) -> None:
    apply(a_host(), answer(card(1)))
    tab = Tab(port, page)
    tab.say(path="/admin/accelerators/host/", query="", rows=["1"])
    assert tab.closed() == 4403
    assert Tab(port, Client()).closed() == 4401
    person.is_staff = False
    person.save()
    assert Tab(port, page).closed() == 4401
    other_origins = ("https://evil.example", "null", f"http://127.0.0.1:{port}.evil.example")
    for origin in other_origins:
        with pytest.raises(InvalidStatus):
            Tab(port, page, origin=origin)


def test_what_cannot_be_meant_closes_and_crafted_keys_are_left_out(port: int, page: Client) -> None:
    apply(a_host(), answer(card(1)))
    for said, code in {
        "{": 4400,
        '{"path": "/admin/", "rows": 7}': 4400,
        '{"path": "/admin/nothing/"}': 4400,
        json.dumps({"path": DEVICES, "rows": ["1"] * 101}): 4400,
        json.dumps({"path": DEVICES, "query": "state__exact__bad=1", "rows": ["1"]}): 4400,
        "x" * 20_000: 1009,
    }.items():
        tab = Tab(port, page)
        tab.socket.send(said)
        assert tab.closed() == code, said
    tab = Tab(port, page)
    tab.say(path=DEVICES, rows=[*tab.cells, "x", "-1", "9" * 40, "\x00"])
    tab.until(lambda: tab.live and tab.told[-1].get("gone") is not None)
    assert tab.gone == {"-1", "9" * 40}
    for _ in range(30):
        with suppress(ConnectionClosed):
            tab.say(path=DEVICES, rows=[])
    assert tab.closed() == 4429


def test_a_list_that_fails_ends_for_who_looks_at_it_and_the_others_go_on(
    port: int, page: Client, person: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    person.user_permissions.add(Permission.objects.get(codename="view_agent"))
    agent = a_heard_host("cmp1", 1).agent
    devices, agents = Tab(port, page), Tab(port, page, "/admin/agents/agent/")
    devices.until(lambda: devices.live)
    agents.until(lambda: agents.live)
    cells = ListSnapshot.render_rows

    def failing(shown: ListSnapshot, keys: Any) -> Any:
        if shown.admin.opts.label_lower == "accelerators.device":
            raise AttributeError("a column of one changed row")
        return cells(shown, keys)

    with monkeypatch.context() as patched:
        patched.setattr(ListSnapshot, "render_rows", failing)
        move("ready")
        assert devices.closed() == 1013
        agent.version = "9.9"
        agent.save()
        agents.until(lambda: "9.9" in agents.cells[str(agent.pk)]["field-version"])
        assert all(said["live"] for said in agents.told)
    again = Tab(port, page)
    again.until(lambda: again.live)


@pytest.mark.parametrize("asked", ["filter_live_sessions", "user_of_session"])
def test_nothing_that_fails_ends_the_feed(
    port: int, page: Client, monkeypatch: pytest.MonkeyPatch, asked: str, house: House
) -> None:
    apply(a_host(), answer(card(1)))
    tab = Tab(port, page)
    tab.until(lambda: tab.live)

    def failing(*_: Any) -> None:
        raise RuntimeError("not of the database")

    with monkeypatch.context() as patched:
        patched.setattr(session_permissions, asked, failing)
        if asked == "filter_live_sessions":
            tab.until(lambda: not tab.live)
        else:
            assert Tab(port, page).closed() == 1013
            house.console.feed._calls.put((failing, ()))
    move("ready")
    tab.until(lambda: tab.live and all("ready" in row["field-shown_state"] for row in tab.cells.values()))
