"""Run REST processes as the shipped unit says, and bind requests to the fake card over HTTP as Nova does."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from tests.support.webserver import until
from tests.system.deployment import read_unit
from tests.system.machine import FAKE_CARD, HOST
from tests.system.product import ROOT, START_S, Product, environment


@contextmanager
def serve_rest(product: Product, **settings: str) -> Iterator[int]:
    """Run REST processes as the shipped unit says, with the product's database and these variables; yield their port.

    There is one worker unless GRANIAN_WORKERS says another number. Their log is added to that of the product.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    unit = read_unit("accelerators-rest", product.state, {"GRANIAN_HOST": "127.0.0.1", "GRANIAN_PORT": str(port)})
    units = {name: value for name, value in unit.environment.items() if not name.startswith("CYBORG_PUBLIC")}
    del units["CYBORG_DATABASE_URL"]
    units |= {"CYBORG_STATE_DIR": str(product.state), "GRANIAN_WORKERS": "1"}
    with product.log_file.open("ab") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", sys.executable, *unit.words[1:]],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment() | units | settings,
            process_group=0,
        )
    try:
        product.until(lambda: is_serving(port), START_S, "the REST processes serve")
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def is_serving(port: int) -> bool:
    """Return whether the process at this port answers."""
    try:
        return ask(port, "GET", "/healthz").status == 200
    except OSError:
        return False


class Answer(NamedTuple):
    """An HTTP answer: its status, its body, and the id of the request."""

    status: int
    body: bytes
    request_id: str


def ask(port: int, method: str, path: str, token: str = "", body: object = None, service: str = "") -> Answer:
    """Send a request, whose body comes in chunks; return the answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        headers = {"X-Auth-Token": token, "Content-Type": "application/json", "Host": "localhost"}
        headers |= {"X-Service-Token": service} if service else {}
        connection.request(method, path, iter([json.dumps(body).encode()]) if body else None, headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), answer.headers.get("x-openstack-request-id", ""))


class Binder:
    """Binds requests to the fake card as Nova does, over HTTP at `port`, with the device profile `name`."""

    def __init__(self, product: Product, port: int, name: str) -> None:
        self.port, self.name = port, name
        self.token, self.service = (
            product.manage("api_token", f"{name}-{r}", "--role", r)[-1] for r in ("admin", "service")
        )
        ((self.provider,),) = product.rows(
            "SELECT p.rp_uuid::text FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id"
            " WHERE d.vendor = %s",
            FAKE_CARD[0],
        )

    def call(self, wanted: int, method: str, path: str, body: object = None) -> Answer:
        """Send a request, check the status of the answer, and return it."""
        answer = ask(self.port, method, path, self.token, body, self.service)
        assert answer.status == wanted, (method, path, answer)
        return answer

    @contextmanager
    def profile(self) -> Iterator[None]:
        """Keep the device profile for the block."""
        self.call(201, "POST", "/v2/device_profiles", [{"name": self.name, "groups": [{"resources:FPGA": "1"}]}])
        yield
        self.call(204, "DELETE", f"/v2/device_profiles?value={self.name}")

    def create(self) -> str:
        """Create a request and return its uuid."""
        made = self.call(201, "POST", "/v2/accelerator_requests", {"device_profile_name": self.name})
        return str(json.loads(made.body)["arqs"][0]["uuid"])

    def bind(self, request: str, instance: str, wanted: int = 202) -> Answer:
        """Ask for a bind of the request to the fake card, check the status of the answer, and return it."""
        values = {"hostname": HOST, "device_rp_uuid": self.provider, "instance_uuid": instance}
        patch = {request: [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]}
        return self.call(wanted, "PATCH", "/v2/accelerator_requests", patch)

    def wait_until_bound(self, request: str) -> None:
        """Wait until the request is Bound."""

        def is_bound() -> bool:
            state = json.loads(self.call(200, "GET", f"/v2/accelerator_requests/{request}").body)["state"]
            assert state in ("BindStarted", "Bound")
            return bool(state == "Bound")

        until(is_bound)

    def delete(self, *requests: str) -> None:
        """Delete the requests."""
        self.call(204, "DELETE", f"/v2/accelerator_requests?arqs={','.join(requests)}")

    def bind_and_release(self) -> float:
        """Bind a request, wait until it is Bound, delete it; return the seconds from the bind until it was Bound."""
        request = self.create()
        begin = time.monotonic()
        self.bind(request, str(uuid.uuid4()))
        self.wait_until_bound(request)
        seconds = time.monotonic() - begin
        self.delete(request)
        return seconds
