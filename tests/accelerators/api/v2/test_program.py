"""Test programming a deployable over v2 (contract section 2.5): success, failures, waiting, and the stored traits."""

from __future__ import annotations

import gc
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from msgspec import structs

from accelerators import conductor
from accelerators.api.v2 import deployables
from accelerators.commands import command_queue, programming
from accelerators.commands.command_queue import CommandAnswer
from accelerators.domain import traits
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.images import download, store
from accelerators.inventory import attributes
from accelerators.models import Attribute, Command, Deployable, Event, Host, Image, Intent
from accelerators.workflows import command_endings
from agents.gateway.asgi_app import AgentGateway
from agents.models import Agent
from cyborgweb import asgi
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.settings.keys import Keys
from cyborgweb.wsgi import application as wsgi
from drivers.inventory import Attribute as Fact
from drivers.inventory import Device
from tests.accelerators.api.v2.conftest import Call, get_fault_string
from tests.support.background import running_beside
from tests.support.reports import apply_report, make_card, make_driver_report
from tests.support.webserver import serving, until

IMAGE_CONTENT = b"a bitstream" * 100
OPERATOR = Caller("rita", "u1", frozenset({"admin"}), "p1")
Offered = Callable[..., str]


@pytest.fixture(autouse=True)
def _state_folder(settings: Any, tmp_path: Path) -> Iterator[None]:
    settings.KEYS = Keys(state_dir=str(tmp_path))
    with download.IMAGE_SERVICE.replaced("glance", None):
        yield


def upload_image(**properties: str) -> Image:
    return store.store_upload([IMAGE_CONTENT], len(IMAGE_CONTENT), "shell", properties, OPERATOR, EventSource.API)


def build_program_body(image: object) -> list[dict[str, object]]:
    return [{"op": "replace", "path": "/program", "value": [{"image_uuid": str(image)}]}]


def register_agent(host: Host) -> None:
    Agent.objects.get_or_create(host=host, defaults={"public_key": f"key of {host.name}", "ops": "program"})


@contextmanager
def run_agents(outcome: str = "succeeded", text: str = "") -> Iterator[None]:
    """Run the image job and all agents in a thread during the block: each command is prepared, answered and ended.

    `outcome` and `text` are the answer of the agents.
    """

    def work(over: Event) -> None:
        while not over.wait(0.01):
            download.run()
            for command in Command.objects.filter(state="queued", answered_at__isnull=True):
                command_queue.store_answers([CommandAnswer(command.host_id, command.pk, outcome, text)])
            command_endings.end_answered_commands()
        connection.close()

    with running_beside(work):
        yield


@pytest.fixture
def part(offered: Offered) -> Deployable:
    """Return the deployable of a ready card that can be programmed, on a host whose agent takes program commands."""
    offered(acts="program")
    found = Deployable.objects.select_related("device__host").get()
    register_agent(found.device.host)
    return found


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_programming_returns_the_deployable_with_its_new_bitstream_and_function(call: Call, part: Deployable) -> None:
    image = upload_image(**{"accel:function_id": "dma-1"})
    with run_agents():
        for address in ("/program", f"/program/{part.uuid}"):
            response = call("PATCH", f"/v2/deployables/{part.uuid}{address}", build_program_body(image.uuid))
            assert response.status_code == 200, response.content
            shown = json.loads(response.content)
            assert shown["bitstream_id"] == str(image.uuid)
            function = {"trait_function": "CUSTOM_FPGA_FUNCTION_ID_TEST_DMA_1"}
            assert json.loads(shown["attributes_list"])[-1] == function
    assert Attribute.objects.get(key="trait_function").origin == "conductor"
    assert Intent.objects.filter(kind="provider", key=str(part.device.host.uuid)).exists()
    first = Event.objects.filter(action="device.programmed").earliest("id")
    assert first.changes[f"{part.name} bitstream"] == [None, str(image.uuid)] and first.subject == part.device.uuid
    assert first.reason == "image shell"


@pytest.mark.django_db(transaction=True)
def test_programming_failures_are_answered_with_upstreams_and_the_drivers_words(
    call: Call, part: Deployable, settings: Any
) -> None:
    image, where = upload_image(), f"/v2/deployables/{part.uuid}/program"
    with run_agents("failed", "the region did not come back; undone"):
        response = call("PATCH", where, build_program_body(image.uuid))
    assert response.status_code == 500
    assert get_fault_string(response).startswith(
        "FPGA programming failed with return False. the region did not come back"
    )
    with run_agents():
        response = call("PATCH", where, build_program_body(uuid4()))
    assert (response.status_code, "The image cannot be programmed: no image" in get_fault_string(response)) == (
        400,
        True,
    )
    settings.KEYS = Keys(state_dir=settings.KEYS.state_dir, program_wait_s=0)
    response = call("PATCH", where, build_program_body(image.uuid))
    assert response.status_code == 500 and str(Command.objects.latest("id").uuid) in get_fault_string(response)
    busy = call("PATCH", where, build_program_body(image.uuid))
    assert (busy.status_code, "is busy with program" in get_fault_string(busy)) == (409, True)


def count_database_connections() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        return cursor.fetchone()[0]


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_while_the_maximum_of_program_calls_wait_lists_answer_and_no_connection_is_held(
    call: Call, offered: Offered, token: str
) -> None:
    image = upload_image()
    for n in range(1, deployables.MAX_WAITERS + 1):
        offered(n=n, acts="program")
    parts = [*Deployable.objects.select_related("device__host")]
    for one in parts:
        register_agent(one.device.host)
    call("GET", "/v2/devices")
    from cyborgweb.models import ApiToken

    secret = ApiToken.create_with_secret("admin", ApiToken.objects.latest("id").user, ["admin"], "p1")
    statuses: list[int] = []

    def ask(method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        sent = {"X-Auth-Token": secret, "Content-Type": "application/json"}
        client.request(method, path, json.dumps(body) if body else None, sent)
        response = client.getresponse()
        response.read()
        client.close()
        return response

    def wait(uuid: UUID) -> None:
        statuses.append(ask("PATCH", f"/v2/deployables/{uuid}/program", build_program_body(image.uuid)).status)

    gc.collect()  # closes the database connections of ended threads of earlier tests
    before = count_database_connections()
    threads = DjangoThreads(wsgi, Keys(request_threads=1, request_queue=1))
    with serving(asgi.HttpApplication(AgentGateway(Keys()), threads)) as port:
        clients = [threading.Thread(target=wait, args=[one.uuid], daemon=True) for one in parts]
        for client in clients:
            client.start()
        until(lambda: Command.objects.count() == deployables.MAX_WAITERS)
        assert ask("GET", "/v2/devices").status == 200
        full = ask("PATCH", f"/v2/deployables/{parts[0].uuid}/program", build_program_body(image.uuid))
        assert (full.status, full.headers["Retry-After"]) == (503, "1")
        answered = 3  # the hub's connection, and those of the two answered requests: a list and a refusal
        until(lambda: count_database_connections() <= before + answered)
        assert not statuses
        with run_agents():
            for client in clients:
                client.join(20)
    assert statuses == [200] * deployables.MAX_WAITERS


@pytest.fixture
def reported(part: Deployable) -> Device:
    """Return a card whose driver reports the function that it had before; then it was programmed with another."""
    old = Fact("trait1", "CUSTOM_FPGA_FUNCTION_ID_TEST_OLD")
    deployable = make_card(1).deployables[0]
    with_old = structs.replace(deployable, attributes=(*deployable.attributes, old))
    found = make_card(1, acts="program", deployables=(with_old,))
    apply_report(part.device.host, make_driver_report(found), seq=2)
    with conductor.writing():
        image = {"id": str(uuid4()), "properties": {"accel:function_id": "new"}}
        programming.store_programmed_image(part.device, part.name, image, "rita")
    return found


def list_function_traits() -> list[tuple[str, str]]:
    found = Attribute.objects.filter(value__startswith=traits.FUNCTION_TRAIT_PREFIX).order_by("id")
    return [*found.values_list("value", "origin")]


@pytest.mark.django_db
def test_programming_replaces_the_function_trait_that_the_driver_reported(reported: Device) -> None:
    assert list_function_traits() == [("CUSTOM_FPGA_FUNCTION_ID_TEST_NEW", "conductor")]


@pytest.mark.django_db
def test_a_report_after_programming_adds_no_second_function_trait(reported: Device, part: Deployable) -> None:
    apply_report(part.device.host, make_driver_report(reported, make_card(2)), seq=3)
    assert list_function_traits() == [("CUSTOM_FPGA_FUNCTION_ID_TEST_NEW", "conductor")]


@pytest.mark.django_db
def test_attributes_written_by_programming_cannot_be_changed_or_deleted_by_hand(call: Call, part: Deployable) -> None:
    uuid = str(uuid4())
    with conductor.writing():
        programming.store_programmed_image(part.device, part.name, {"id": uuid, "properties": {}}, "rita")
    found = Attribute.objects.get(key="trait_function")
    assert found.value == f"CUSTOM_FPGA_FUNCTION_ID_TEST_{uuid.upper().replace('-', '_')}"
    with conductor.writing():
        programming.store_programmed_image(part.device, part.name, {"id": str(uuid4()), "properties": {}}, "rita")
    again = Attribute.objects.get(key="trait_function")
    assert again.pk == found.pk and again.updated_at is not None and again.updated_at != found.updated_at
    body = {"deployable_id": part.pk, "key": "trait_function", "value": "CUSTOM_OTHER"}
    for response in (call("POST", "/v2/attributes", body), call("DELETE", f"/v2/attributes/{found.uuid}")):
        assert (response.status_code, "says what was programmed" in get_fault_string(response)) == (409, True)
    with pytest.raises(RefusedError) as refused:
        attributes.remove_attribute(found.uuid, OPERATOR)
    assert refused.value.reason == RefusalReason.CONFLICT
