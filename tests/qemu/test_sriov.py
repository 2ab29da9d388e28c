"""A disk becomes virtual functions, by the real kernel: made, used, held, made anew, back after a reboot, undone."""

from __future__ import annotations

import urllib.error
import uuid

import pytest

from tests.qemu.conftest import DISK, HOST, START_S, Lab

pytestmark = pytest.mark.qemu


def parts(count: int) -> set[str]:
    """The addresses of so many virtual functions."""
    return {f"0000:01:00.{number}" for number in range(1, count + 1)}


def vfio(count: int) -> dict[str, str]:
    """So many virtual functions as the kernel has them when they are offered."""
    return dict.fromkeys(sorted(parts(count)), "vfio-pci")


def test_an_enabled_disk_is_offered_as_its_virtual_functions(lab: Lab) -> None:
    disk = lab.until(DISK, state="inactive")
    assert len(disk["to_install"]) > 1 and lab.offered() == {} and lab.functions() == {}
    assert lab.ask(f"devices/{disk['uuid']}/enable/", reason="for guests")["state"] == "installing"
    lab.until(DISK, state="ready", to_install=[])
    assert lab.functions() == vfio(2)
    assert lab.offered().keys() == parts(2)


def test_functions_that_a_guest_has_open_are_not_taken_from_it(lab: Lab) -> None:
    disk = lab.until(DISK, state="ready")["uuid"]
    group = lab.guest.run("basename $(readlink /sys/bus/pci/devices/0000:01:00.2/iommu_group)")
    opened = f"sh -c 'exec 3<>/dev/vfio/{group} && exec sleep 600' >/dev/null 2>&1 & echo $!"
    holder = lab.guest.run(opened)
    refused = lab.order("partition", device=disk, layout={"vfs": "3"})
    assert refused["state"] == "refused" and f"/dev/vfio/{group} is open" in refused["text"]
    assert lab.functions() == vfio(2)
    lab.guest.run(f"kill {holder}")
    done = lab.order("partition", device=disk, layout={"vfs": "3"})
    assert done["state"] == "succeeded", done
    assert lab.functions() == vfio(3) and lab.offered().keys() == parts(3)
    assert lab.until(DISK)["state"] == "ready"


def test_functions_that_a_request_holds_are_not_taken_from_it(lab: Lab) -> None:
    disk = lab.until(DISK, state="ready", backend="disks")["uuid"]
    [backend] = lab.ask(f"backends/?host={HOST}")["results"]
    found = {service["name"]: (service["state"], service["limits"]) for service in backend["services"]}
    assert found["sriov"] == ("ready", {"total_vfs": "4"}) and found["passthrough"] == ("ready", {})
    instance = str(uuid.uuid4())
    lab.ask("profiles/", name="disk", groups=[{"resources:CUSTOM_PCI": "1"}])
    [request] = lab.call("POST", "/v2/accelerator_requests", {"device_profile_name": "disk"})["arqs"]
    [part] = lab.ask(f"deployables/?device={disk}")["results"]
    values = {"hostname": HOST, "device_rp_uuid": part["rp_uuid"], "instance_uuid": instance}
    patch = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]
    lab.call("PATCH", "/v2/accelerator_requests", {request["uuid"]: patch})
    assert lab.call("GET", f"/v2/accelerator_requests/{request['uuid']}")["state"] == "Bound"
    with pytest.raises(urllib.error.HTTPError) as caught:
        lab.order("partition", device=disk, layout={"vfs": "2"})
    assert caught.value.code == 409 and request["uuid"] in (told := caught.value.read().decode()), told
    assert lab.functions() == vfio(3)
    lab.call("DELETE", f"/v2/accelerator_requests?instance={instance}")
    done = lab.order("partition", device=disk, layout={"vfs": "2"})
    assert done["state"] == "succeeded", done
    assert lab.functions() == vfio(2) and lab.offered().keys() == parts(2)


def test_after_a_reboot_they_are_put_back_before_the_device_is_reported(lab: Lab) -> None:
    before, offered = lab.until(DISK, state="ready"), lab.offered()
    [agent] = lab.ask(f"agents/?host={HOST}")["results"]
    lab.guest.cycle()
    assert lab.functions() == {}
    lab.start_agent()

    def connected() -> bool:
        lab.check_agent()
        [now] = lab.ask(f"agents/?host={HOST}")["results"]
        return now["boot_id"] != agent["boot_id"] and now["state"] == "up"

    lab.product.until(connected, START_S, "the agent is not back")
    looked = lab.order("rescan", host=before["host"]["uuid"])
    assert looked["state"] == "succeeded", looked
    assert lab.functions() == vfio(2)
    assert lab.offered() == offered, "its virtual functions were missing for a while"
    after = lab.until(DISK)
    assert (after["uuid"], after["state"], after["state_since"]) == (before["uuid"], "ready", before["state_since"])


def test_an_uninstalled_disk_is_as_it_was(lab: Lab) -> None:
    disk = lab.until(DISK, state="ready")["uuid"]
    lab.ask(f"devices/{disk}/disable/", reason="moving house")
    done = lab.order("uninstall", device=disk)
    assert done["state"] == "succeeded", done
    assert lab.functions() == {} and lab.offered() == {}
    assert lab.until(DISK, state="inactive")["kernel_driver"] == "nvme"
