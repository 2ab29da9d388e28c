"""Who comes to a deployment through its proxy, from a machine of their own: callers of APIs, and a browser.

What goes on by itself is a thread that notes what it is told, and comes back as what it stands for does. Used by
`test_deployment`.
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
"""As `live.js`: then a page opens another socket."""
AGAIN_S = 0.5
Answer = tuple[int, Any]


@dataclass
class Person:
    """`tokens` are an administrator's and, beside it, Nova's; `cookies` are a browser's."""

    deployment: Deployment
    tokens: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tls = ssl.create_default_context(cafile=self.deployment.certificate)
        self.tls.check_hostname = False

    def open(
        self, method: str, path: str, body: Any = None, at: tuple[str, int] = PROXY, timeout: float = 30.0, **more: str
    ) -> http.client.HTTPResponse:
        """The answer, not read yet; raises OSError, HTTPException."""
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
        """Status and what is said, as JSON where it is; (0, why) where nobody answers."""
        try:
            answer = self.open(method, path, body, at, **more)
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json and text else text

    def listed(self, path: str) -> list[dict[str, Any]]:
        """A list of our own API; [] while there is none to be had."""
        status, said = self.call("GET", path)
        return list(said["results"]) if status == 200 else []

    def login(self, name: str, password: str) -> None:
        """As a browser does."""
        status, page = self.call("GET", "/admin/login/")
        assert status == 200, page
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        assert token
        form = f"csrfmiddlewaretoken={token[1]}&username={name}&password={password}"
        told = {"Content_Type": "application/x-www-form-urlencoded", "Referer": f"https://{CONSOLE_NAME}/admin/login/"}
        status, page = self.call("POST", "/admin/login/", form, Origin=f"https://{CONSOLE_NAME}", **told)
        assert (status, "sessionid" in self.cookies) == (302, True), (status, page)


class RepeatingCaller(threading.Thread):
    """Does `turn` again and again until `end`; what goes wrong on the way is noted, and tried again."""

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
        """Ask no more; returns when the last answer is there."""
        self.over.set()
        self.join(60)


class LivePage(RepeatingCaller):
    """The list of devices in a browser. `cells` are its rows' as they are shown, `live` what its badge says."""

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
    """The usage of a device as it comes."""

    def __init__(self, person: Person, device: str) -> None:
        self.device, self.told = device, list[dict[str, Any]]()
        super().__init__(person)

    def turn(self) -> None:
        answer = self.person.open("GET", f"/api/devices/{self.device}/usage/", timeout=15.0, Accept="text/event-stream")
        while not self.over.is_set() and (line := answer.readline()):
            if line.startswith(b"data:"):
                self.told.append(json.loads(line.removeprefix(b"data:")))

    def newest(self) -> str:
        """When the newest of it was taken; '' before there is any."""
        return max((one["at"] or "" for one in self.told[-3:]), default="")


class MonitoringReader(RepeatingCaller):
    """Somebody's monitoring: asks for the same again and again. `statuses` are the answers'."""

    def __init__(self, person: Person) -> None:
        self.statuses = list[int]()
        super().__init__(person)

    def turn(self) -> None:
        answer = self.person.open("GET", "/api/devices/?limit=5", timeout=20.0)
        answer.read()
        self.statuses.append(answer.status)


class NovaTraffic(RepeatingCaller):
    """Makes a request, binds it, gives up the one before; and has the host looked at anew, by a command.

    `made`, `bound`, `deleted`, `ordered`: what was acknowledged, id → when (monotonic). `refused`: what was not.
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
        """What is answered with the status that is wanted; None: it was not."""
        status, said = self.person.call(method, path, body)
        if status == wanted:
            return said
        self.refused.append((status, said))
        return None

    def count_since(self, moment: float) -> int:
        """How many binds and how many commands were acknowledged after it, the fewer of both."""
        return min(sum(at > moment for at in kind.values()) for kind in (self.bound, self.ordered))
