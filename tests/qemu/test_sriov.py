"""Tests of virtual functions on a real kernel: install, holders, partitions, a reboot, and uninstall.

The tests run in this order, because each starts with the disk as the one before left it.
"""

from __future__ import annotations

import urllib.error

import pytest

from tests.qemu.conftest import DISK, HOST, START_S, GuestLab

pytestmark = pytest.mark.qemu


def vf_addresses(count: int) -> set[str]:
    """Return the PCI addresses of the first `count` virtual functions."""
    return {f"0000:01:00.{number}" for number in range(1, count + 1)}


def vfs_bound_to_vfio(count: int) -> dict[str, str]:
    """Return `count` virtual functions with the driver that they have when they are offered."""
    return dict.fromkeys(sorted(vf_addresses(count)), "vfio-pci")


def test_an_enabled_disk_is_offered_as_its_virtual_functions(lab: GuestLab) -> None:
    disk = lab.wait_for_device(DISK, state="inactive")
    assert len(disk["to_install"]) > 1 and lab.offered_handles() == {} and lab.virtual_functions() == {}
    assert lab.ask(f"devices/{disk['uuid']}/enable/", reason="for guests")["state"] == "installing"
    lab.wait_for_device(DISK, state="ready", to_install=[])
    assert lab.virtual_functions() == vfs_bound_to_vfio(2)
    assert lab.offered_handles().keys() == vf_addresses(2)


def test_a_partition_is_refused_while_a_guest_has_a_virtual_function_open(lab: GuestLab) -> None:
    disk = lab.wait_for_device(DISK, state="ready")["uuid"]
    group = lab.guest.run("basename $(readlink /sys/bus/pci/devices/0000:01:00.2/iommu_group)")
    opened = f"sh -c 'exec 3<>/dev/vfio/{group} && exec sleep 600' >/dev/null 2>&1 & echo $!"
    holder = lab.guest.run(opened)
    refused = lab.run_command("partition", device=disk, layout={"vfs": "3"})
    assert refused["state"] == "refused" and f"/dev/vfio/{group} is open" in refused["text"]
    assert lab.virtual_functions() == vfs_bound_to_vfio(2)
    lab.guest.run(f"kill {holder}")
    done = lab.run_command("partition", device=disk, layout={"vfs": "3"})
    assert done["state"] == "succeeded", done
    assert lab.virtual_functions() == vfs_bound_to_vfio(3) and lab.offered_handles().keys() == vf_addresses(3)
    assert lab.wait_for_device(DISK)["state"] == "ready"


def test_a_partition_is_refused_while_a_request_holds_a_virtual_function(lab: GuestLab) -> None:
    disk = lab.wait_for_device(DISK, state="ready", backend="disks")["uuid"]
    [backend] = lab.ask(f"backends/?host={HOST}")["results"]
    found = {service["name"]: (service["state"], service["limits"]) for service in backend["services"]}
    assert found["sriov"] == ("ready", {"total_vfs": "4"}) and found["passthrough"] == ("ready", {})
    request = lab.bind_function(disk)
    with pytest.raises(urllib.error.HTTPError) as caught:
        lab.run_command("partition", device=disk, layout={"vfs": "2"})
    assert caught.value.code == 409 and request["uuid"] in (told := caught.value.read().decode()), told
    assert lab.virtual_functions() == vfs_bound_to_vfio(3)
    lab.release(request)
    lab.product.until(lambda: not lab.describe_releases(disk), 30, "the host has not confirmed that it is unused")
    done = lab.run_command("partition", device=disk, layout={"vfs": "2"})
    assert done["state"] == "succeeded", done
    assert lab.virtual_functions() == vfs_bound_to_vfio(2) and lab.offered_handles().keys() == vf_addresses(2)


def test_S1_a_released_function_is_given_again_only_when_its_guest_has_closed_it(lab: GuestLab) -> None:
    disk = lab.wait_for_device(DISK, state="ready")["uuid"]
    request = lab.bind_function(disk)
    address = "{domain}:{bus}:{device}.{function}".format(**request["attach_handle_info"])
    group = lab.guest.run(f"basename $(readlink /sys/bus/pci/devices/{address}/iommu_group)")
    holder = lab.guest.run(f"sh -c 'exec 3<>/dev/vfio/{group} && exec sleep 600' >/dev/null 2>&1 & echo $!")
    lab.release(request)
    told = f"a guest still uses {address}"
    lab.product.until(lambda: told in "".join(lab.describe_releases(disk)), 30, "the host has not answered")
    other = lab.bind_function(disk)
    assert other["attach_handle_uuid"] != request["attach_handle_uuid"]
    lab.guest.run(f"kill {holder}")
    lab.release(other)
    lab.product.until(lambda: not lab.describe_releases(disk), 60, "the host has not confirmed that it is unused")


def test_virtual_functions_are_restored_after_a_reboot_before_the_device_is_reported(lab: GuestLab) -> None:
    before, offered = lab.wait_for_device(DISK, state="ready"), lab.offered_handles()
    [agent] = lab.ask(f"agents/?host={HOST}")["results"]
    lab.guest.power_cycle()
    assert lab.virtual_functions() == {}
    lab.start_agent()

    def connected() -> bool:
        lab.check_agent()
        [now] = lab.ask(f"agents/?host={HOST}")["results"]
        return now["boot_id"] != agent["boot_id"] and now["state"] == "up"

    lab.product.until(connected, START_S, "the agent is not back")
    looked = lab.run_command("rescan", host=before["host"]["uuid"])
    assert looked["state"] == "succeeded", looked
    assert lab.virtual_functions() == vfs_bound_to_vfio(2)
    assert lab.offered_handles() == offered, "its virtual functions were missing for a while"
    after = lab.wait_for_device(DISK)
    assert (after["uuid"], after["state"], after["state_since"]) == (before["uuid"], "ready", before["state_since"])


def test_an_uninstalled_disk_has_its_original_driver_and_no_virtual_functions(lab: GuestLab) -> None:
    disk = lab.wait_for_device(DISK, state="ready")["uuid"]
    lab.ask(f"devices/{disk}/disable/", reason="moving house")
    done = lab.run_command("uninstall", device=disk)
    assert done["state"] == "succeeded", done
    assert lab.virtual_functions() == {} and lab.offered_handles() == {}
    assert lab.wait_for_device(DISK, state="inactive")["kernel_driver"] == "nvme"
