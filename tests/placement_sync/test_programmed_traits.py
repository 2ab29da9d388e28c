"""Test that the traits of a programmed device are in Placement before its request is Bound and Nova is notified."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Intent
from accelerators.requests import binding
from accelerators.runtime import jobs
from placement_sync.jobs import providers
from tests.accelerators.requests.test_bind_commands import (
    PROVIDER,
    answer_command,
    begin_programming,
    get_state_and_fault,
    handle,
)
from tests.placement_sync.session import PlacementModelSession
from tests.support.requests import NOVA

__all__ = ["handle"]
pytestmark = pytest.mark.django_db


@pytest.fixture
def placement(placement: PlacementModelSession) -> Iterator[PlacementModelSession]:
    """Let the intents for Placement and Nova exist; the tests run the jobs themselves."""
    with (
        jobs.JOBS.replaced("placement", jobs.Job("placement_sync.jobs.providers.run", intent_kind="provider")),
        jobs.JOBS.replaced("notices", jobs.Job("placement_sync.nova.notices_job.run", intent_kind="notice")),
    ):
        yield placement


def test_a_programmed_request_is_bound_only_after_its_traits_are_in_placement(
    handle: AttachHandle, placement: PlacementModelSession
) -> None:
    (request,), attach = begin_programming("adder")
    placement.away = True
    answer_command(attach)
    assert get_state_and_fault(request) == ("BindStarted", "")
    providers.step()
    assert get_state_and_fault(request) == ("BindStarted", "")
    assert not Intent.objects.filter(kind="notice").exists()
    placement.away = False
    with conductor.writing():
        Intent.objects.filter(kind="provider").update(next_at="2020-01-01T00:00:00Z")
    providers.step()
    assert get_state_and_fault(request) == ("Bound", "")
    assert "CUSTOM_FPGA_FUNCTION_ID_TEST_ADDER" in placement.model.providers[PROVIDER].traits
    notice = Intent.objects.get(kind="notice")
    assert (notice.key, notice.payload["completed"]) == (str(request.uuid), True)
    assert not Intent.objects.filter(kind=binding.PROGRAMMED_INTENT).exists()


def test_a_programmed_request_that_placement_does_not_show_in_time_names_placement_as_the_reason(
    handle: AttachHandle, placement: PlacementModelSession
) -> None:
    (request,), attach = begin_programming("adder")
    placement.away = True
    answer_command(attach)
    providers.step()
    with conductor.writing():
        AcceleratorRequest.objects.update(deadline=datetime.now(UTC) - timedelta(seconds=1))
    binding.fail_overdue_binds()
    state, fault = get_state_and_fault(request)
    assert state == "BindFailed" and "nothing was heard" not in fault
    error = Intent.objects.get(kind="provider").last_error
    assert error and fault == (
        f"host cmp1 was programmed, but its new traits were not in Placement before the deadline: {error}"
    )


def test_a_request_unbound_before_placement_is_written_is_skipped(
    handle: AttachHandle, placement: PlacementModelSession
) -> None:
    (request,), attach = begin_programming("adder")
    answer_command(attach)
    binding.unbind_requests([str(request.uuid)], NOVA)
    providers.step()
    assert get_state_and_fault(request)[0] == "Unbound"
    assert not Intent.objects.filter(kind=binding.PROGRAMMED_INTENT).exists()
