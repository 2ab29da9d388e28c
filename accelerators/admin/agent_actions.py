"""Order commands from agents with the buttons on the pages of devices and hosts.

Every order is a POST. A destructive command on a device asks for confirmation, and says who holds the device.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse

from accelerators import safety
from accelerators.admin import device_actions
from accelerators.commands import catalogue, placing
from accelerators.commands.catalogue import Act
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import Source
from accelerators.models import Command, Device, Host, Image
from accelerators.ui import badges, permissions

KEPT = ("op", "layout", "image", "deployable", "driver")
IMAGES = 50
DONE = {"uninstall": "uninstalled", "program": "programmed", "partition": "partitioned", "reset": "reset"}


def possible(request: HttpRequest, device: Device, held: int) -> list[Act]:
    """Return the commands that this user can order for a device now; none if the user may not order commands.

    `held` is the number of our requests that hold the device.
    """
    if not permissions.may(request, permissions.ORDER):
        return []
    return list(catalogue.possible(device, held))


def images(offered: list[Act]) -> QuerySet[Image] | None:
    """Return the IMAGES newest stored images to choose from; None if no offered command takes an image.

    Other images, such as those in Glance, can be named by their uuid.
    """
    wanted = any(act.takes == "image" for act in offered)
    return Image.objects.order_by("-id")[:IMAGES] if wanted else None


def post(admin: Any, request: HttpRequest, about: Device | Host) -> HttpResponse:
    """Handle the POST of a button: place the command and redirect to its page.

    A dangerous command on a device first answers with a confirmation page. If the command is refused, redirects to the
    page of the device or host with the reason as a message. Raises PermissionDenied for users who may not order it, and
    for commands that do not exist there.
    """
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    act = catalogue.ACTS.get(request.POST.get("op", ""))
    of = "device" if isinstance(about, Device) else "host"
    if act is None or act.of != of:
        raise PermissionDenied("This page has no such button. Go back and try again.")
    permissions.require(request, permissions.RESCAN if act.op == "rescan" else permissions.ORDER)
    page = badges.page(of, about.pk)
    try:
        said = _said(request, act)
        if isinstance(about, Device) and act.danger and "sure" not in request.POST:
            return _ask(admin, request, act, about)
        command = _order(request, act, about, said)
    except RefusedError as refused:
        messages.error(request, refused.text)
        return HttpResponseRedirect(page)
    return HttpResponseRedirect(badges.page("command", command.pk))


def _said(request: HttpRequest, act: Act) -> dict[str, Any]:
    """Return the arguments of a command from the form's fields. Raises RefusedError INVALID."""
    text = request.POST.get(act.takes, "").strip() if act.takes else ""
    part = request.POST.get("deployable", "")
    match act.takes:
        case "layout":
            return {"layout": catalogue.layout(text.split())}
        case "image":
            try:
                return {"image": UUID(text), "deployable": UUID(part) if part else None}
            except ValueError:
                raise RefusedError(
                    Reason.INVALID, "Enter the uuid of an image that is stored here or in Glance."
                ) from None
        case "driver":
            return {"driver": text}
    return {}


def _order(request: HttpRequest, act: Act, about: Device | Host, said: dict[str, Any]) -> Command:
    ask = placing.ask if isinstance(about, Device) else placing.ask_host
    reason = request.POST.get("reason", "")
    return ask(act.op, about.uuid, device_actions.person(request), reason=reason, source=Source.PERSON, **said)


def _ask(admin: Any, request: HttpRequest, act: Act, device: Device) -> HttpResponse:
    """Show the confirmation page; if somebody holds the device, or that cannot be checked, it says so."""
    try:
        safety.refuse_unless_free(device, DONE[act.op])
        blocked = ""
    except RefusedError as refused:
        blocked = refused.text
    context = admin.admin_site.each_context(request) | {
        "title": f"{act.op.capitalize()} {device}?",
        "opts": admin.opts,
        "act": act,
        "device": device,
        "said": request.POST.get(act.takes, "") if act.takes else "",
        "blocked": blocked,
        "kept": [(name, request.POST[name]) for name in KEPT if request.POST.get(name)],
        "reason": request.POST.get("reason", ""),
        "longest": MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/order.html", context)
