"""Test the live feed of the console on a real socket: permissions, sent changes, and recovery after an outage."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.contrib.auth.models import Group, Permission, User
from django.contrib.sessions.models import Session
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from msgspec.structs import replace
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest, Attachment, Bulk, Command, Device, DeviceProfile, Host, Rollout
from cyborgweb.auth import roles
from cyborgweb.live import feed as feed_module
from cyborgweb.live import session_permissions
from cyborgweb.live.feed import MAX_RELOADS_PER_S, ConsoleWatcher, FeedIntervals, LiveFeed
from cyborgweb.live.list_snapshot import ListSnapshot, lists_by_path
from cyborgweb.live.page_version import EVERYTHING, PageContent, PageSubject, find_page_content
from cyborgweb.live.socket import ConsoleSocket
from tests.support.reports import apply_report, create_heard_host, get_or_create_host, make_card, make_driver_report
from tests.support.webserver import PATIENCE, serving

pytestmark = pytest.mark.django_db(transaction=True)
DEVICES = "/admin/accelerators/device/"


class SwitchableConsole:
    """Passes requests to its present console, which each test replaces."""

    console: Any = None
    port = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.console(scope, receive, send)


@pytest.fixture(scope="module")
def console_server() -> Iterator[SwitchableConsole]:
    made = SwitchableConsole()
    with serving(made) as made.port:
        yield made


@pytest.fixture
def port(console_server: SwitchableConsole) -> Iterator[int]:
    console_server.console = ConsoleSocket(
        LiveFeed(
            FeedIntervals(
                look_s=0.02, permission_check_s=0.02, reload_hint_s=0.1, bounded_hint_s=0.1, uncounted_query_s=0.02
            )
        )
    )
    yield console_server.port
    console_server.console.feed.stop()


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


class LivePage:
    """A page that a user has open; `cells` are its cells, updated from the feed as a browser does."""

    def __init__(self, port: int, client: Client, path: str = DEVICES, query: str = "", origin: str = "") -> None:
        html = client.get(f"{path}?{query}").content.decode()
        self.cells = {key: cells for key, cells in parse_cells(html, path).items()}
        self.live, self.gone_rows, self.new_rows, self.reload_requests = False, set[str](), 0, 0
        self.messages: list[dict[str, Any]] = []
        host = f"127.0.0.1:{port}"
        cookie = f"sessionid={client.cookies['sessionid'].value}" if "sessionid" in client.cookies else ""
        opened = connect(
            f"ws://{host}/ws/console",
            additional_headers={"Cookie": cookie},
            origin=origin or f"http://{host}",  # type: ignore[arg-type]
        )
        self.socket: ClientConnection = opened.__enter__()
        with suppress(ConnectionClosed):
            is_list = path in lists_by_path()
            self.send(path=path if is_list else "", query=query, rows=list(self.cells), page="" if is_list else path)

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def receive(self, deadline_s: float = 20.0) -> None:
        said = json.loads(self.socket.recv(deadline_s))
        self.messages.append(said)
        for key, cells in said.get("rows", {}).items():
            self.cells[key] |= cells
        self.gone_rows |= set(said.get("gone", ()))
        self.live, self.new_rows = said["live"], said.get("new", self.new_rows)
        self.reload_requests += said.get("moved", False)

    def receive_until(self, condition: Any, deadline_s: float = 20.0) -> None:
        end = time.monotonic() + PATIENCE * deadline_s
        while not condition():
            self.receive(max(0.01, end - time.monotonic()))

    def receive_close_code(self) -> int:
        """Wait until the feed closes the socket, and return the close code."""
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                self.receive()
        assert closed.value.rcvd
        return closed.value.rcvd.code


def parse_cells(html: str, path: str) -> dict[str, dict[str, str]]:
    """Return the cells of a list's HTML, by the row's key and by the cell's CSS class."""
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


def set_state(state: str, *pks: int) -> None:
    with conductor.writing():
        Device.objects.filter(pk__in=pks or list(Device.objects.values_list("pk", flat=True))).update(state=state)


@pytest.mark.slow
def test_live_cells_equal_the_rendered_list_and_only_changed_cells_are_sent_again(port: int, page: Client) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2)))
    tab = LivePage(port, page)
    tab.receive_until(lambda: tab.live)
    assert without_ages(tab.cells) == without_ages(parse_cells(page.get(DEVICES).content.decode(), DEVICES))
    one = Device.objects.order_by("pk")[0]
    set_state("ready", one.pk)
    tab.messages.clear()
    tab.receive_until(lambda: "ready" in tab.cells[str(one.pk)]["field-shown_state"])
    assert [list(said["rows"]) for said in tab.messages if "rows" in said] == [[str(one.pk)]]
    assert list(tab.messages[-1]["rows"][str(one.pk)]) == ["field-shown_state"]
    assert "●" in tab.cells[str(one.pk)]["field-shown_state"]


def test_live_links_keep_the_filter_and_rows_that_no_longer_match_are_still_updated(port: int, page: Client) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    tab = LivePage(port, page, query="state__exact=inactive")
    tab.receive_until(lambda: tab.live)
    (key,) = tab.cells
    assert "_changelist_filters=state__exact%3Dinactive" in tab.cells[key]["field-shown_model"]
    set_state("ready")
    tab.receive_until(lambda: "ready" in tab.cells[key]["field-shown_state"])


def test_the_feed_counts_new_rows_and_names_removed_ones(port: int, page: Client) -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1), make_card(2)))
    tab = LivePage(port, page)
    tab.receive_until(lambda: tab.live)
    apply_report(host, make_driver_report(make_card(1), make_card(2), make_card(3)), seq=2)
    tab.receive_until(lambda: tab.new_rows == 1)
    with connection.cursor() as cursor, conductor.writing():
        cursor.execute("SET LOCAL session_replication_role TO replica")
        cursor.execute("DELETE FROM accelerators_device WHERE id = %s", [int(min(tab.cells))])
        cursor.execute("UPDATE generation SET value = value + 1")
    tab.receive_until(lambda: tab.gone_rows == {min(tab.cells)})


def test_changes_of_models_without_a_generation_are_sent_as_well(port: int, page: Client, person: User) -> None:
    person.user_permissions.add(Permission.objects.get(codename="view_agent"))
    agent = create_heard_host("cmp1", 1).agent
    tab = LivePage(port, page, "/admin/agents/agent/")
    tab.receive_until(lambda: tab.live)
    agent.version = "9.9"
    agent.save()
    tab.receive_until(lambda: "9.9" in tab.cells[str(agent.pk)]["field-version"])


@pytest.mark.slow
def test_the_feed_sends_a_tenant_only_the_rows_of_its_project(port: int) -> None:
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
        tabs.append(LivePage(port, client, requests))
    tenant, admin = tabs
    assert (set(tenant.cells), set(admin.cells)) == ({mine}, {mine, theirs})
    tenant.send(path=requests, query="", rows=[mine, theirs])  # it asks for a row that its page never showed
    tenant.receive_until(lambda: tenant.live and theirs in tenant.gone_rows)
    admin.receive_until(lambda: admin.live)
    with conductor.writing():
        AcceleratorRequest.objects.update(hostname="cmp77")
        conductor.record_event("request.bound", EventSource.SYSTEM, "test")
    admin.receive_until(lambda: all("cmp77" in cells["field-shown_hostname"] for cells in admin.cells.values()))
    tenant.receive_until(lambda: "cmp77" in tenant.cells[mine]["field-shown_hostname"])
    assert not admin.gone_rows and set(tenant.cells) == {mine}


def test_other_pages_are_asked_to_reload_once_for_several_changes(port: int, page: Client) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    tab = LivePage(port, page, "/admin/")
    tab.receive_until(lambda: tab.reload_requests == 1)
    for state in ("ready", "maintenance", "ready"):
        set_state(state)
    tab.receive_until(lambda: tab.reload_requests == 2)
    assert tab.live


def change_name_of_card(host: Host, seq: int) -> None:
    """Apply a report of the host in which the model of its card is `seq`."""
    apply_report(host, make_driver_report(replace(make_card(1), model=f"model {seq}")), seq=seq)


@pytest.mark.slow
def test_pages_of_a_host_and_its_devices_reload_only_for_changes_of_that_host(
    port: int, page: Client, person: User
) -> None:
    person.user_permissions.add(Permission.objects.get(codename="view_host"))
    mine, other = get_or_create_host("cmp1"), get_or_create_host("cmp2")
    for host in (mine, other):
        change_name_of_card(host, 1)
    device = Device.objects.get(host=mine)
    tabs = [
        LivePage(port, page, f"/admin/accelerators/{name}/{key}/change/")
        for name, key in (("host", mine.pk), ("device", device.pk), ("device", device.uuid))
    ]
    overview = LivePage(port, page, "/admin/")
    for tab in (*tabs, overview):
        tab.receive_until(lambda tab=tab: tab.reload_requests == 1)  # type: ignore[misc]
    for seq in (2, 3):
        change_name_of_card(other, seq)
        overview.receive_until(lambda seq=seq: overview.reload_requests == seq)  # type: ignore[misc]
    change_name_of_card(mine, 2)
    for tab in tabs:
        tab.receive_until(lambda tab=tab: tab.reload_requests == 2)  # type: ignore[misc]
        assert [said.get("moved") for said in tab.messages].count(True) == 2 and tab.live


def create_shown_rows(device: Device) -> dict[str, Any]:
    """Create a row for each kind of page with a subject; return them by their names in addresses."""
    common = {"actor": "olga", "total": 1}
    profile = DeviceProfile.objects.create(name="small", groups=[])
    rows: dict[str, Any] = {
        "acceleratorrequest": AcceleratorRequest.objects.create(
            profile=profile, project_id="p1", group_id=0, group={}, instance_uuid=uuid4()
        ),
        "command": Command.objects.create(
            host=device.host, device=device, op="health", actor="olga", start_by=Now(), end_by=Now()
        ),
        "attachment": Attachment.objects.create(
            instance=uuid4(), project_id="p1", host="cmp1", actor="olga", state="attached"
        ),
        "rollout": Rollout.objects.create(op="disable", driver="fake", source="person", **common),
        "bulk": Bulk.objects.create(action="enable", state="running", **common),
    }
    conductor.record_event("profile.created", EventSource.PERSON, "olga", subject=(profile.uuid, "small"))
    for name, row in rows.items():
        kind = "request" if name == "acceleratorrequest" else name
        conductor.record_event(f"{kind}.created", EventSource.PERSON, "olga", subject=(row.uuid, ""))
    return rows


def test_the_page_of_each_kind_of_row_reloads_only_for_changes_of_its_row(
    person: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed's looks run here without its thread: one after each change, with a page of each kind open."""
    monkeypatch.setattr(feed_module, "UNVERSIONED_INTERVAL_S", float("inf"))
    host = get_or_create_host("cmp1")
    change_name_of_card(host, 1)
    with conductor.writing():
        rows = create_shown_rows(Device.objects.get())
    feed, now = LiveFeed(), 1000.0
    pages = {
        name: ConsoleWatcher("", lambda message: None, is_plain_page=True, user=person)
        for name in ("host", *rows, "overview")
    }
    pages["host"].content = find_page_content(f"/admin/accelerators/host/{host.pk}/change/")
    for name, row in rows.items():
        pages[name].content = find_page_content(f"/admin/accelerators/{name}/{row.uuid}/change/")

    def list_reloading_pages() -> set[str]:
        nonlocal now
        found: set[str] = set()
        for _ in range(6):  # a look tells only some pages, and the overview at most once in ten seconds
            now += 2
            feed._read_generations()
            feed._send_reload_hints(list(pages.values()), now)
            found |= {name for name, one in pages.items() if one.pending_message.pop("moved", None)}
        return found

    assert list_reloading_pages() == set(pages)
    assert list_reloading_pages() == set()
    for name, row in rows.items():
        column = (
            "progress" if name == "command" else "fault" if name in ("acceleratorrequest", "attachment") else "reason"
        )
        with conductor.writing():
            type(row).objects.filter(pk=row.pk).update(**{column: "changed"})
            subject = "request" if name == "acceleratorrequest" else name
            conductor.record_event(f"{subject}.changed", EventSource.PERSON, "olga", subject=(row.uuid, ""))
        assert list_reloading_pages() == {name, "overview"}, name


def test_pages_of_usage_and_profiles_do_not_reload_for_events_and_drafts_reload_for_everything(person: User) -> None:
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="small", groups=[])
        draft = Bulk.objects.create(action="enable", total=1, actor="olga")
        for kind, row in (("profile", profile), ("bulk", draft)):
            conductor.record_event(f"{kind}.created", EventSource.PERSON, "olga", subject=(row.uuid, ""))
    feed = LiveFeed()
    paths = ("/admin/usage/", f"/admin/accelerators/deviceprofile/{profile.pk}/change/")
    for path in paths:
        content = find_page_content(path)
        feed._generations = {"devices": 1, "events": 1, "commands": 1}
        before = feed._compute_page_state(content, "all")
        feed._generations |= {"events": 2, "commands": 2}
        assert feed._compute_page_state(content, "other") == before, path
        feed._generations |= {"devices": 2}
        assert feed._compute_page_state(content, "other") != before, path
    for path in ("/admin/", f"/admin/accelerators/bulk/{draft.pk}/change/", "/admin/accelerators/host/999/change/"):
        assert find_page_content(path) == EVERYTHING, path


def test_a_page_that_waits_for_its_reload_is_told_how_far_it_is_behind(person: User) -> None:
    feed = LiveFeed()
    overview = ConsoleWatcher("", lambda message: None, is_plain_page=True, user=person)
    looks = []
    for now in (1000.0, 1001.0, 1003.0, 1005.0, 1011.0):
        conductor.set_hosts_stale_since([get_or_create_host().pk], datetime.now(UTC) + timedelta(seconds=now))
        feed._read_generations()
        feed._send_reload_hints([overview], now)
        looks.append(overview.pending_message)
        overview.pending_message = {}
    assert looks == [{"moved": True}, {}, {}, {"behind": 4.0}, {"moved": True}]
    assert overview.is_live


@pytest.mark.slow
def test_many_pages_stay_live_while_data_changes_all_the_time(person: User) -> None:
    """The feed's looks run here without its thread, with 200 pages of several hosts and a change before each look."""
    hosts = [get_or_create_host(f"cmp{number}") for number in range(10)]
    for host in hosts:
        change_name_of_card(host, 1)
    feed, posted = LiveFeed(FeedIntervals(reload_hint_s=0, bounded_hint_s=0)), list[str | int]()
    pages = [ConsoleWatcher("", posted.append, is_plain_page=True, user=person) for _ in range(200)]
    for number, one in enumerate(pages):
        one.content = PageContent(PageSubject("host", hosts[number % 10].pk)) if number % 2 else EVERYTHING
    reloads = 0
    for look in range(100):
        conductor.set_hosts_stale_since([hosts[look % 10].pk], datetime.now(UTC) + timedelta(seconds=look))
        feed._read_generations()
        feed._send_reload_hints(pages, now=1000 + look / 2)
        hinted = [one for one in pages if one.pending_message.pop("moved", None)]
        assert look == 0 or len(hinted) <= MAX_RELOADS_PER_S / 2
        reloads += len(hinted)
    assert all(one.is_live for one in pages)
    assert reloads >= 500
    assert max(1050 - one.hinted_at for one in pages if one.content is EVERYTHING) < 15


@pytest.mark.slow
def test_the_feed_reports_a_database_outage_and_then_sends_every_missed_change(port: int, page: Client) -> None:
    apply_report(get_or_create_host(), make_driver_report(*(make_card(bus) for bus in range(1, 31))))
    tab = LivePage(port, page)
    tab.receive_until(lambda: tab.live)
    name = connection.settings_dict["NAME"]
    with psycopg.connect(**connection.get_connection_params() | {"dbname": "postgres"}, autocommit=True) as outside:
        outside.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            own = connection.connection.info.backend_pid
            outside.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> %s", [name, own]
            )
            tab.receive_until(lambda: not tab.live)
            for state in ("ready", "maintenance"):
                set_state(state)
        finally:
            outside.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    tab.receive_until(lambda: tab.live)
    tab.receive_until(lambda: all("maintenance" in row["field-shown_state"] for row in tab.cells.values()))
    assert without_ages(tab.cells) == without_ages(parse_cells(page.get(DEVICES).content.decode(), DEVICES))


@pytest.mark.slow
def test_the_feed_is_closed_after_a_logout_or_a_lost_permission(port: int, page: Client, person: User) -> None:
    other = Client()
    other.force_login(person)
    first, second = LivePage(port, page), LivePage(port, other)
    first.receive_until(lambda: first.live)
    second.receive_until(lambda: second.live)
    page.logout()
    assert first.receive_close_code() == 4401
    person.user_permissions.clear()
    assert second.receive_close_code() == 4401
    with pytest.raises(ConnectionClosed):
        LivePage(port, other).receive_until(lambda: False)


def test_a_users_fingerprint_changes_with_the_password_and_with_own_and_group_permissions(person: User) -> None:
    view_host, view_agent = (Permission.objects.get(codename=name) for name in ("view_host", "view_agent"))
    group, other_group = Group.objects.create(name="night"), Group.objects.create(name="day")
    group.permissions.add(view_host)
    other_group.permissions.add(view_host)
    bystander = User.objects.create(username="olaf", is_staff=True)
    seen = [session_permissions.fingerprint_permissions([person.pk, bystander.pk])]
    for change in (
        lambda: person.user_permissions.add(view_agent),
        lambda: person.groups.add(group),
        lambda: group.permissions.add(view_agent),
        lambda: person.groups.set([other_group]),
        lambda: User.objects.filter(pk=person.pk).update(password="!"),
        lambda: User.objects.filter(pk=person.pk).update(is_superuser=True),
    ):
        change()
        seen.append(session_permissions.fingerprint_permissions([person.pk, bystander.pk]))
    assert len({one[person.pk] for one in seen}) == len(seen)
    assert len({one[bystander.pk] for one in seen}) == 1
    for column in ("is_staff", "is_active"):
        User.objects.filter(pk=person.pk).update(**{column: False})
        assert session_permissions.fingerprint_permissions([person.pk]) == {}
        User.objects.filter(pk=person.pk).update(**{column: True})


def test_expired_and_deleted_sessions_are_not_live() -> None:
    now = datetime.now(UTC)
    for key, age in (("live", -60), ("expired", 60)):
        Session.objects.create(session_key=key, session_data="", expire_date=now - timedelta(seconds=age))
    assert session_permissions.filter_live_sessions({"live", "expired", "deleted"}) == {"live"}


def test_the_feed_refuses_lists_that_may_not_be_viewed_anonymous_users_and_other_origins(
    port: int, page: Client, person: User
) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    tab = LivePage(port, page)
    tab.send(path="/admin/accelerators/host/", query="", rows=["1"])
    assert tab.receive_close_code() == 4403
    assert LivePage(port, Client()).receive_close_code() == 4401
    person.is_staff = False
    person.save()
    assert LivePage(port, page).receive_close_code() == 4401
    other_origins = ("https://evil.example", "null", f"http://127.0.0.1:{port}.evil.example")
    for origin in other_origins:
        with pytest.raises(InvalidStatus):
            LivePage(port, page, origin=origin)


@pytest.mark.slow
def test_invalid_messages_close_the_feed_and_crafted_keys_are_ignored(port: int, page: Client) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    for said, code in {
        "{": 4400,
        '{"path": "/admin/", "rows": 7}': 4400,
        '{"path": "/admin/nothing/"}': 4400,
        json.dumps({"path": DEVICES, "rows": ["1"] * 101}): 4400,
        json.dumps({"path": DEVICES, "query": "state__exact__bad=1", "rows": ["1"]}): 4400,
        "x" * 20_000: 1009,
    }.items():
        tab = LivePage(port, page)
        tab.socket.send(said)
        assert tab.receive_close_code() == code, said
    tab = LivePage(port, page)
    tab.send(path=DEVICES, rows=[*tab.cells, "x", "-1", "9" * 40, "\x00"])
    tab.receive_until(lambda: tab.live and tab.messages[-1].get("gone") is not None)
    assert tab.gone_rows == {"-1", "9" * 40}
    for _ in range(30):
        with suppress(ConnectionClosed):
            tab.send(path=DEVICES, rows=[])
    assert tab.receive_close_code() == 4429


@pytest.mark.slow
def test_a_failing_list_closes_the_feed_of_its_viewers_only(
    port: int, page: Client, person: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    person.user_permissions.add(Permission.objects.get(codename="view_agent"))
    agent = create_heard_host("cmp1", 1).agent
    devices, agents = LivePage(port, page), LivePage(port, page, "/admin/agents/agent/")
    devices.receive_until(lambda: devices.live)
    agents.receive_until(lambda: agents.live)
    cells = ListSnapshot.render_rows

    def failing(shown: ListSnapshot, keys: Any) -> Any:
        if shown.admin.opts.label_lower == "accelerators.device":
            raise AttributeError("a column of one changed row")
        return cells(shown, keys)

    with monkeypatch.context() as patched:
        patched.setattr(ListSnapshot, "render_rows", failing)
        set_state("ready")
        assert devices.receive_close_code() == 1013
        agent.version = "9.9"
        agent.save()
        agents.receive_until(lambda: "9.9" in agents.cells[str(agent.pk)]["field-version"])
        assert all(said["live"] for said in agents.messages)
    again = LivePage(port, page)
    again.receive_until(lambda: again.live)


@pytest.mark.parametrize("asked", ["filter_live_sessions", "user_of_session"])
def test_the_feed_continues_after_an_unexpected_exception(
    port: int, page: Client, monkeypatch: pytest.MonkeyPatch, asked: str, console_server: SwitchableConsole
) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    tab = LivePage(port, page)
    tab.receive_until(lambda: tab.live)

    def failing(*_: Any) -> None:
        raise RuntimeError("not of the database")

    with monkeypatch.context() as patched:
        patched.setattr(session_permissions, asked, failing)
        if asked == "filter_live_sessions":
            tab.receive_until(lambda: not tab.live)
        else:
            assert LivePage(port, page).receive_close_code() == 1013
            console_server.console.feed._calls.put((failing, ()))
    set_state("ready")
    tab.receive_until(lambda: tab.live and all("ready" in row["field-shown_state"] for row in tab.cells.values()))
