"""Test detaching several attachments in the console, and the page of an action that this release does not know."""

from __future__ import annotations

import pytest
from django.test import Client

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.states import DrainTarget
from accelerators.models import AcceleratorRequest, AttachHandle, Attachment, Bulk, Device
from accelerators.workflows import bulk_actions
from tests.accelerators.api.own.test_units import build_divisible_card, create_bound_request, report_cards

pytestmark = pytest.mark.django_db
LIST_URL = "/admin/accelerators/attachment/"
INSTANCE = "6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b"


@pytest.fixture
def attachments() -> list[Attachment]:
    """Return one attachment that holds a unit, one that is not attached yet, and one that has ended."""
    report_cards(build_divisible_card(1, 2))
    held = create_bound_request(AttachHandle.objects.order_by("id")[0], instance=INSTANCE)
    with conductor.writing():
        return [
            Attachment.objects.create(
                instance=INSTANCE, project_id="p1", host="cmp1", profile="small", actor="olga", state=state, **columns
            )
            for state, columns in (("attached", {"requests": [held.uuid]}), ("asked", {}), ("detached", {}))
        ]


def test_several_attachments_are_detached_after_their_number_was_typed(
    operator: Client, attachments: list[Attachment]
) -> None:
    listed = operator.get(LIST_URL).content.decode()
    assert 'value="detach_attachments"' in listed
    chosen = {"action": "detach_attachments", "_selected_action": [row.pk for row in attachments]}
    asked = operator.post(LIST_URL, chosen, follow=True)
    url, page = asked.redirect_chain[-1][0], asked.content.decode()
    assert "Detach: 3 attachments?" in page and "Some attachments hold units." in page
    assert "on 1 host and belong to 1 instance; 1 held unit is given back." in page
    assert "is undone before it is attached" in page and "is detached already" in page
    refused = operator.post(url, {"do": "confirm"}, follow=True).content.decode()
    assert "To confirm, type 3. Nothing was done." in refused
    assert [*Attachment.objects.order_by("id").values_list("state", flat=True)] == ["attached", "asked", "detached"]
    done = operator.post(url, {"do": "confirm", "typed": "3", "reason": "moved"}, follow=True).content.decode()
    assert [*Attachment.objects.order_by("id").values_list("state", flat=True)] == ["detaching", "undoing", "detached"]
    assert "Outcome of each attachment" in done and "/admin/accelerators/attachment/?state__exact=detaching" in done
    assert f"/admin/accelerators/attachment/{attachments[0].uuid}/change/" in done
    assert operator.get(f"/admin/accelerators/attachment/{attachments[0].uuid}/change/").status_code == 200
    assert AcceleratorRequest.objects.exists()  # the job takes them back


def test_C2_the_console_shows_an_action_of_a_newer_release_and_can_cancel_it(operator: Client) -> None:
    report_cards(build_divisible_card(1, 2))
    olga = Caller("olga", "", frozenset(), "")
    draft = bulk_actions.create_draft(Action.QUARANTINE, DrainTarget.MAINTENANCE, Device.objects.all(), olga)
    with conductor.writing():
        Bulk.objects.filter(pk=draft.pk).update(action="polish", target="planet")
    url = f"/admin/accelerators/bulk/{draft.uuid}/change/"
    page = operator.get(url).content.decode()
    assert "Action polish: 1 planet?" in page and "Open this page on a conductor of the newer release" in page
    assert 'value="confirm"' not in page and 'value="try"' not in page
    with conductor.writing():
        Bulk.objects.filter(pk=draft.pk).update(state="running")
    page = operator.get(url).content.decode()
    assert "This release does not know the action" in page and "Stop before the next planet" in page
    assert "Action polish" in operator.get("/admin/accelerators/bulk/").content.decode()
    assert operator.get(f"/admin/accelerators/bulkitem/?bulk__id__exact={draft.pk}").status_code == 200
    operator.post(url, {"do": "cancel"})
    draft.refresh_from_db()
    assert draft.state == "cancelled"
    assert operator.get(url).status_code == 200
