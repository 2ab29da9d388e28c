"""The product's HTTP server as it runs at scale: granian with several workers, on all cores."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.lab import Lab, Server
from tests.bench.product import wait_for
from tests.bench.remote_calls import ROOT, MeasurementError


@contextmanager
def run_granian(lab: Lab, workers: int) -> Iterator[Server]:
    """Run granian inside the context; its processes die with this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--interface", "asginl", "--http", "1", "--no-ws", "--workers", str(workers)]
    options += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "tests.bench.settings"}
    command = [sys.executable, "-m", "tests.bench.server", "granian", *options, "cyborgweb.rest:application"]
    with lab.open_log("granian") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
    try:
        try:
            wait_for(lambda: _is_ready(port), "granian's /readyz", process)
        except MeasurementError as error:
            lines = (lab.home / "granian.log").read_text().strip().splitlines()
            raise MeasurementError(f"{error}; it said last: {' | '.join(lines[-3:])}") from None
        yield Server(process, port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    # With a timeout, because a request that arrives before the workers run is never answered.
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        client.request("GET", "/readyz")
        return client.getresponse().status == 200
    except OSError:
        return False
    finally:
        client.close()
