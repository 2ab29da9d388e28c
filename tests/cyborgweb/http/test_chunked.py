"""Test that bodies in chunks reach v2, `/api` and the console, over our server and over any other WSGI server."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import User

from accelerators.models import DeviceProfile
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.models import ApiToken
from cyborgweb.settings.keys import MAX_BODY_BYTES, Keys
from cyborgweb.wsgi import application
from tests.support.webserver import serving

pytestmark = pytest.mark.django_db(transaction=True)
PASSWORD = "a-long-password-of-hers"
GROUPS = [{"resources:FPGA": "1"}]
Send = Callable[[str, bytes, dict[str, str]], tuple[int, bytes]]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(DjangoThreads(application, Keys())) as port:
        yield port


@pytest.fixture(params=["our server", "another WSGI server"])
def send(request: pytest.FixtureRequest, port: int) -> Send:
    """POST a body in chunks; return the status and the body of the answer."""

    def send_to_server(path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        parts = (body[start : start + 60_000] for start in range(0, len(body), 60_000))
        connection.request("POST", path, parts, headers, encode_chunked=True)
        answer = connection.getresponse()
        received = answer.read()
        connection.close()
        return answer.status, received

    def call_application(path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        environ: dict[str, Any] = {"REQUEST_METHOD": "POST", "PATH_INFO": path, "SERVER_NAME": "localhost"}
        environ |= {"SERVER_PORT": "80", "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(body)}
        environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
        environ |= {"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_TYPE": headers["Content-Type"]}
        started: list[str] = []
        response = application(environ, lambda status, headers: started.append(status))
        received = b"".join(response)
        response.close()
        return int(started[0][:3]), received

    return send_to_server if request.param == "our server" else call_application


@pytest.fixture
def headers() -> dict[str, str]:
    """The headers of an administrator's request."""
    user = User.objects.create_user("olga", password=PASSWORD, is_staff=True, is_superuser=True)
    token = ApiToken.create_with_secret("olga's", user, ["admin"], "p1")
    return {"X-Auth-Token": token, "Content-Type": "application/json"}


def test_v2_and_own_api_read_a_body_that_comes_in_chunks(send: Send, headers: dict[str, str]) -> None:
    # The spaces make several chunks of the body.
    wide = b" " * 150_000
    status, body = send("/v2/device_profiles", json.dumps([{"name": "a", "groups": GROUPS}]).encode() + wide, headers)
    assert status == 201, body
    status, body = send("/api/profiles/", json.dumps({"name": "b", "groups": GROUPS}).encode() + wide, headers)
    assert status == 201, body
    assert sorted(DeviceProfile.objects.values_list("name", flat=True)) == ["a", "b"]


def test_a_console_form_that_comes_in_chunks_logs_in(send: Send, headers: dict[str, str]) -> None:
    form = {"username": "olga", "password": PASSWORD, "csrfmiddlewaretoken": "a" * 32, "next": "/admin/"}
    sent = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": f"csrftoken={'a' * 32}"}
    status, body = send("/admin/login/", urlencode(form).encode(), sent | {"Host": "localhost"})
    assert status == 302, body[-2_000:]


def test_a_body_in_chunks_that_is_too_large_is_answered_413(send: Send, headers: dict[str, str]) -> None:
    for path in ("/v2/device_profiles", "/api/profiles/"):
        status, body = send(path, b" " * (MAX_BODY_BYTES + 1), headers)
        assert status == 413 and b"1 MiB" in body, body
