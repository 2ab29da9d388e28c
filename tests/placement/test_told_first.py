"""What a device was programmed with is in Placement before its request is Bound, and then Nova hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accelerators import conductor
from accelerators.commands import placing
from accelerators.models import AttachHandle, Intent
from accelerators.requests import binding
from accelerators.runtime import jobs
from placement_sync.jobs import providers
from placement_sync.reconcile import ObservedProvider
from tests.accelerators.test_bind_commands import ADDER, NOVA, PROVIDER, bound, ends, handle, one_open, pci, state
from tests.placement.session import Session

__all__ = ["handle"]
pytestmark = pytest.mark.django_db
ROOT = "11111111-1111-1111-1111-111111111111"
there = Session()


def cloud() -> Session:
    return there


@pytest.fixture
def placement(settings: Any) -> Iterator[Session]:
    there.__init__()  # type: ignore[misc]
    there.model.providers[ROOT] = ObservedProvider(ROOT, "cmp1", "", 0)
    settings.SERVICE_SESSION = "tests.placement.test_told_first.cloud"
    jobs.register_job("placement", "placement_sync.jobs.providers.run", cluster="work", intent_kind="provider")
    jobs.register_job("notices", "placement_sync.nova.notices_job.run", cluster="work", intent_kind="notice")
    yield there
    for name in ("placement", "notices"):
        del jobs._registered[name]


def test_bound_waits_for_placement(handle: AttachHandle, placement: Session) -> None:
    pci()
    (request,) = bound("adder")
    attach = one_open("attach")
    placing.mark_image_ready(attach.id, ADDER)
    placement.away = True
    ends(attach)
    assert state(request) == ("BindStarted", "")
    providers.step()
    assert state(request) == ("BindStarted", "")
    assert not Intent.objects.filter(kind="notice").exists()
    placement.away = False
    with conductor.writing():
        Intent.objects.filter(kind="provider").update(next_at="2020-01-01T00:00:00Z")
    providers.step()
    assert state(request) == ("Bound", "")
    assert "CUSTOM_FPGA_FUNCTION_ID_TEST_ADDER" in placement.model.providers[PROVIDER].traits
    notice = Intent.objects.get(kind="notice")
    assert (notice.key, notice.payload["completed"]) == (str(request.uuid), True)
    assert not Intent.objects.filter(kind=binding.PROGRAMMED_INTENT).exists()


def test_a_request_that_is_gone_meanwhile_is_not_missed(handle: AttachHandle, placement: Session) -> None:
    pci()
    (request,) = bound("adder")
    attach = one_open("attach")
    placing.mark_image_ready(attach.id, ADDER)
    ends(attach)
    binding.unbind_requests([str(request.uuid)], NOVA)
    providers.step()
    assert state(request)[0] == "Unbound"
    assert not Intent.objects.filter(kind=binding.PROGRAMMED_INTENT).exists()
