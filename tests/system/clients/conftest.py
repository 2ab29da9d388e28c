"""One product behind Keystone and one process per client for the tests of this folder, which kill no part of it.

They end after its last test. Each test uses names of its own and leaves the card free and in use.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.system import environments
from tests.system.clients.cloud import Cloud, cloud_with
from tests.system.clients.lines import Partner, partner
from tests.system.clients.neighbours import neighbours
from tests.system.conftest import fresh
from tests.system.keystone import Keystone


@pytest.fixture(scope="package")
def place() -> Iterator[Path]:
    """A folder for all of it."""
    with fresh() as path:
        yield path


@pytest.fixture(scope="package")
def cloud(keystone: Keystone, place: Path) -> Iterator[Cloud]:
    """The product behind Keystone."""
    with neighbours() as there, cloud_with(keystone, place, there) as one:
        yield one


@pytest.fixture(autouse=True)
def _product_is_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that finds the product dead, and one during which it died."""
    shared = "cloud" in request.fixturenames
    with request.getfixturevalue("cloud").product.required_during_test() if shared else nullcontext():
        yield


@pytest.fixture
def named() -> Callable[[str], str]:
    """Names nobody else uses: `named("gpu")`."""
    return lambda what: f"{what}-{uuid.uuid4().hex[:8]}"


def commands(config: pytest.Config, environment: str, folder: Path) -> Iterator[Partner]:
    """An `openstack` that stays."""
    environments.wanted(config, environment)
    with partner(environments.python(environment), "tests.system.clients.osc_process", folder) as one:
        yield one


@pytest.fixture(scope="package")
def in_tree(pytestconfig: pytest.Config, cloud: Cloud, place: Path) -> Iterator[Partner]:
    """python-openstackclient's own accelerator commands."""
    yield from commands(pytestconfig, "clients-new", place)


@pytest.fixture(scope="package")
def plugin(pytestconfig: pytest.Config, cloud: Cloud, place: Path) -> Iterator[Partner]:
    """python-cyborgclient's commands, in an older python-openstackclient."""
    (place / "plugin").mkdir()
    (place / "plugin" / "clouds.yaml").write_text((place / "clouds.yaml").read_text())
    yield from commands(pytestconfig, "clients-old", place / "plugin")


@pytest.fixture(scope="package")
def nova(pytestconfig: pytest.Config, cloud: Cloud, place: Path) -> Iterator[Partner]:
    """Nova's client, configured to send its service token, as it must."""
    environments.wanted(pytestconfig, "nova")
    lines = ["[service_user]", "send_service_user_token = true", "auth_type = password"]
    lines += [f"{key} = {value}" for key, value in cloud.keystone.credentials("service").items()]
    lines += ["[cyborg]", "[oslo_concurrency]", f"lock_path = {place}"]
    (place / "nova.conf").write_text("\n".join(lines))
    python, module = environments.python("nova"), "tests.system.clients.nova_process"
    with partner(python, module, place, NOVA_CONF=str(place / "nova.conf")) as one:
        yield one
