"""Test that the bitstream and the function trait of a device are forgotten when its program ends.

Then the next bind that needs them programs the device again.
"""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection
from msgspec import structs

from accelerators import conductor
from accelerators.audit.replay import BITSTREAM_SUFFIX
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.domain.diff import RESTORED_BOOT, HostReport
from accelerators.domain.traits import FUNCTION_TRAIT_KEY, FUNCTION_TRAIT_PREFIX
from accelerators.inventory import merge
from accelerators.models import AttachHandle, Attribute, Command, Deployable, Device, Event, Host, Intent
from accelerators.requests import binding
from accelerators.workflows import command_endings
from cyborgweb.server import after_restore
from drivers.inventory import Attribute as Fact
from drivers.inventory import DriverReport
from tests.accelerators.requests.test_bind_commands import (
    ADDER_IMAGE,
    IMAGE,
    NOVA,
    answer_command,
    begin_programming,
    create_and_bind,
    get_open_command,
    get_state_and_fault,
    handle,
    make_handles_pci,
)
from tests.support.reports import get_or_create_host, make_card, make_driver_report, make_report

__all__ = ["handle"]
pytestmark = pytest.mark.django_db
ACTS = "program reset uninstall"


def answer_programming(command: Command, **detail: str) -> None:
    """Answer a command with these details: it has succeeded."""
    answer = CommandAnswer(command.host_id, command.id, "succeeded", "loaded", detail)
    command_queue.store_answers([answer])
    while command_endings.end_answered_commands():
        pass


@pytest.fixture
def programmed(handle: AttachHandle, request: pytest.FixtureRequest) -> Device:
    """Return a free, ready card that a bind has programmed with IMAGE, in flash if the parameter is `flash`."""
    make_handles_pci()
    report("boot-1")
    (bound,), attach = begin_programming("bits")
    answer_programming(attach, lifetime=getattr(request, "param", "volatile"), boot_id="boot-1")
    assert get_state_and_fault(bound) == ("Bound", "")
    binding.delete_requests([str(bound.uuid)], NOVA)
    assert count_programmed() == (1, 1)
    with conductor.writing():
        Intent.objects.all().delete()
    return Device.objects.get()


def report(boot_id: str, *, driver: DriverReport | None = None) -> None:
    """Merge the next report of the host, made in this boot."""
    host = get_or_create_host()
    found = driver or make_driver_report(make_card(1, handles=3, acts=ACTS, status_reason=str(uuid4())))
    made: HostReport = make_report(found, seq=host.applied_seq + 1)
    assert merge.merge_reports({host.id: [structs.replace(made, boot_id=boot_id)]}) == 1


def count_programmed() -> tuple[int, int]:
    """Return how many deployables have a bitstream, and how many a function trait of the conductor's."""
    return (
        Deployable.objects.filter(bitstream_id=IMAGE).count(),
        Attribute.objects.filter(key=FUNCTION_TRAIT_KEY, origin="conductor").count(),
    )


def assert_next_bind_programs() -> None:
    """Check that the program is forgotten, that Placement is told, and that a bind of the same image programs again."""
    assert count_programmed() == (0, 0)
    assert Intent.objects.filter(kind="provider").exists()
    changes = Event.objects.filter(action__in=("device.unclear", "device.missing")).latest("id").changes
    assert changes["cmp1_0000:01:00.0" + BITSTREAM_SUFFIX] == [IMAGE, None]
    trait = Event.objects.filter(action="device.programmed").latest("id").changes["cmp1_0000:01:00.0 function"][1]
    assert trait and changes["cmp1_0000:01:00.0 function"] == [trait, None]
    (request,) = create_and_bind("bits")
    assert get_state_and_fault(request) == ("BindStarted", "")
    assert get_open_command("attach").arguments["wanted"] == {"bitstream_id": IMAGE}


def assert_next_bind_is_bound_at_once() -> None:
    assert count_programmed() == (1, 1)
    (request,) = create_and_bind("bits")
    assert get_state_and_fault(request) == ("Bound", "")


def order(op: str, device: Device) -> Command:
    """Order a command for the card, which is taken out of offer first if the command needs that."""
    if op == "uninstall":
        with conductor.writing():
            Device.objects.update(state="maintenance")
    return command_queue.order_device_command(op, device.uuid, NOVA)


def put_back_on_offer() -> None:
    with conductor.writing():
        Device.objects.update(state="ready")


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
@pytest.mark.parametrize("op", ["reset", "uninstall"])
def test_a_reset_or_uninstall_ends_a_volatile_program_and_the_next_bind_programs_again(
    programmed: Device, op: str, outcome: str
) -> None:
    answer_command(order(op, programmed), outcome, "as it went")
    put_back_on_offer()
    assert_next_bind_programs()


def test_a_refused_reset_ends_no_program(programmed: Device) -> None:
    answer_command(order("reset", programmed), "refused", "a guest uses it")
    assert_next_bind_is_bound_at_once()


def test_a_reboot_ends_a_volatile_program_and_the_next_bind_programs_again(programmed: Device) -> None:
    report("boot-1")
    assert count_programmed() == (1, 1)
    report("boot-2")
    assert Host.objects.get().boot_id == "boot-2"
    assert_next_bind_programs()


def test_a_reboot_after_which_the_driver_does_not_answer_ends_a_volatile_program_too(programmed: Device) -> None:
    report("boot-2", driver=make_driver_report(error="it hung for 20 s"))
    assert_next_bind_programs()


def test_a_card_that_was_missing_has_lost_its_volatile_program(programmed: Device) -> None:
    report("boot-1", driver=make_driver_report())
    assert Device.objects.get().state == "missing"
    report("boot-1")
    assert_next_bind_programs()


@pytest.mark.parametrize("programmed", ["flash"], indirect=True)
@pytest.mark.parametrize("end", ["reset", "uninstall", "reboot", "missing"])
def test_a_program_in_flash_survives_reset_uninstall_reboot_and_removal(programmed: Device, end: str) -> None:
    if end == "reboot":
        report("boot-2")
    elif end == "missing":
        report("boot-1", driver=make_driver_report())
        report("boot-1")
    else:
        answer_command(order(end, programmed))
        put_back_on_offer()
    assert_next_bind_is_bound_at_once()


@pytest.mark.parametrize("programmed", ["flash"], indirect=True)
def test_programming_that_fails_ends_a_program_in_flash_too(programmed: Device) -> None:
    command = command_queue.order_device_command("program", programmed.uuid, NOVA, image=uuid4())
    command_queue.mark_image_ready(command.id, ADDER_IMAGE)
    answer_command(command, "failed", "the upload broke off")
    assert count_programmed() == (0, 0)


@pytest.mark.parametrize("programmed", ["volatile", "flash"], indirect=True)
def test_after_a_restore_of_the_database_no_program_is_believed(programmed: Device) -> None:
    with connection.cursor() as cursor, conductor.writing():
        cursor.execute(after_restore.FORGET_BOOTS, [RESTORED_BOOT])
    assert Host.objects.get().applied_hash == "", "the next report is compared even if it is unchanged"
    report("boot-1")
    assert "the database was restored" in Event.objects.filter(action="device.unclear").latest("id").reason
    assert_next_bind_programs()


def test_an_agent_that_tells_no_boot_id_ends_no_program(programmed: Device) -> None:
    report("")
    assert (count_programmed(), Host.objects.get().boot_id) == ((1, 1), "boot-1"), "the release before tells none"


def test_the_function_that_the_driver_reports_is_believed_again_after_a_reboot(programmed: Device) -> None:
    plain = make_card(1, handles=3)
    trait = Fact("trait1", f"{FUNCTION_TRAIT_PREFIX}_TEST_FACTORY")
    deployable = structs.replace(plain.deployables[0], attributes=(*plain.deployables[0].attributes, trait))
    found = make_driver_report(structs.replace(plain, deployables=(deployable,)))
    report("boot-1", driver=found)
    assert not Attribute.objects.filter(value=trait.value).exists(), "what was programmed has precedence"
    report("boot-2", driver=found)
    assert Attribute.objects.filter(value=trait.value, origin="agent").count() == 1


def test_the_next_report_after_a_reset_is_compared_in_full_so_that_reported_functions_come_back(
    programmed: Device,
) -> None:
    answer_command(order("reset", programmed))
    assert Host.objects.get().applied_hash == ""


@pytest.mark.parametrize(("lifetime", "state"), [("volatile", "BindFailed"), ("flash", "Bound")])
def test_a_bind_fails_if_the_host_was_rebooted_after_the_card_was_programmed_for_it(
    handle: AttachHandle, lifetime: str, state: str
) -> None:
    (request,), attach = begin_programming("bits")
    report("boot-2")
    answer_programming(attach, lifetime=lifetime, boot_id="boot-1")
    assert get_state_and_fault(request)[0] == state
    assert count_programmed() == ((0, 0) if state == "BindFailed" else (1, 1))
