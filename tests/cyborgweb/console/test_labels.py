"""Test labelling the accelerators of several requests in the console."""

from __future__ import annotations

import html
import re

import pytest
from django.contrib.auth.models import User
from django.test import Client

from accelerators import conductor
from accelerators.admin import labels
from accelerators.models import AcceleratorRequest, AttachHandle, Event
from tests.accelerators.api.own.test_units import build_divisible_card, create_bound_request, report_cards

pytestmark = pytest.mark.django_db
LIST_URL = "/admin/accelerators/acceleratorrequest/"


def open_label_page(operator: Client) -> tuple[str, list[str]]:
    """Choose all requests in the list; return the page, and what its form says that the user has seen."""
    chosen = {"action": "label_accelerators", "_selected_action": [one.pk for one in AcceleratorRequest.objects.all()]}
    page = operator.post(LIST_URL, chosen).content.decode()
    return page, [html.unescape(seen) for seen in re.findall(r'name="seen" value="([^"]*)"', page)]


def list_labels() -> list[str]:
    return [*AcceleratorRequest.objects.order_by("id").values_list("label", flat=True)]


def test_several_accelerators_are_labelled_and_one_that_has_changed_is_left_as_it_is(operator: Client) -> None:
    report_cards(build_divisible_card(1, 2))
    first, second = (create_bound_request(handle) for handle in AttachHandle.objects.order_by("id"))
    page, seen = open_label_page(operator)
    assert "Label 2 accelerators" in page and "typed" not in page
    with conductor.writing():
        AcceleratorRequest.objects.filter(pk=second.pk).update(label="theirs")
    done = operator.post(f"{LIST_URL}label/", {"seen": seen, "label": "training"}, follow=True).content.decode()
    assert "The label of 1 accelerator was set." in done and "Look at it again" in done
    assert list_labels() == ["training", "theirs"]
    event = Event.objects.get(action="request.labelled")
    assert (event.source, event.actor, event.subject) == ("person", "olga", first.uuid)


def test_accelerators_on_several_hosts_are_labelled_only_after_their_number_was_typed(operator: Client) -> None:
    report_cards(build_divisible_card(1, 2))
    first, _ = (create_bound_request(handle) for handle in AttachHandle.objects.order_by("id"))
    with conductor.writing():
        AcceleratorRequest.objects.filter(pk=first.pk).update(hostname="cmp2")
    page, seen = open_label_page(operator)
    assert "2 accelerators on 2 hosts" in page
    said = {"seen": seen, "label": "training"}
    assert "To confirm, type 2." in operator.post(f"{LIST_URL}label/", said).content.decode()
    assert list_labels() == ["", ""]
    operator.post(f"{LIST_URL}label/", said | {"typed": "2"})
    assert list_labels() == ["training", "training"]


def test_more_accelerators_than_a_form_can_name_are_refused(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MAX_CHOSEN", 1)
    report_cards(build_divisible_card(1, 2))
    for handle in AttachHandle.objects.all():
        create_bound_request(handle)
    chosen = {"action": "label_accelerators", "_selected_action": [one.pk for one in AcceleratorRequest.objects.all()]}
    assert "More than 1 requests are selected." in operator.post(LIST_URL, chosen, follow=True).content.decode()


def test_people_without_the_right_cannot_label(client: Client) -> None:
    report_cards(build_divisible_card(1, 1))
    request = create_bound_request(AttachHandle.objects.first())
    client.force_login(User.objects.create_user("vera", is_staff=True))
    answer = client.post(f"{LIST_URL}label/", {"seen": [f"{request.uuid} "], "label": "x"})
    assert (answer.status_code, list_labels()) == (403, [""])
