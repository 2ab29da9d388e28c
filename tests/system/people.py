"""Clients that use a deployment through its proxy, from a separate machine: API clients and a browser.

A client that works continuously is a thread, which records the answers and reconnects as the client that it imitates
would. Used by `test_deployment`.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from tests.system.deployment import ADDRESSES, CONSOLE_NAME, Deployment

PROXY = (ADDRESSES["db.example.com"], 443)
SILENCE_S = 18.0
"""How long a page waits for a message before it opens another socket, as in `live.js`."""
AGAIN_S = 0.5
Answer = tuple[int, Any]


@dataclass
class Person:
    """A client. `tokens` are its headers with an administrator's token and Nova's; `cookies` are those of a browser."""

    deployment: Deployment
    tokens: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tls = ssl.create_default_context(cafile=self.deployment.certificate)
        self.tls.check_hostname = False

    def open(
        self, method: str, path: str, body: Any = None, at: tuple[str, int] = PROXY, timeout: float = 30.0, **more: str
    ) -> http.client.HTTPResponse:
        """Send a request and return the answer, whose body is not read yet. Raises OSError, HTTPException."""
        connection = http.client.HTTPConnection(CONSOLE_NAME, timeout=timeout)
        raw = self.deployment.machines["people"].connect(*at, timeout)
        connection.sock = self.tls.wrap_socket(raw, server_hostname=CONSOLE_NAME) if at == PROXY else raw
        headers = self.tokens | {name.replace("_", "-"): value for name, value in more.items()}
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        if not isinstance(body, str | None):
            headers["Content-Type"], body = "application/json", json.dumps(body)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        for said in answer.headers.get_all("Set-Cookie", ()):
            name, _, value = said.partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer

    def call(self, method: str, path: str, body: Any = None, at: tuple[str, int] = PROXY, **more: str) -> Answer:
        """Send a request and return status and body, decoded if it is JSON; (0, reason) if there is no answer."""
        try:
            answer = self.open(method, path, body, at, **more)
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json and text else text

    def listed(self, path: str) -> list[dict[str, Any]]:
        """Return the results of a list in our own API; [] unless the status is 200."""
        status, said = self.call("GET", path)
        return list(said["results"]) if status == 200 else []

    def login(self, name: str, password: str) -> None:
        """Log in to the console as a browser does, and keep the session cookie."""
        status, page = self.call("GET", "/admin/login/")
        assert status == 200, page
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        assert token
        form = f"csrfmiddlewaretoken={token[1]}&username={name}&password={password}"
        told = {"Content_Type": "application/x-www-form-urlencoded", "Referer": f"https://{CONSOLE_NAME}/admin/login/"}
        status, page = self.call("POST", "/admin/login/", form, Origin=f"https://{CONSOLE_NAME}", **told)
        assert (status, "sessionid" in self.cookies) == (302, True), (status, page)


class RepeatingCaller(threading.Thread):
    """Call `turn` repeatedly until `end` is called; record connection errors in `troubles` and go on."""

    def __init__(self, person: Person) -> None:
        super().__init__(daemon=True)
        self.person, self.over, self.troubles = person, threading.Event(), list[str]()
        self.start()

    def turn(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self.turn()
            except (OSError, EOFError, http.client.HTTPException, WebSocketException) as error:
                self.troubles.append(f"{type(error).__name__}: {error}")
            self.over.wait(AGAIN_S)

    def end(self) -> None:
        """Stop calling `turn`; wait up to 60 s for the call that still runs."""
        self.over.set()
        self.join(60)


class LivePage(RepeatingCaller):
    """The console's list of devices in a browser: `cells` per row as shown, and `live`, the state of its live badge."""

    def __init__(self, person: Person, keys: list[str]) -> None:
        self.keys, self.cells, self.live = keys, {key: dict[str, str]() for key in keys}, False
        super().__init__(person)

    def turn(self) -> None:
        raw = self.person.deployment.machines["people"].connect(*PROXY)
        try:
            with connect(
                f"wss://{CONSOLE_NAME}/ws/console",
                sock=raw,
                ssl=self.person.tls,
                origin=f"https://{CONSOLE_NAME}",  # type: ignore[arg-type]
                additional_headers={"Cookie": f"sessionid={self.person.cookies['sessionid']}"},
                close_timeout=1,
            ) as socket:
                socket.send(json.dumps({"path": "/admin/accelerators/device/", "query": "", "rows": self.keys}))
                while not self.over.is_set():
                    said = json.loads(socket.recv(timeout=SILENCE_S))
                    for key, cells in said.get("rows", {}).items():
                        self.cells[key] |= cells
                    self.live = said["live"]
        finally:
            self.live = False


class UsageStream(RepeatingCaller):
    """A client that follows the usage of a device as a stream of events. `told` has the samples that it received."""

    def __init__(self, person: Person, device: str) -> None:
        self.device, self.told = device, list[dict[str, Any]]()
        super().__init__(person)

    def turn(self) -> None:
        answer = self.person.open("GET", f"/api/devices/{self.device}/usage/", timeout=15.0, Accept="text/event-stream")
        while not self.over.is_set() and (line := answer.readline()):
            if line.startswith(b"data:"):
                self.told.append(json.loads(line.removeprefix(b"data:")))

    def newest(self) -> str:
        """Return the time at which the newest received sample was taken; '' before there is one."""
        return max((one["at"] or "" for one in self.told[-3:]), default="")


class MonitoringReader(RepeatingCaller):
    """A monitoring client that reads the same list repeatedly. `statuses` are the statuses of the answers."""

    def __init__(self, person: Person) -> None:
        self.statuses = list[int]()
        super().__init__(person)

    def turn(self) -> None:
        answer = self.person.open("GET", "/api/devices/?limit=5", timeout=20.0)
        answer.read()
        self.statuses.append(answer.status)


class NovaTraffic(RepeatingCaller):
    """Each turn creates a request, binds it, deletes the request of the turn before, and orders a rescan of the host.

    `made`, `bound`, `deleted`, `ordered`: id → time (monotonic) of each acknowledged request or command. `tried`: the
    requests whose deletion was attempted. `refused`: all answers with an unexpected status.
    """

    def __init__(self, person: Person, provider: str, hostname: str, host: str) -> None:
        self.about, self.host, self.before = {"hostname": hostname, "device_rp_uuid": provider}, host, ""
        self.made, self.bound, self.deleted, self.ordered = (dict[str, float]() for _ in range(4))
        self.tried, self.refused = set[str](), list[Answer]()
        super().__init__(person)

    def turn(self) -> None:
        if said := self.ask(201, "POST", "/v2/accelerator_requests", {"device_profile_name": "one"}):
            uuid = said["arqs"][0]["uuid"]
            self.made[uuid] = time.monotonic()
            values = self.about | {"instance_uuid": str(uuid4())}
            patch = {uuid: [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]}
            if self.ask(202, "PATCH", "/v2/accelerator_requests", patch) is not None:
                self.bound[uuid] = time.monotonic()
            if self.before:
                self.tried.add(self.before)
                if self.ask(204, "DELETE", f"/v2/accelerator_requests?arqs={self.before}") is not None:
                    self.deleted[self.before] = time.monotonic()
            self.before = uuid
        if said := self.ask(201, "POST", "/api/commands/", {"op": "rescan", "host": self.host}):
            self.ordered[said["uuid"]] = time.monotonic()

    def ask(self, wanted: int, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the body if its status is `wanted`; else record it in `refused` and return None."""
        status, said = self.person.call(method, path, body)
        if status == wanted:
            return said
        self.refused.append((status, said))
        return None

    def count_since(self, moment: float) -> int:
        """Count the binds and the commands acknowledged after `moment`; return the smaller number."""
        return min(sum(at > moment for at in kind.values()) for kind in (self.bound, self.ordered))
