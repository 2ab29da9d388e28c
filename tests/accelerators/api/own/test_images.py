"""Test images over /api/ and with the management command: large uploads, lists, removal; names of function traits."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client

from accelerators.api.own import images as own
from accelerators.domain import traits
from accelerators.images import store
from accelerators.models import Event, Image
from agents.gateway.asgi_app import AgentGateway
from cyborgweb import asgi
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.models import ApiToken
from cyborgweb.settings.keys import Keys
from cyborgweb.wsgi import application as wsgi
from tests.support.manage import run_verb
from tests.support.webserver import serving, until

LARGE = bytes(range(256)) * 6144


@pytest.fixture(autouse=True)
def _state_folder(settings: Any, tmp_path: Path) -> None:
    settings.KEYS = Keys(state_dir=str(tmp_path), image_max_bytes=2_000_000)


def make_token(*roles: str) -> str:
    user, _ = User.objects.get_or_create(username="rita")
    return ApiToken.create_with_secret("rita's", user, list(roles), "p1")


def upload_image(
    client: Client, query: str = "", content: bytes = b"bits", roles: str = "admin", **options: Any
) -> Any:
    sent = {
        "content_type": "application/octet-stream",
        "headers": {"X-Auth-Token": make_token(*roles.split())},
    } | options
    return client.generic("POST", f"/api/images/{query}", content, **sent)


@pytest.mark.django_db(transaction=True)
def test_an_image_larger_than_other_bodies_is_streamed_to_disk() -> None:
    with serving(asgi.HttpApplication(AgentGateway(Keys()), DjangoThreads(wsgi, Keys()))) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        sent = {"X-Auth-Token": make_token("admin"), "Content-Type": "application/octet-stream"}
        query = "name=shell&property=accel:function_id=AFU-1&property=vendor=a=b"
        connection.request("POST", f"/api/images/?{query}", LARGE, sent)
        response = connection.getresponse()
        shown = json.loads(response.read())
        connection.close()
    assert response.status == 201 and response.headers["Location"] == shown["url"]
    assert shown["sha256"] == hashlib.sha256(LARGE).hexdigest() and shown["size"] == len(LARGE)
    assert shown["properties"] == {"accel:function_id": "AFU-1", "vendor": "a=b"}
    assert (shown["name"], shown["source"], shown["by"]) == ("shell", "upload", "rita's")
    assert store.get_image_path(shown["uuid"]).read_bytes() == LARGE


PART = LARGE[:65_536]


def send_parts() -> Iterator[bytes]:
    """Yield a body; before its last parts wait until the file on the disk has the first ones."""
    yield from [PART] * 20
    until(lambda: [path for path in store.get_image_directory().iterdir() if path.stat().st_size])
    yield from [PART] * 10


@contextmanager
def product_port(keys: Keys) -> Iterator[int]:
    """Serve the product for the block, and yield its port."""
    with serving(asgi.HttpApplication(AgentGateway(keys), DjangoThreads(wsgi, keys)), keys) as port:
        yield port


def send_in_chunks(port: int, parts: Iterable[bytes]) -> tuple[int, Any]:
    """Upload an image in chunks; return the status and the decoded answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    sent = {"X-Auth-Token": make_token("admin"), "Content-Type": "application/octet-stream"}
    connection.request("POST", "/api/images/?name=shell", parts, sent, encode_chunked=True)
    response = connection.getresponse()
    shown = json.loads(response.read())
    connection.close()
    return response.status, shown


@pytest.mark.django_db(transaction=True)
def test_an_image_that_comes_in_chunks_is_streamed_to_disk() -> None:
    """The file grows while the chunks arrive, and gets the size that they have together."""
    with product_port(Keys()) as port:
        status, shown = send_in_chunks(port, send_parts())
    assert status == 201, shown
    content = PART * 30
    assert (shown["size"], shown["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert store.get_image_path(shown["uuid"]).read_bytes() == content


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("parts", "status", "says"), [(0, 400, "1 to 2000000 bytes"), (200, 413, "at most 2000000 bytes")]
)
def test_an_image_in_chunks_that_is_empty_or_too_large_is_not_stored(parts: int, status: int, says: str) -> None:
    with product_port(Keys()) as port:
        refused, shown = send_in_chunks(port, iter([PART] * parts))
    assert refused == status and says in shown["error"]["message"], shown
    assert not Image.objects.exists() and not [*store.get_image_directory().iterdir()]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ending", ["disconnects", "is too slow"])
@pytest.mark.slow
def test_an_image_whose_last_chunk_is_missing_is_not_stored(ending: str) -> None:
    keys = Keys(body_timeout_s=0.5)
    with product_port(keys) as port:
        head = f"POST /api/images/ HTTP/1.1\r\nHost: localhost\r\nX-Auth-Token: {make_token('admin')}\r\n"
        head += "Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), 20) as connection:
            connection.sendall(head.encode() + b"4\r\nbits\r\n")
            until(lambda: [*store.get_image_directory().iterdir()])
            if ending == "is too slow":
                assert b" 400 " in connection.recv(65_536).partition(b"\r\n")[0]
        until(lambda: not [*store.get_image_directory().iterdir()])
    assert not Image.objects.exists()


@pytest.mark.django_db
def test_images_are_listed_shown_and_removed_by_those_who_may(client: Client) -> None:
    made = json.loads(upload_image(client, "?name=a&property=accel:function_id=F").content)
    upload_image(client, "?name=b")
    reader = {"X-Auth-Token": make_token("manager")}
    for query, names in (("", ["b", "a"]), ("?function=F", ["a"]), ("?name=b&source=upload", ["b"])):
        listed = json.loads(client.get(f"/api/images/{query}", headers=reader).content)["results"]
        assert [one["name"] for one in listed] == names
    where = f"/api/images/{made['uuid']}/"
    assert json.loads(client.get(where, headers=reader).content) == made
    assert client.delete(where, headers=reader).status_code == 403
    assert client.get("/api/images/", headers={"X-Auth-Token": make_token("reader")}).status_code == 403
    assert client.delete(where, headers={"X-Auth-Token": make_token("admin")}).status_code == 204
    assert [one.name for one in Image.objects.all()] == ["b"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"roles": "manager"}, 403, "cyborg:deployable:program"),
        ({"content_type": "application/json"}, 415, "application/octet-stream"),
        ({"CONTENT_LENGTH": "0"}, 400, "1 to 2000000 bytes"),
        ({"content": b"x" * 2_000_001}, 413, "at most 2000000 bytes"),
        ({"CONTENT_LENGTH": ""}, 411, "Content-Length"),
        ({"query": "?nmae=x"}, 400, "known are name, property"),
        ({"query": "?property==x"}, 400, "KEY=VALUE"),
        ({"query": f"?name={'x' * 256}"}, 400, "at most 255"),
    ],
)
def test_invalid_uploads_are_refused_and_leave_nothing(
    client: Client, asked: dict[str, Any], status: int, says: str
) -> None:
    response = upload_image(client, **asked)
    assert response.status_code == status, response.content
    assert says in json.loads(response.content)["error"]["message"]
    assert not Image.objects.exists() and not [*store.get_image_directory().iterdir()]


@pytest.mark.django_db
def test_an_upload_beyond_the_maximum_at_a_time_is_answered_503(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(own.MAX_PARALLEL_UPLOADS):
        assert own._upload_slots.acquire(blocking=False)
    assert upload_image(client).status_code == 503
    own._upload_slots.release(own.MAX_PARALLEL_UPLOADS)
    assert upload_image(client).status_code == 201


@pytest.mark.django_db
def test_the_image_command_uploads_lists_and_removes_images(tmp_path: Path) -> None:
    file = tmp_path / "shell.bin"
    file.write_bytes(LARGE)
    status, out, err = run_verb("image", "upload", str(file), "--property", "accel:function_id=AFU-1", terminal=True)
    uuid = out.strip()
    assert status == 0 and "100%" in err
    assert (store.get_image_directory() / uuid).read_bytes() == LARGE
    assert Event.objects.get(action="image.added").source == "person"
    assert run_verb("image", "list")[1].splitlines()[1].split() == [
        *(uuid, "upload", str(len(LARGE)), "shell.bin", "accel:function_id=AFU-1"),
    ]
    assert json.loads(run_verb("image", "list", "--json")[1])[0]["uuid"] == uuid
    assert json.loads(run_verb("image", "remove", uuid, "--json")[1]) == {"removed": uuid}
    for words, says in (
        (["remove", uuid], "nothing here"),
        (["upload", str(tmp_path / "nothing")], "cannot be read: No such file"),
    ):
        with pytest.raises(CommandError, match=says):
            run_verb("image", *words)
    status, _, err = run_verb("image", "upload", str(file), "--property", "x")
    assert status == 2 and "write KEY=VALUE" in err


def test_a_function_trait_contains_only_characters_that_placement_allows() -> None:
    assert traits.build_function_trait("intel", "d8424dc4-a4a3") == "CUSTOM_FPGA_FUNCTION_ID_INTEL_D8424DC4_A4A3"
    assert traits.build_function_trait("x.y", "ß é" * 200)[:36] == "CUSTOM_FPGA_FUNCTION_ID_X_Y_SS__SS__"
    assert len(traits.build_function_trait("intel", "f" * 400)) == 255
