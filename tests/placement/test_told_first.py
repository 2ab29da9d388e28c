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
from placement_sync.reconcile import Observed
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
    there.model.providers[ROOT] = Observed(ROOT, "cmp1", "", 0)
    settings.SERVICE_SESSION = "tests.placement.test_told_first.cloud"
    jobs.register("placement", "placement_sync.jobs.providers.run", cluster="work", intent="provider")
    jobs.register("notices", "placement_sync.nova.notices_job.run", cluster="work", intent="notice")
    yield there
    for name in ("placement", "notices"):
        del jobs._jobs[name]


def test_bound_waits_for_placement(handle: AttachHandle, placement: Session) -> None:
    pci()
    (request,) = bound("adder")
    attach = one_open("attach")
    placing.prepared(attach.id, ADDER)
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
    assert not Intent.objects.filter(kind=binding.PROGRAMMED).exists()


def test_a_request_that_is_gone_meanwhile_is_not_missed(handle: AttachHandle, placement: Session) -> None:
    pci()
    (request,) = bound("adder")
    attach = one_open("attach")
    placing.prepared(attach.id, ADDER)
    ends(attach)
    binding.unbind([str(request.uuid)], NOVA)
    providers.step()
    assert state(request)[0] == "Unbound"
    assert not Intent.objects.filter(kind=binding.PROGRAMMED).exists()
