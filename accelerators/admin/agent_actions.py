"""Order commands from agents with the buttons on the pages of devices and hosts.

Every order is a POST. A destructive command on a device asks for confirmation, and says who holds the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse

from accelerators import safety
from accelerators.admin import device_actions
from accelerators.commands import catalogue, command_queue
from accelerators.commands.catalogue import OrderableCommand
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import Command, Device, Host, Image
from accelerators.ui import badges, permissions
from accelerators.ui.permissions import Right

KEPT_FIELDS = ("op", "layout", "image", "deployable", "driver")
MAX_IMAGES = 50
MAX_AFFECTED = 50
"""Maximum number of other affected devices that a confirmation page lists; the rest is counted."""


def get_right_to_order(op: str) -> Right:
    """Return the right that ordering this command needs."""
    return permissions.RESCAN if op == "rescan" else permissions.CREATE_COMMAND


def list_available_commands(request: HttpRequest, device: Device, held: int) -> list[OrderableCommand]:
    """Return the commands that this user can order for a device now; none if the user may not order commands.

    `held` is the number of our requests that hold the device. Placement, Nova and the agent's connection are not
    checked.
    """
    if not permissions.is_allowed(request, permissions.CREATE_COMMAND):
        return []
    return list(catalogue.list_possible_commands(device, held))


def select_images(offered_commands: list[OrderableCommand]) -> QuerySet[Image] | None:
    """Return the MAX_IMAGES newest stored images to choose from; None if no offered command takes an image.

    Other images, such as those in Glance, can be named by their uuid.
    """
    takes_image = any(act.takes == "image" for act in offered_commands)
    return Image.objects.order_by("-id")[:MAX_IMAGES] if takes_image else None


def handle_order(admin: Any, request: HttpRequest, target: Device | Host) -> HttpResponse:
    """Handle the POST of a button: place the command and redirect to its page.

    A destructive command on a device first answers with a confirmation page. If the command is refused, redirects to
    the page of the device or host with the reason as a message. Answers 405 to other methods than POST. Raises
    PermissionDenied for users who may not order the command (`rescan` has a policy rule of its own), and for a command
    that does not exist for this kind of target.
    """
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    act = catalogue.ORDERABLE_COMMANDS.get(request.POST.get("op", ""))
    target_type = "device" if isinstance(target, Device) else "host"
    if act is None or act.target != target_type:
        raise PermissionDenied("This page has no such button. Go back and try again.")
    permissions.require_permission(request, get_right_to_order(act.op))
    target_url = badges.page_url(target_type, target.pk)
    try:
        arguments = _parse_arguments(request, act)
        if isinstance(target, Device) and act.danger and "sure" not in request.POST:
            return _render_confirmation(admin, request, act, target, arguments)
        command = _place_command(request, act, target, arguments)
    except RefusedError as refused:
        messages.error(request, refused.text)
        return HttpResponseRedirect(target_url)
    return HttpResponseRedirect(badges.page_url("command", command.pk))


def _parse_arguments(request: HttpRequest, act: OrderableCommand) -> dict[str, Any]:
    """Return the arguments of a command from the form's fields; {} if the command takes none.

    Raises RefusedError INVALID for a layout that is empty or incomplete, or an image or deployable that is not a uuid.
    """
    text = request.POST.get(act.takes, "").strip() if act.takes else ""
    deployable = request.POST.get("deployable", "")
    match act.takes:
        case "layout":
            return {"layout": catalogue.parse_layout(text.split())}
        case "image":
            try:
                return {"image": UUID(text), "deployable": UUID(deployable) if deployable else None}
            except ValueError:
                raise RefusedError(
                    RefusalReason.INVALID, "Enter the uuid of an image that is stored here or in Glance."
                ) from None
        case "driver":
            return {"driver": text}
    return {}


def _place_command(
    request: HttpRequest, act: OrderableCommand, target: Device | Host, arguments: dict[str, Any]
) -> Command:
    """Place the command for the device or host and return its row. Raises RefusedError if it is not possible."""
    place = command_queue.order_device_command if isinstance(target, Device) else command_queue.order_host_command
    reason = request.POST.get("reason", "")
    return place(
        act.op, target.uuid, device_actions.get_caller(request), reason=reason, source=EventSource.PERSON, **arguments
    )


def _render_confirmation(
    admin: Any, request: HttpRequest, act: OrderableCommand, device: Device, arguments: Mapping[str, Any]
) -> HttpResponse:
    """Answer with the confirmation page of a destructive command; nothing is ordered or locked.

    The page lists the other devices of the host that the command affects, too. All holder checks are made, unless the
    command is refused anyway. If it is refused, because somebody holds one of these devices, a check cannot answer in
    time, or for another reason, the page shows the reason instead of the button.
    """
    affected = safety.find_affected_siblings(device, act.op)
    selected_parts = {name: arguments.get(name) for name in ("layout", "deployable")}
    try:
        answers = command_queue.ask_holders_if_possible(act.op, device.uuid, **selected_parts)
        holders = safety.find_holders([device, *affected], answers)
        holders.refuse_unless_all_free(command_queue.describe_acts(act.op, device, affected))
        refusal = ""
    except RefusedError as refused:
        refusal = refused.text
    context = admin.admin_site.each_context(request) | {
        "title": f"{act.op.capitalize()} {device}?",
        "opts": admin.opts,
        "act": act,
        "device": device,
        "argument": request.POST.get(act.takes, "") if act.takes else "",
        "blocked": refusal,
        "affected": affected[:MAX_AFFECTED],
        "affected_left": max(0, len(affected) - MAX_AFFECTED),
        "hidden_fields": [(name, request.POST[name]) for name in KEPT_FIELDS if request.POST.get(name)],
        "reason": request.POST.get("reason", ""),
        "max_reason_length": MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/admin/confirm_agent_action.html", context)
