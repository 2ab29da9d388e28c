"""The console's sidebar. Unfold calls it for every page; lists that the user may not view are left out."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import reverse

GROUPS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Inventory",
        (
            ("Hosts", "dns", "accelerators.host"),
            ("Devices", "memory", "accelerators.device"),
            ("Deployables", "widgets", "accelerators.deployable"),
            ("Drivers", "extension", "accelerators.hostdriver"),
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
        ),
    ),
    (
        "Access",
        (
            ("Agents", "sensors", "agents.agent"),
            ("Join tokens", "vpn_key", "agents.jointoken"),
            ("API tokens", "key", "cyborgweb.apitoken"),
            ("Users", "group", "auth.user"),
            ("Maintenance", "build", "cyborgweb.maintenance"),
        ),
    ),
)
"""Heading and entries; each entry is its title, its icon, and the model it lists."""
PAGES = (("Usage", "monitoring", "usage"), ("Load census", "troubleshoot", "census"))
"""Pages that list no model, for users who may view devices: title, icon, URL name."""


def groups(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the sidebar for this user in the form that unfold's SIDEBAR setting expects."""
    overview = {"title": "Overview", "icon": "dashboard", "link": reverse("admin:index")}
    shown = [{"items": [overview]}]
    if _may_view(request, "accelerators.device"):
        shown[0]["items"] += [{"title": word, "icon": icon, "link": reverse(name)} for word, icon, name in PAGES]
    for title, entries in GROUPS:
        if items := [_item(*entry) for entry in entries if _may_view(request, entry[2])]:
            shown.append({"title": title, "items": items})
    own = ("Inbox", "inbox", "inbox"), ("Subscriptions", "notifications", "admin:cyborgweb_subscription_changelist")
    own += (("Deliveries", "outbox", "admin:cyborgweb_delivery_changelist"),)
    messages = [{"title": title, "icon": icon, "link": reverse(name)} for title, icon, name in own]
    shown.append({"title": "Messages", "items": messages})
    shown.append({"items": [{"title": "Manual", "icon": "help", "link": reverse("help")}]})
    return shown


def word_of(link: str) -> str:
    """Return the sidebar's title for the list at this address, '' if the sidebar does not have it."""
    words = {item["link"]: item["title"] for _, entries in GROUPS for item in (_item(*entry) for entry in entries)}
    return words.get(link, "")


def _item(title: str, icon: str, model: str) -> dict[str, Any]:
    return {"title": title, "icon": icon, "link": reverse(f"admin:{model.replace('.', '_')}_changelist")}


def _may_view(request: HttpRequest, model: str) -> bool:
    app, name = model.split(".")
    return bool(request.user.has_perm(f"{app}.view_{name}"))
