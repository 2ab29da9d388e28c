"""Test the guard that all tests rely on: a call to another machine inside a transaction fails the test."""

from __future__ import annotations

import http.client
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import transaction

from drivers.isolation.threads import start_in_thread
from tests.support import callguard
from tests.system.product import environment

pytestmark = pytest.mark.django_db


def call() -> str:
    """Send a request to a port where nobody listens; return how it ended."""
    try:
        http.client.HTTPConnection("127.0.0.1", 9, timeout=5).request("GET", "/")
    except OSError as error:
        return type(error).__name__
    return "answered"


def test_a_call_inside_a_transaction_is_refused_also_from_threads_that_it_started() -> None:
    assert call() == "ConnectionRefusedError", "the transaction of the test itself does not count"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call).result(10) == "ConnectionRefusedError"
        with transaction.atomic():
            for make in (call, pool.submit(call).result, start_in_thread(call).result):
                with pytest.raises(callguard.CallInTransactionError, match=r"127\.0\.0\.1"):
                    make()
        assert pool.submit(call).result(10) == "ConnectionRefusedError", "the same thread, after the transaction"
    assert len(callguard.violations) == 3
    callguard.violations.clear()


@pytest.mark.slow
def test_the_processes_of_system_tests_have_the_guard() -> None:
    code = "import threading; print(threading.Thread.start.__name__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "start_thread", done.stderr
