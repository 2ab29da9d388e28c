"""Test labelling the accelerators of several requests in the console."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Bulk, Event
from accelerators.workflows import bulk_actions
from tests.accelerators.api.own.test_units import build_divisible_card, create_bound_request, report_cards

pytestmark = pytest.mark.django_db
LIST_URL = "/admin/accelerators/acceleratorrequest/"
REFUSALS = "/admin/accelerators/bulkitem/"


def create_requests(number: int) -> list[AcceleratorRequest]:
    """Create held accelerators of one device, and return their requests."""
    report_cards(build_divisible_card(1, number))
    return [create_bound_request(handle) for handle in AttachHandle.objects.order_by("id")]


def choose_all(operator: Client) -> HttpResponse:
    """Choose all requests in the list; return the page that asks for the label."""
    chosen = {"action": "label_accelerators", "_selected_action": [one.pk for one in AcceleratorRequest.objects.all()]}
    return operator.post(LIST_URL, chosen, follow=True)


def give_label(operator: Client, label: str) -> tuple[str, str]:
    """Choose all requests and give the label; return the URL and the content of the page that asks for confirmation."""
    asked = choose_all(operator)
    answer = operator.post(asked.redirect_chain[-1][0], {"label": label, "reason": "new team"}, follow=True)  # type: ignore[attr-defined]
    return answer.redirect_chain[-1][0], answer.content.decode()


def list_labels() -> list[str]:
    return [*AcceleratorRequest.objects.order_by("id").values_list("label", flat=True)]


def test_several_accelerators_are_labelled_and_one_that_has_changed_is_left_and_retried(operator: Client) -> None:
    first, second = create_requests(2)
    assert "Label 2 accelerators" in choose_all(operator).content.decode()
    url, page = give_label(operator, "training")
    assert "Set the label “training”: 2 accelerators" in page and 'name="typed"' not in page
    assert "gets the label" in page and "Label when chosen" in page and list_labels() == ["", ""]
    with conductor.writing():
        AcceleratorRequest.objects.filter(pk=second.pk).update(label="theirs")
    done = operator.post(url, {"do": "confirm", "reason": "new team"}, follow=True).content.decode()
    assert "Look at it again" in done and "Retry the 1 failed accelerator<" in done
    assert list_labels() == ["training", "theirs"]
    event = Event.objects.get(action="request.labelled")
    assert (event.source, event.actor, event.subject, event.reason) == ("person", "olga", first.uuid, "new team")
    listed = operator.get(REFUSALS).content.decode()
    assert f"/admin/accelerators/acceleratorrequest/{second.uuid}/change/" in listed
    again = operator.post(url, {"do": "again"}, follow=True)
    operator.post(again.redirect_chain[-1][0], {"do": "confirm"})  # type: ignore[attr-defined]
    assert list_labels() == ["training", "training"]


def test_accelerators_on_several_hosts_are_labelled_only_after_their_number_was_typed(operator: Client) -> None:
    first, _ = create_requests(2)
    with conductor.writing():
        AcceleratorRequest.objects.filter(pk=first.pk).update(hostname="cmp2")
    url, page = give_label(operator, "training")
    assert "2 chosen accelerators are on 2 hosts" in page and 'name="typed"' in page
    assert "To confirm, type 2." in operator.post(url, {"do": "confirm"}, follow=True).content.decode()
    assert list_labels() == ["", ""]
    operator.post(url, {"do": "confirm", "typed": "2"})
    assert list_labels() == ["training", "training"]


def test_requests_that_hold_nothing_and_too_many_are_refused(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    create_requests(2)
    monkeypatch.setattr(bulk_actions, "MAX_BULK_OBJECTS", 1)
    assert "More than 1 accelerators are chosen" in choose_all(operator).content.decode()
    with conductor.writing():
        AcceleratorRequest.objects.update(attach_handle=None, state="Unbound")
    assert "No accelerator is chosen." in choose_all(operator).content.decode()


def test_a_label_that_was_confirmed_meanwhile_is_not_changed(operator: Client) -> None:
    create_requests(1)
    asked = choose_all(operator).redirect_chain[-1][0]  # type: ignore[attr-defined]
    operator.post(asked, {"label": "training"})
    bulk_actions.confirm_draft(Bulk.objects.get(), "", held_too=False)
    answer = operator.post(asked, {"label": "other"}, follow=True).content.decode()
    assert "Select requests that hold an accelerator" in answer and list_labels() == ["training"]
    with pytest.raises(bulk_actions.RefusedError, match="meanwhile"):
        bulk_actions.set_arguments(Bulk.objects.get(), {"label": "other"}, "")


def test_people_without_the_right_cannot_label(client: Client) -> None:
    create_requests(1)
    client.force_login(User.objects.create_user("vera", is_staff=True))
    answer = client.post(f"{LIST_URL}label/", {"label": "x"})
    assert (answer.status_code, list_labels()) == (403, [""])


def test_another_person_cannot_set_the_label_of_a_draft(operator: Client, client: Client) -> None:
    create_requests(1)
    asked = choose_all(operator).redirect_chain[-1][0]  # type: ignore[attr-defined]
    client.force_login(User.objects.create_superuser("root"))
    assert client.post(asked, {"label": "x"}).status_code == 403
