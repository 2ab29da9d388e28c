"""The row of open console pages: lists, pages of hosts and devices, and overviews stay live while all their rows
change.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psycopg
from django.db import connection
from django.db.models import Model
from websockets.asyncio.client import connect

from accelerators import conductor
from accelerators.inventory import seed
from accelerators.models import AttachHandle, Deployable, Device, Host
from tests.bench import fixtures
from tests.bench.figures import Row, cpu_s
from tests.bench.lab import Lab, run_server
from tests.bench.rows_console import create_session

HOSTS, DEVICES, EVENTS = 500, 5000, 20_000
CHANGES_PER_S = 100
ADMIN = "/admin/accelerators"
LISTS = {"device": 40, "host": 10, "deployable": 10, "attachhandle": 10, "event": 10}
"""How many pages show the list of each of these models."""
HOST_PAGES, DEVICE_PAGES = 60, 40
OVERVIEWS = {"/admin/": 10, "/admin/usage/": 5, "/admin/census/": 5}
MAX_CPU_PERCENT = 90
SETTLE_S = 30.0
"""Seconds in which all pages must be live before the changes begin."""
CHANGES = (
    ("device", "UPDATE accelerators_device SET model = %s WHERE id = %s"),
    ("device", "UPDATE accelerators_device SET state_reason = %s WHERE id = %s"),
    ("deployable", "UPDATE accelerators_deployable SET driver_name = %s WHERE id = %s"),
    ("attachhandle", "UPDATE accelerators_attachhandle SET attach_info = %s WHERE id = %s"),
    ("host", "UPDATE accelerators_host SET applied_hash = %s WHERE id = %s"),
)
"""The changes, in turn: the model, and the statement that gets a new text and the row's id."""
SEEDED: tuple[tuple[type[Model], dict[str, str]], ...] = (
    (Host, {"name__startswith": "seed-"}),
    (Device, {}),
    (Deployable, {}),
    (AttachHandle, {}),
)
"""The models whose rows are changed, with a filter for those that were inserted for the row."""


@dataclass
class OpenPage:
    """An open page: its address, the keys of its rows if it is a list, and what the feed said about it."""

    path: str
    query: str = ""
    keys: list[str] = field(default_factory=list)
    is_live: bool = False
    was_lost: bool = False
    rows_received: int = 0
    reloads: int = 0

    @property
    def is_list(self) -> bool:
        """Return whether the page shows a list."""
        return self.path.startswith(ADMIN) and not self.path.endswith("/change/")

    def build_request(self) -> str:
        """Return the message with which the page asks for updates."""
        if self.is_list:
            return json.dumps({"path": self.path, "query": self.query, "rows": self.keys})
        return json.dumps({"path": "", "page": self.path})


def rows(lab: Lab, seconds: float, progress: Callable[[str], None]) -> list[Row]:
    """Return the row: the CPU time of the web process, and whether a page was not live at any time."""
    kinds = (
        f"{len(LISTS)} kinds of lists, {HOST_PAGES} hosts, {DEVICE_PAGES} devices, {len(OVERVIEWS)} kinds of overviews"
    )
    fixtures.empty_inventory()
    seed.insert_rows(HOSTS, DEVICES, EVENTS, lambda inserted: None, beside_real_hosts=True)
    session = create_session()
    ids = {
        model._meta.model_name: list(model._default_manager.filter(**seeded).values_list("pk", flat=True))
        for model, seeded in SEEDED
    }
    pages = [
        *(OpenPage(f"{ADMIN}/{name}/", f"p={number + 1}") for name, count in LISTS.items() for number in range(count)),
        *(OpenPage(f"{ADMIN}/host/{key}/change/") for key in ids["host"][:HOST_PAGES]),
        *(OpenPage(f"{ADMIN}/device/{key}/change/") for key in ids["device"][:DEVICE_PAGES]),
        *(OpenPage(path) for path, count in OVERVIEWS.items() for _ in range(count)),
    ]
    progress(f"{len(pages)} open console pages under {CHANGES_PER_S} changes a second: {kinds}")
    with run_server(lab, "product") as server:
        for page in pages:
            if page.is_list:
                page.keys = re.findall(rf'href="{page.path}(\d+)/change/', fetch(server.port, session, page))
        spent, changes = asyncio.run(_watch(server.port, server.pid, session, pages, ids, seconds))
    fixtures.empty_inventory()
    with conductor.writing():
        Host.objects.filter(name__startswith="seed-").delete()
    lost = sum(page.was_lost or not page.is_live for page in pages)
    note = (
        f"{lost} pages were not live at some time; {changes / seconds:.0f} changes a second, rows sent"
        f" {sum(page.rows_received for page in pages) / seconds:.0f}/s, pages reloaded"
        f" {sum(page.reloads for page in pages) / seconds:.1f}/s; {kinds}"
    )
    name = f"{len(pages)} open console pages under {CHANGES_PER_S} changes a second: CPU of the web process"
    holds = lost == 0 and changes >= 0.9 * CHANGES_PER_S * seconds
    return [Row(name, spent / seconds * 100, "%", "one core", MAX_CPU_PERCENT, note=note, holds=holds)]


def fetch(port: int, session: str, page: OpenPage) -> str:
    """Return the HTML of a page. Raises AssertionError unless the answer is 200."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("GET", f"{page.path}?{page.query}", headers={"Cookie": f"sessionid={session}"})
    answer = client.getresponse()
    html = answer.read().decode()
    client.close()
    assert answer.status == 200, (page.path, answer.status)
    return html


async def _watch(
    port: int, pid: int, session: str, pages: list[OpenPage], ids: Mapping[str, Sequence[int]], seconds: float
) -> tuple[float, int]:
    """Open all pages, wait until they are live, then change rows for `seconds`. Return the CPU seconds of the web
    process and the number of changes."""
    with ThreadPoolExecutor(6) as fetchers:
        tasks = [asyncio.create_task(_follow(port, session, page, fetchers)) for page in pages]
        end = time.monotonic() + SETTLE_S
        while not all(page.is_live for page in pages) and time.monotonic() < end:
            await asyncio.sleep(0.1)
        for page in pages:
            page.was_lost, page.rows_received, page.reloads = False, 0, 0
        before = cpu_s(pid)
        changes = await asyncio.to_thread(_change_rows, ids, seconds)
        spent = cpu_s(pid) - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return spent, changes


async def _follow(port: int, session: str, page: OpenPage, fetchers: ThreadPoolExecutor) -> None:
    """Follow a page as a browser does, and fetch it again whenever the feed says that it must be reloaded."""
    address = f"ws://127.0.0.1:{port}/ws/console"
    headers = {"Cookie": f"sessionid={session}"}
    async with connect(address, additional_headers=headers, origin=f"http://127.0.0.1:{port}") as socket:  # type: ignore[arg-type]
        await socket.send(page.build_request())
        async for text in socket:
            message = json.loads(text)
            page.rows_received += len(message.get("rows", ()))
            if message.get("moved"):
                page.reloads += 1
                await asyncio.get_running_loop().run_in_executor(fetchers, fetch, port, session, page)
            page.is_live = message["live"]
            page.was_lost |= not page.is_live


def _change_rows(ids: Mapping[str, Sequence[int]], seconds: float) -> int:
    """Change a random row CHANGES_PER_S times a second, each in a transaction of its own; return the number of
    changes."""
    parameters = connection.get_connection_params()
    numbers = random.Random(1)
    changes, began, pause = 0, time.monotonic(), threading.Event()
    with psycopg.connect(**parameters, autocommit=True) as database:
        while (elapsed := time.monotonic() - began) < seconds:
            if changes < elapsed * CHANGES_PER_S:
                model, statement = CHANGES[changes % len(CHANGES)]
                database.execute(statement, [f"bench {changes}", numbers.choice(ids[model])])
                changes += 1
            else:
                pause.wait(0.002)
    return changes
