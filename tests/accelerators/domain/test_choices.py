"""Test enumerations that people see: value, tone and label are declared once, everything else is derived from them."""

from __future__ import annotations

from django.apps import apps

from accelerators.api.own.filters import choice_filter
from accelerators.domain.choices import Choice
from accelerators.domain.states import DeviceState
from accelerators.ui import badges
from placement_sync.models import DiscrepancyKind


def test_a_member_is_its_value_and_has_a_tone_and_a_label() -> None:
    assert DeviceState("ready") is DeviceState.READY
    assert f"{DeviceState.READY} {DeviceState.READY!s}" == "ready ready"
    assert (DeviceState.READY.tone, DeviceState.READY.label) == ("good", "ready")
    assert DeviceState.RETIRED.tone == "calm"
    assert (DiscrepancyKind.UNATTACHED.value, DiscrepancyKind.UNATTACHED.label) == (
        "unattached",
        "claimed but not attached",
    )


def test_every_member_can_be_shown_as_a_badge_and_chosen() -> None:
    for enumeration in Choice.__subclasses__():
        for choice in enumeration:
            badge = badges.render_choice(choice, "because")
            assert f'class="mark {choice.tone}" title="because"' in badge
            assert badge.endswith(f"</span>{choice.label}</span>")
        assert enumeration.choices() == [(choice.value, choice.label) for choice in enumeration]
        assert choice_filter(enumeration).extra["choices"] == enumeration.choices()


def test_every_column_with_choices_takes_them_from_one_enumeration() -> None:
    known_choices = [enumeration.choices() for enumeration in Choice.__subclasses__()]
    for label in ("accelerators", "agents", "placement_sync", "cyborgweb"):
        for model in apps.get_app_config(label).get_models():
            for field in model._meta.concrete_fields:
                choices = [tuple(choice) for choice in field.choices or ()]
                if choices and choices[0] != ("", "any"):
                    assert choices in known_choices, f"{model.__name__}.{field.name}"
