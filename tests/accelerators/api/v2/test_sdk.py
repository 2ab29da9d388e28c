"""Test openstacksdk's accelerator proxy as a real client against a live server (contract section 7.2, promise C1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import requests
from django.contrib.auth.models import User
from keystoneauth1 import session
from keystoneauth1.token_endpoint import Token
from openstack import connection, exceptions

from accelerators.models import Deployable, Device
from cyborgweb.models import ApiToken
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

Connect = Callable[..., connection.Connection]

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def connect(live_server: Any) -> Iterator[Connect]:
    """Return `connect(**options)`, which makes a connection with a fixed accelerator endpoint.

    The HTTP session is closed at the end; otherwise the server's threads would keep their database connections.
    """
    secret = ApiToken.create_with_secret("sdk", User.objects.create_user("sdk"), ["admin"], "p1")
    endpoint = f"{live_server.url}/accelerator/v2"
    with requests.Session() as http:
        made = session.Session(auth=Token(endpoint=endpoint, token=secret), session=http)
        yield partial(connection.Connection, session=made, accelerator_endpoint_override=endpoint)


@pytest.mark.parametrize(
    ("options", "status"), [({}, None), ({"accelerator_default_microversion": "2.3"}, "maintaining")]
)
def test_C1_openstacksdk_reads_devices_and_deployables(connect: Connect, options: dict[str, str], status: Any) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2), make_card(3)))
    accelerator = connect(**options).accelerator
    devices = list(accelerator.devices())
    assert [device.uuid for device in devices] == [str(d.uuid) for d in Device.objects.order_by("id")]
    assert {(device.type, device.hostname, device.status) for device in devices} == {("FPGA", "cmp1", status)}
    assert accelerator.get_device(devices[0].uuid).model == "1044"
    deployables = list(accelerator.deployables())
    assert [deployable.name for deployable in deployables] == [d.name for d in Deployable.objects.order_by("id")]
    assert accelerator.get_deployable(deployables[1].id).num_accelerators == 1


def test_C1_openstacksdk_limits_lists_and_raises_its_exceptions_for_refusals(connect: Connect) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2), make_card(3)))
    accelerator = connect().accelerator
    assert len(list(accelerator.devices(limit=2, paginated=False))) == 2
    with pytest.raises(exceptions.NotFoundException, match="Device not found with uuid=nope"):
        accelerator.get_device("nope")
    with pytest.raises(exceptions.BadRequestException, match="Expected a uuid but received nope"):
        accelerator.get_deployable("nope")
