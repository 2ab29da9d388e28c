"""What a device was programmed with is in Placement before its request is Bound, and then Nova hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accelerators import binding, commands, conductor, ticks
from accelerators.models import AttachHandle, Intent
from placement_sync import tasks
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
    ticks.register("placement", "placement_sync.tasks.run", cluster="work", intent="provider")
    ticks.register("notices", "placement_sync.tell.run", cluster="work", intent="notice")
    yield there
    for name in ("placement", "notices"):
        del ticks._jobs[name]


def test_bound_waits_for_placement(handle: AttachHandle, placement: Session) -> None:
    pci()
    (request,) = bound("adder")
    attach = one_open("attach")
    commands.prepared(attach.id, ADDER)
    placement.away = True
    ends(attach)
    assert state(request) == ("BindStarted", "")
    tasks.step()
    assert state(request) == ("BindStarted", "")
    assert not Intent.objects.filter(kind="notice").exists()
    placement.away = False
    with conductor.writing():
        Intent.objects.filter(kind="provider").update(next_at="2020-01-01T00:00:00Z")
    tasks.step()
    assert state(request) == ("Bound", "")
    assert "CUSTOM_FPGA_FUNCTION_ID_TEST_ADDER" in placement.model.providers[PROVIDER].traits
    notice = Intent.objects.get(kind="notice")
    assert (notice.key, notice.payload["completed"]) == (str(request.uuid), True)
    assert not Intent.objects.filter(kind=binding.PROGRAMMED).exists()


def test_a_request_that_is_gone_meanwhile_is_not_missed(handle: AttachHandle, placement: Session) -> None:
    pci()
    (request,) = bound("adder")
    attach = one_open("attach")
    commands.prepared(attach.id, ADDER)
    ends(attach)
    binding.unbind([str(request.uuid)], NOVA)
    tasks.step()
    assert state(request)[0] == "Unbound"
    assert not Intent.objects.filter(kind=binding.PROGRAMMED).exists()
