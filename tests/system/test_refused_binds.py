"""Test that binds which are refused without a change explain themselves in the log, in the metrics, in events and on
the overview, also with several processes that serve HTTP."""

from __future__ import annotations

import html
import http.cookiejar
import re
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from uuid import uuid4

import psycopg
import pytest

from accelerators.refusal_counts import INTERVAL_S
from cyborgweb.database.postgres import choose_socket_folder
from cyborgweb.monitoring.event_recorder import RECORD_INTERVAL_S
from tests.system.conftest import fresh_folder
from tests.system.machine import HOST, wait_for_fake_state
from tests.system.product import Product, running
from tests.system.rest import Answer, Binder, ask, serve_rest

pytestmark = pytest.mark.system
SETTINGS = {"CYBORG_HOST_NAME": HOST, "CYBORG_HOST_NODE": "here"}
STATUSES = {"unknown_request": 404, "instance_has_requests": 400, "wrong_state": 500, "contention": 503}
"""The reasons for which a bind is refused without a change, and the status of the answer."""
REPEATED = 3
REST_PROCESSES = 2
EVENTS_S = INTERVAL_S + 3 * RECORD_INTERVAL_S
"""Seconds within which a process has recorded everything that it has refused."""
SELECT_EVENTS = """
SELECT changes->'failure'->>1, (changes->'number'->>1)::int, extract(epoch FROM at)::float8 FROM accelerators_event
WHERE action = 'request.bind_refused' ORDER BY id
"""


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    with fresh_folder() as folder, running(Product(folder / "state", SETTINGS)) as one:
        wait_for_fake_state(one, "ready")
        yield one


class RefusedBinder(Binder):
    """Sends binds that are refused. `bound` is a bound request, `free` one that is not bound."""

    def __init__(self, product: Product, port: int, name: str) -> None:
        super().__init__(product, port, name)
        self.product = product
        self.call(201, "POST", "/v2/device_profiles", [{"name": name, "groups": [{"resources:FPGA": "1"}]}])
        self.bound, self.free, self.instance = self.create(), self.create(), str(uuid4())
        self.bind(self.bound, self.instance)
        self.wait_until_bound(self.bound)

    def refuse(self, reason: str) -> tuple[str, str, Answer]:
        """Send a bind that is refused for this reason; return its request, its instance and the answer.

        All handles must be locked (`locking_handles`) for the reason `contention`.
        """
        request = {"unknown_request": str(uuid4()), "wrong_state": self.bound}.get(reason, self.free)
        instance = self.instance if reason == "instance_has_requests" else str(uuid4())
        return request, instance, self.bind(request, instance, STATUSES[reason])

    def refuse_many(self, reason: str, number: int) -> list[tuple[str, str, Answer]]:
        """Send as many binds that are refused for this reason, several at the same time."""
        with ThreadPoolExecutor(8) as threads:
            if reason != "contention":
                return list(threads.map(self.refuse, [reason] * number))
            with locking_handles(self.product):
                return list(threads.map(self.refuse, [reason] * number))


@contextmanager
def locking_handles(product: Product) -> Iterator[None]:
    """Lock all handles in another transaction for the block, as binds do that compete for them."""
    where = str(choose_socket_folder(product.state / "postgres" / "run"))
    with psycopg.connect(host=where, user="postgres", dbname="cyborg") as rival:
        assert rival.execute("SELECT FROM accelerators_attachhandle FOR NO KEY UPDATE").rowcount
        yield
        rival.rollback()


def read_counts(port: int) -> Counter[str]:
    """Return how many binds were refused for each reason so far, as /metrics of this process says."""
    text = ask(port, "GET", "/metrics").body.decode()
    found = re.findall(r'^cyborg_bind_failures_total\{reason="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return Counter({reason: int(float(number)) for reason, number in found if reason in STATUSES})


def count_recorded(product: Product) -> Counter[str]:
    """Return how many refused binds the events count, by reason."""
    counts = Counter[str]()
    for reason, number, _ in product.rows(SELECT_EVENTS):
        counts[reason] += number
    return counts


def read_overview(product: Product, port: int) -> str:
    """Log in to the console of this process with the first login, and return the text of the overview."""
    password_file = product.wait_for_log(r"first login: admin, with the password in (\S+)")[1]
    with open(password_file) as file:
        name, password = file.read().strip().split(" / ")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    url = f"http://localhost:{port}/admin/"
    page = opener.open(f"{url}login/").read().decode()
    (token,) = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
    form = {"csrfmiddlewaretoken": token, "username": name, "password": password, "next": "/admin/"}
    answer = opener.open(f"{url}login/", urllib.parse.urlencode(form).encode())
    assert answer.url == url, answer.url
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", answer.read().decode())).split())


def check_overview(overview: str, expected: Mapping[str, int], newest: Mapping[str, str]) -> None:
    """Check that the overview has an alert for each reason, with the number of binds and the newest bind."""
    for reason, number in expected.items():
        assert f"{number} binds were refused without a change within 15 minutes ({reason}), the last (" in overview
    for reason, instance in newest.items():
        assert re.search(rf"\({reason}\), the last \(instance {instance}, host {re.escape(HOST)}, provider", overview)


def test_each_refused_bind_is_logged_counted_and_shown_on_the_overview(product: Product) -> None:
    binder = RefusedBinder(product, product.port, "refused")
    counted, newest = read_counts(product.port), {}
    for reason in STATUSES:
        # The last bind is sent alone, so that it is known which one is the newest.
        for request, instance, answer in (*binder.refuse_many(reason, REPEATED - 1), *binder.refuse_many(reason, 1)):
            details = f"instance {instance}, host '{HOST}', provider {binder.provider}, request id {answer.request_id}:"
            product.wait_for_log(re.escape(f"the bind of request {request} failed ({reason}): {details} "))
        newest[reason] = instance
    expected = dict.fromkeys(STATUSES, REPEATED)
    product.until(lambda: read_counts(product.port) - counted == expected, 10, "all are counted in /metrics")
    product.until(lambda: count_recorded(product) == expected, EVENTS_S, "all are recorded")
    check_overview(read_overview(product, product.port), expected, newest)
    for reason, request_id, host in product.rows(
        "SELECT changes->'failure'->>1, request_id, changes->'hostname'->>1"
        " FROM accelerators_event WHERE action = 'request.bind_refused'"
    ):
        assert host == HOST and request_id.startswith("req-"), reason


def test_refused_binds_of_several_processes_add_up_and_each_process_records_one_event_a_minute(
    product: Product,
) -> None:
    with serve_rest(product, GRANIAN_WORKERS=str(REST_PROCESSES)) as port:
        binder = RefusedBinder(product, port, "refused-rest")
        counted, recorded, known = read_counts(port), count_recorded(product), len(product.rows(SELECT_EVENTS))
        sent = {"unknown_request": 40, "instance_has_requests": 40, "wrong_state": 40, "contention": 8}
        for reason, number in sent.items():
            binder.refuse_many(reason, number)
        for each in (port, product.port):
            product.until(lambda at=each: read_counts(at) - counted == sent, 10, "every process shows the sums")
        product.until(lambda: count_recorded(product) - recorded == sent, EVENTS_S, "all are recorded")
        binder.refuse_many("unknown_request", 40)
        sent["unknown_request"] += 40
        product.until(lambda: count_recorded(product) - recorded == sent, EVENTS_S, "all are recorded")
        check_overview(read_overview(product, port), Counter(sent) + recorded, {})
        events = product.rows(SELECT_EVENTS)[known:]
        for reason in sent:
            times = [at for failure, _, at in events if failure == reason]
            assert len(times) >= REST_PROCESSES, f"not every process has refused a bind: {events}"
            for earlier, later in zip(times, times[REST_PROCESSES:], strict=False):
                assert later - earlier >= INTERVAL_S - 1, events
