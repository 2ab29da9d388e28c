"""The console's sidebar, which unfold builds for every page.

Lists that the user may not view are left out, except those of messages: every user has an inbox and subscriptions.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import reverse

SIDEBAR_GROUPS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Inventory",
        (
            ("Hosts", "dns", "accelerators.host"),
            ("Devices", "memory", "accelerators.device"),
            ("Deployables", "widgets", "accelerators.deployable"),
            ("Drivers", "extension", "accelerators.hostdriver"),
            ("Backends", "lan", "accelerators.backend"),
            ("Services", "handyman", "accelerators.service"),
            ("Attach handles", "cable", "accelerators.attachhandle"),
            ("Admission rules", "rule", "accelerators.admissionrule"),
        ),
    ),
    (
        "Demand",
        (
            ("Requests", "assignment", "accelerators.acceleratorrequest"),
            ("Attachments", "attach_file", "accelerators.attachment"),
            ("Device profiles", "tune", "accelerators.deviceprofile"),
        ),
    ),
    (
        "Record",
        (
            ("Bulk actions", "checklist", "accelerators.bulk"),
            ("Rollouts", "rocket_launch", "accelerators.rollout"),
            ("Commands", "terminal", "accelerators.command"),
            ("Events", "history", "accelerators.event"),
            ("Intents", "outbox", "accelerators.intent"),
        ),
    ),
    (
        "OpenStack",
        (
            ("Placement", "account_tree", "placement_sync.tree"),
            ("Discrepancies", "difference", "placement_sync.discrepancy"),
            ("Writer", "edit_note", "placement_sync.writer"),
            ("Nova", "verified", "placement_sync.novaendpoint"),
        ),
    ),
    (
        "Access",
        (
            ("Agents", "sensors", "agents.agent"),
            ("Join tokens", "vpn_key", "agents.jointoken"),
            ("API tokens", "key", "cyborgweb.apitoken"),
            ("Users", "person", "auth.user"),
            ("Groups", "group", "auth.group"),
            ("Maintenance", "build", "cyborgweb.maintenance"),
        ),
    ),
)
"""Heading and entries; each entry is its title, its icon, and the model it lists."""
PAGES_WITHOUT_MODEL = (("Usage", "monitoring", "usage"), ("Load census", "troubleshoot", "census"))
"""Pages that list no model: title, icon, URL name. They are for users who may view devices."""


def build_sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the sidebar for this user in the form that unfold's SIDEBAR setting expects."""
    overview = {"title": "Overview", "icon": "dashboard", "link": reverse("admin:index")}
    sidebar: list[dict[str, Any]] = [{"items": [overview]}]
    if _can_view(request, "accelerators.device"):
        sidebar[0]["items"] += [
            {"title": word, "icon": icon, "link": reverse(name)} for word, icon, name in PAGES_WITHOUT_MODEL
        ]
    for title, entries in SIDEBAR_GROUPS:
        if items := [_build_item(*entry) for entry in entries if _can_view(request, entry[2])]:
            sidebar.append({"title": title, "items": items})
    message_pages = (
        ("Inbox", "inbox", "inbox"),
        ("Subscriptions", "notifications", "admin:cyborgweb_subscription_changelist"),
        ("Deliveries", "outbox", "admin:cyborgweb_delivery_changelist"),
    )
    messages = [{"title": title, "icon": icon, "link": reverse(name)} for title, icon, name in message_pages]
    sidebar.append({"title": "Messages", "items": messages})
    sidebar.append({"items": [{"title": "Manual", "icon": "help", "link": reverse("help")}]})
    return sidebar


def sidebar_title(link: str) -> str:
    """Return the sidebar's title for the list at this address, '' if the sidebar does not have it."""
    title_by_link: dict[str, str] = {
        item["link"]: item["title"]
        for _, entries in SIDEBAR_GROUPS
        for item in (_build_item(*entry) for entry in entries)
    }
    return title_by_link.get(link, "")


def _build_item(title: str, icon: str, model: str) -> dict[str, Any]:
    """Return the sidebar's entry for the list of a model, such as `accelerators.device`."""
    return {"title": title, "icon": icon, "link": reverse(f"admin:{model.replace('.', '_')}_changelist")}


def _can_view(request: HttpRequest, model: str) -> bool:
    """Return whether the user has Django's view permission for a model, such as `accelerators.device`."""
    app, name = model.split(".")
    return bool(request.user.has_perm(f"{app}.view_{name}"))
