"""Fixtures of this folder: one product with Keystone, and one process per client, which all its tests share.

No test kills a part of them. Each test uses its own names and leaves the card enabled and without bound requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.system import environments
from tests.system.clients.cloud import KeystoneCloud, running_cloud
from tests.system.clients.lines import ClientProcess, start_client
from tests.system.clients.neighbours import neighbours
from tests.system.conftest import fresh_folder
from tests.system.keystone import Keystone


@pytest.fixture(scope="package")
def place() -> Iterator[Path]:
    """The folder of the shared product and clients."""
    with fresh_folder() as path:
        yield path


@pytest.fixture(scope="package")
def cloud(keystone: Keystone, place: Path) -> Iterator[KeystoneCloud]:
    """The shared product with its Keystone."""
    with neighbours() as there, running_cloud(keystone, place, there) as one:
        yield one


@pytest.fixture(autouse=True)
def _product_is_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that uses the product if the product is dead before it or dies during it."""
    shared = "cloud" in request.fixturenames
    with request.getfixturevalue("cloud").product.required_during_test() if shared else nullcontext():
        yield


@pytest.fixture
def named() -> Callable[[str], str]:
    """Return a function that makes a unique name: `named("gpu")` returns `gpu-` and random digits."""
    return lambda what: f"{what}-{uuid.uuid4().hex[:8]}"


def start_commands(config: pytest.Config, environment: str, folder: Path) -> Iterator[ClientProcess]:
    """Run a process that executes `openstack` commands; skip the test if the environment is unavailable."""
    environments.wanted(config, environment)
    with start_client(environments.python(environment), "tests.system.clients.osc_process", folder) as one:
        yield one


@pytest.fixture(scope="package")
def in_tree(pytestconfig: pytest.Config, cloud: KeystoneCloud, place: Path) -> Iterator[ClientProcess]:
    """A process with python-openstackclient's own accelerator commands."""
    yield from start_commands(pytestconfig, "clients-new", place)


@pytest.fixture(scope="package")
def plugin(pytestconfig: pytest.Config, cloud: KeystoneCloud, place: Path) -> Iterator[ClientProcess]:
    """A process with python-cyborgclient's commands as a plugin of an older python-openstackclient."""
    (place / "plugin").mkdir()
    (place / "plugin" / "clouds.yaml").write_text((place / "clouds.yaml").read_text())
    yield from start_commands(pytestconfig, "clients-old", place / "plugin")


@pytest.fixture(scope="package")
def nova(pytestconfig: pytest.Config, cloud: KeystoneCloud, place: Path) -> Iterator[ClientProcess]:
    """A process with Nova's client, which is configured to send Nova's service token."""
    environments.wanted(pytestconfig, "nova")
    lines = ["[service_user]", "send_service_user_token = true", "auth_type = password"]
    lines += [f"{key} = {value}" for key, value in cloud.keystone.credentials("service").items()]
    lines += ["[cyborg]", "[oslo_concurrency]", f"lock_path = {place}"]
    (place / "nova.conf").write_text("\n".join(lines))
    python, module = environments.python("nova"), "tests.system.clients.nova_process"
    with start_client(python, module, place, NOVA_CONF=str(place / "nova.conf")) as one:
        yield one
