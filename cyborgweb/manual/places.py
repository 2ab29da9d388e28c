"""The part of the manual that describes each page of the console."""

from __future__ import annotations

from django.http import HttpRequest

DEFAULT_PLACE = "index.md"
PLACE_BY_URL_NAME = {
    "index": "first-day.md#find-your-way",
    "find": "first-day.md#see-who-holds-what",
    "accelerators_host": "first-day.md#look-at-what-was-found",
    "accelerators_device": "first-day.md#admit-devices",
    "accelerators_deployable": "words.md#hardware",
    "accelerators_hostdriver": "first-day.md#drivers",
    "accelerators_attachhandle": "words.md#hardware",
    "accelerators_admissionrule": "first-day.md#admit-devices",
    "accelerators_acceleratorrequest": "first-day.md#see-who-holds-what",
    "accelerators_attachment": "first-day.md#attach-a-device-to-a-running-instance",
    "accelerators_deviceprofile": "first-day.md#offer-devices-to-tenants",
    "accelerators_bulk": "first-day.md#admit-devices",
    "accelerators_bulkitem": "first-day.md#admit-devices",
    "accelerators_rollout": "first-day.md#drivers",
    "accelerators_command": "first-day.md#program-and-partition",
    "accelerators_event": "audit.md#how-changes-to-events-are-detected",
    "accelerators_intent": "words.md#record",
    "placement_sync_tree": "first-day.md#offer-devices-to-tenants",
    "placement_sync_discrepancy": "troubleshooting.md#a-bind-or-a-command-does-not-end-well",
    "placement_sync_novaendpoint": "troubleshooting.md#nova-answers-404-for-every-instance",
    "placement_sync_writer": "architecture.md#what-placement-and-nova-are-told",
    "agents_agent": "troubleshooting.md#an-agent-does-not-connect",
    "agents_jointoken": "first-day.md#join-a-host",
    "cyborgweb_apitoken": "cli.md#logging-in",
    "cyborgweb_subscription": "notifications.md#kinds-of-messages",
    "cyborgweb_delivery": "notifications.md#webhooks",
    "inbox": "notifications.md#inbox",
    "cyborgweb_maintenance": "roles.md#read-only",
    "usage": "usage.md#usage",
    "census": "usage.md#load-census",
    "auth_user": "roles.md#who-sees-and-does-what",
    "auth_group": "roles.md#who-sees-and-does-what",
    "password_change": "install.md#start-it",
}
"""URL name, or the beginning of URL names → the part of the manual below docs/."""


def find_manual_place(request: HttpRequest) -> str:
    """Return the part of the manual that describes the requested page (such as `first-day.md#admit-devices`);
    DEFAULT_PLACE if none does.
    """
    resolver_match = request.resolver_match
    name = str(resolver_match.url_name) if resolver_match else ""
    while name and name not in PLACE_BY_URL_NAME:
        name = name.rpartition("_")[0]
    return PLACE_BY_URL_NAME.get(name, DEFAULT_PLACE)
