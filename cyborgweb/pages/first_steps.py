"""The checklist on the overview of a new system: the steps from nothing to a flavor with accelerators.

Each step ticks itself from the stored state, and says to people without the right who may do it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse

from accelerators.admin.profiles import PROFILE_COMMAND
from accelerators.domain.states import DeviceState
from accelerators.models import DeviceProfile
from accelerators.runtime import jobs
from accelerators.ui import empty_lists, permissions
from agents.models import JoinToken
from cyborgweb.pages import alerts

ADMITTED_STATES = (DeviceState.INSTALLING, DeviceState.READY, DeviceState.MAINTENANCE)
"""States that a device has only after somebody, or a rule, has admitted it."""


@dataclass(frozen=True)
class SystemFacts:
    """Facts that decide which steps are done. `resource_class` is the name of one that a device offers, '' if none."""

    has_agents: bool
    has_admitted_devices: bool
    has_profiles: bool
    has_requests: bool
    resource_class: str


@dataclass(frozen=True)
class FirstStep:
    """One step of the checklist: whether it is done, what to do, the commands to copy, links as (text, address), and
    why this user may not do it, '' if the user may."""

    title: str
    is_done: bool
    explanation: str
    commands: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    denial: str


def list_first_steps(request: HttpRequest, facts: SystemFacts) -> list[FirstStep]:
    """Return the steps of the checklist as this user sees them.

    Returns none when all steps are done, and when requests exist, because then the system is in use, also if it has no
    cloud.
    """
    steps = [
        _build_join_step(request, facts),
        _build_admit_step(request, facts),
        _build_profile_step(request, facts),
        _build_cloud_step(),
    ]
    return [] if facts.has_requests or all(step.is_done for step in steps) else steps


def _build_join_step(request: HttpRequest, facts: SystemFacts) -> FirstStep:
    """Return the step that is done when an agent has joined."""
    return FirstStep(
        "Join a host",
        facts.has_agents,
        "An agent runs on each compute host, finds its accelerators and reports them. Make a join token for HOST, the"
        " name of the host’s compute provider in Placement. On that host, start the agent with the token.",
        (empty_lists.JOIN_COMMAND, "CYBORG_JOIN_TOKEN=… cyborg-agent"),
        (
            _link_to_add_page(request, JoinToken, "Make a join token")
            or ("Join tokens", reverse("admin:agents_jointoken_changelist")),
            ("The manual: join a host", empty_lists.find_address(empty_lists.JOIN_IN_MANUAL, request)),
        ),
        _explain_add_refusal(request, JoinToken),
    )


def _build_admit_step(request: HttpRequest, facts: SystemFacts) -> FirstStep:
    """Return the step that is done when a device has been admitted."""
    return FirstStep(
        "Admit a device",
        facts.has_admitted_devices,
        "A device that was found is inactive. It is offered after somebody has enabled it on its page, or after an"
        " admission rule has made it ready.",
        ("openstack accelerator device enable UUID",),
        (
            ("Inactive devices", alerts.list_url("device", state__exact=DeviceState.INACTIVE.value)),
            ("Admission rules", alerts.list_url("admissionrule")),
        ),
        permissions.explain_denial(request, permissions.UPDATE_DEVICE),
    )


def _build_profile_step(request: HttpRequest, facts: SystemFacts) -> FirstStep:
    """Return the step that is done when a device profile exists."""
    return FirstStep(
        "Make a device profile",
        facts.has_profiles,
        "A device profile says which accelerators an instance gets. A flavor names the profile.",
        (
            PROFILE_COMMAND.format(facts.resource_class or "PGPU"),
            "openstack flavor set FLAVOR --property accel:device_profile=NAME",
        ),
        (
            _link_to_add_page(request, DeviceProfile, "Add a device profile")
            or ("Device profiles", alerts.list_url("deviceprofile")),
        ),
        permissions.explain_denial(request, permissions.CREATE_PROFILE),
    )


def _build_cloud_step() -> FirstStep:
    """Return the step that is done when the product logs in to a cloud."""
    return FirstStep(
        "Connect the cloud",
        jobs.has_handler("provider"),
        "With a service user, Placement learns which devices are offered, and Nova learns about every bind. Set the"
        " variable on the conductor and restart it. Without a cloud, devices can be inspected, but not given to"
        " instances.",
        ("CYBORG_CLOUD=NAME-IN-CLOUDS-YAML",),
        (
            ("The manual: with OpenStack", f"{reverse('help')}{empty_lists.CLOUD_IN_MANUAL.manual}"),
            ("Placement", reverse("admin:placement_sync_tree_changelist")),
        ),
        "",
    )


def _link_to_add_page(request: HttpRequest, model: Any, text: str) -> tuple[str, str] | None:
    """Return a link to the page that adds a row of the model; None if the user may not add one there."""
    if not admin.site.get_model_admin(model).has_add_permission(request):
        return None
    return text, reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_add")


def _explain_add_refusal(request: HttpRequest, model: Any) -> str:
    """Return why this user may not add rows of the model; '' if the user may, or if nobody can in the console."""
    listing: Any = admin.site.get_model_admin(model)
    return listing.explain_refusal(request, "add") if listing.get_rights("add") else ""
