"""Offer reported devices, bind requests to them, and answer the commands that the requests wait for, in tests."""

from __future__ import annotations

from uuid import uuid4

from django.contrib.postgres.functions import RandomUUID

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, Command, Deployable, Device, DeviceProfile
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.workflows import command_endings

NOVA = Caller("nova", "n", frozenset({"member"}), "p1", service=True)


def create_profiles(**properties_by_name: dict[str, str]) -> None:
    """Create device profiles that ask for one FPGA with these properties, unless profiles of these names exist."""
    with conductor.writing():
        for name, properties in properties_by_name.items():
            DeviceProfile.objects.get_or_create(name=name, defaults={"groups": [{"resources:FPGA": "1"} | properties]})


def offer_devices(provider: str = "") -> None:
    """Make all devices ready without their life cycle, and give all deployables this provider, or each its own."""
    with conductor.writing():
        Device.objects.update(state="ready")
        Deployable.objects.update(rp_uuid=provider or RandomUUID())


def bind_new_requests(
    profile: str, provider: str, instance: str = "", *, host: str = "cmp1"
) -> list[AcceleratorRequest]:
    """Create the requests of a profile and bind them to one instance, by default a new one; return them."""
    uuids, instance = binding.create_requests(profile, NOVA), instance or str(uuid4())
    binding.bind_requests([BindSpec(uuid, host, provider, instance) for uuid in uuids], NOVA)
    return list(AcceleratorRequest.objects.filter(uuid__in=uuids).order_by("id"))


def answer_commands(*commands: Command, outcome: str = "succeeded", text: str = "") -> None:
    """Answer the commands, all in the same way, and apply what their answers change."""
    command_queue.store_answers([CommandAnswer(one.host_id, one.id, outcome, text) for one in commands])
    command_endings.end_answered_commands()
