"""A host with cards, a running instance, and fakes of the services that the job `attachments` calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from keystoneauth1.session import Session as KeystoneSession
from keystoneauth1.token_endpoint import Token

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, Attachment, Deployable, Device, DeviceProfile, Intent
from accelerators.workflows import attachment_orders
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.jobs import attachments as attaching
from placement_sync.jobs import providers
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.failing_session import TroubledSession
from tests.placement_sync.session import PlacementModelSession
from tests.support.nova import FakeNova, running_nova
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

ADMIN_CALLER = Caller("olga", "u", frozenset({"admin"}), "admins")
ROOT = "11111111-1111-1111-1111-111111111111"
LONG_AGO = "2020-01-01T00:00:00Z"
INSTANCE = "aaaaaaaa-0000-4000-8000-000000000000"


@dataclass
class FakeCloud:
    """The model of Placement and a fake Nova behind one session. `troubled_session` passes the calls of both to it."""

    nova: FakeNova
    placement: PlacementModelSession = field(default_factory=PlacementModelSession)

    def request(self, url: str, method: str, **values: Any) -> Any:
        """Make one call, with the parameters of keystoneauth1."""
        if values["endpoint_filter"]["service_type"] == "placement":
            return self.placement.request(url, method, values.get("json"), values.get("headers"))
        return KeystoneSession(Token("http://unused", "token")).request(url, method, **values)

    def boot_instance(self, instance: str, host: str = "cmp1", root: str = ROOT, **states: str) -> str:
        """Create a running instance in Nova and in Placement, and return its id."""
        self.nova.shown[instance] = (states.get("status", "ACTIVE"), host)
        self.placement.model.allocated.setdefault((root, "VCPU"), {})[instance] = 4
        return instance

    def device_allocations(self, instance: str = INSTANCE) -> dict[str, dict[str, int]]:
        """Return the allocations of the instance in Placement, without its VCPU."""
        found = self.placement.model.read_consumer(instance).allocations
        return {provider: amounts for provider, amounts in found.items() if provider != ROOT}


troubled_session = TroubledSession(None)


@contextmanager
def configured_cloud(settings: Any) -> Iterator[FakeCloud]:
    """Configure the fake services for the block; Placement has cmp1, where the instance INSTANCE of project p1 runs."""
    keys = settings.KEYS
    with running_nova() as nova, SERVICE_SESSION.replaced("keystone", lambda: troubled_session):
        known = {name: getattr(keys, name) for name in keys.__dataclass_fields__}
        settings.KEYS = SimpleNamespace(**known | {"nova_endpoint": nova.url})
        fake_cloud = FakeCloud(nova)
        troubled_session.__init__(fake_cloud)  # type: ignore[misc]
        fake_cloud.placement.model.providers[ROOT] = ObservedProvider(ROOT, "cmp1", "", 0)
        fake_cloud.boot_instance(INSTANCE)
        with attachment_orders.INSTANCE_LOOKUP.replaced("nova", attaching.look_up_instance):
            yield fake_cloud


def make_ready_cards(count: int = 1, handles: int = 2, **changes: Any) -> None:
    """Create ready cards on cmp1 that Placement knows, and the profiles `one` and `two`, for 1 and 2 units."""
    apply_report(
        get_or_create_host(), make_driver_report(*(make_card(n, handles=handles, **changes) for n in range(count)))
    )
    for device in Device.objects.values_list("uuid", flat=True):
        lifecycle.enable_device(device, ADMIN_CALLER)
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
        DeviceProfile.objects.create(name="two", groups=[{"resources:FPGA": "2", "trait:CUSTOM_TEST": "required"}])
    providers.step()


def provider_of_card(number: int = 0) -> str:
    """Return the provider of the card with this number."""
    return str(Deployable.objects.order_by("id")[number].rp_uuid)


def ask_attachment(profile: str = "one", instance: str = INSTANCE, **more: Any) -> Attachment:
    """Order an attachment as an administrator, and return it."""
    return attachment_orders.order_attachment(uuid.UUID(instance), ADMIN_CALLER, profile=profile, **more)


def run_steps(max_steps: int = 30) -> None:
    """Run the job until no intent is left, at most `max_steps` steps; waiting intents become due at once."""
    for _ in range(max_steps):
        make_intents_due()
        if not attaching.step() and not Intent.objects.filter(kind="attachment").exists():
            return


def make_intents_due() -> None:
    """Make all intents due, as if enough time had passed."""
    with conductor.writing():
        Intent.objects.update(next_at=LONG_AGO)


def current_state(row: Attachment) -> str:
    """Return the state that the database has now."""
    row.refresh_from_db()
    return str(row.state)


def request_states(instance: str = INSTANCE) -> list[str]:
    """Return the states of the instance's requests."""
    return list(AcceleratorRequest.objects.filter(instance_uuid=instance).values_list("state", flat=True))
