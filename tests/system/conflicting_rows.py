"""Store rows that the migrations of `accelerators` forbid, migrate, and check the result.

First those that `0004_one_function_one_request` forbids, then a conflict that `0005` let pass without a trace.

`test_upgrade` runs `python -m tests.system.conflicting_rows` over an empty embedded database.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from django.db import connection, transaction  # noqa: E402  (what follows needs Django's registry)
from django.db.migrations.executor import MigrationExecutor  # noqa: E402

from accelerators.devices import lifecycle  # noqa: E402
from accelerators.domain.caller import Caller  # noqa: E402
from accelerators.domain.device_actions import Action  # noqa: E402
from accelerators.domain.provider_ids import compute_provider_uuid  # noqa: E402
from accelerators.models import Device  # noqa: E402

INFO = '{"bus": "01", "device": "00", "domain": "0000", "function": "0"}'
MODELS = ("host", "deviceprofile", "device", "deployable", "attachhandle", "acceleratorrequest")
BEFORE = ("accelerators", "0001_initial")
BEFORE_CORRECTIONS = ("accelerators", "0005_index_hosts_without_applied_report")


def store_conflicts(models: Any) -> None:
    """Store two hosts with one node and one provider, and two requests for one function of the first host."""
    made = {name: models.get_model("accelerators", name).objects for name in MODELS}
    old, new = (made["host"].create(name=name, node="n").pk for name in ("old", "new"))
    profile = made["deviceprofile"].create(name="p", groups=[{}]).pk
    keys = [(old, "serial:1", "ready"), (old, "pci:0000:01:00.0", "missing"), (new, "serial:2", "ready")]
    for host, key, state in keys:
        device = made["device"].create(
            host_id=host, key=key, driver="d", type="GPU", address="0000:01:00.0", state=state
        )
        part = made["deployable"].create(
            device_id=device.pk,
            name="n_0000:01:00.0",
            num_accelerators=1,
            rp_uuid=compute_provider_uuid("n_0000:01:00.0"),
        )
        handle = made["attachhandle"].create(deployable_id=part.pk, attach_type="PCI", attach_info=INFO)
        request = {"profile_id": profile, "deployable_id": part.pk, "attach_handle_id": handle.pk}
        made["acceleratorrequest"].create(project_id="p", group={}, state="Bound", instance_uuid=uuid4(), **request)


def store_card_and_function(models: Any) -> None:
    """Store two requests that hold a card and its virtual function, which becomes known as one afterwards."""
    made = {name: models.get_model("accelerators", name).objects for name in MODELS}
    host = made["host"].create(name="third", node="third").pk
    profile = made["deviceprofile"].create(name="p2", groups=[{}]).pk
    for bus in ("02", "03"):
        device = made["device"].create(
            host_id=host, key=f"pci:{bus}", driver="d", type="GPU", address=f"0000:{bus}:00.0", state="ready"
        )
        part = made["deployable"].create(device_id=device.pk, name=f"third_{bus}", num_accelerators=1)
        info = INFO.replace('"01"', f'"{bus}"')
        handle = made["attachhandle"].create(deployable_id=part.pk, attach_type="PCI", attach_info=info)
        request = {"profile_id": profile, "deployable_id": part.pk, "attach_handle_id": handle.pk}
        made["acceleratorrequest"].create(project_id="p", group={}, state="Bound", instance_uuid=uuid4(), **request)
    made["device"].filter(pk=device.pk).update(physical_function="0000:02:00.0")


def check_card_and_function() -> None:
    """Check that the migration has quarantined both devices, and remove them."""
    devices = fetch(
        "SELECT d.id, state FROM accelerators_device d JOIN accelerators_host h ON h.id = host_id"
        " WHERE h.name = 'third' ORDER BY d.id"
    )
    assert [state for _, state in devices] == ["quarantined"] * 2, devices
    claims = fetch(
        "SELECT claim_is_partial, claim IS NULL FROM accelerators_acceleratorrequest ORDER BY id DESC LIMIT 2"
    )
    assert claims == [(True, False), (False, False)], claims
    ((events,),) = fetch(
        "SELECT count(*) FROM accelerators_event WHERE host = 'third' AND action = 'device.quarantined'"
    )
    assert events == 2
    for statement in (
        "DELETE FROM accelerators_acceleratorrequest WHERE deployable_id IN"
        " (SELECT id FROM accelerators_deployable WHERE name LIKE 'third%') RETURNING id",
        "DELETE FROM accelerators_attachhandle WHERE deployable_id IN"
        " (SELECT id FROM accelerators_deployable WHERE name LIKE 'third%') RETURNING id",
        "DELETE FROM accelerators_deployable WHERE name LIKE 'third%' RETURNING id",
        f"DELETE FROM accelerators_device WHERE id IN ({devices[0][0]}, {devices[1][0]}) RETURNING id",
        "DELETE FROM accelerators_providerowner WHERE host_id = (SELECT id FROM accelerators_host WHERE name = 'third')"
        " RETURNING host_id",
        "DELETE FROM accelerators_host WHERE name = 'third' RETURNING id",
    ):
        fetch(statement)


def fetch(query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    with connection.cursor() as cursor:
        cursor.execute(query)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def main() -> None:
    """Store, migrate and check. It ends with a traceback if the result is wrong."""
    executor = MigrationExecutor(connection)
    with transaction.atomic():
        store_conflicts(executor.migrate([BEFORE]).apps)
    executor = MigrationExecutor(connection)
    executor.migrate([BEFORE_CORRECTIONS])
    with transaction.atomic():
        store_card_and_function(executor.loader.project_state([BEFORE_CORRECTIONS]).apps)
    executor = MigrationExecutor(connection)
    executor.migrate(executor.loader.graph.leaf_nodes())
    check_card_and_function()
    (old, new) = fetch("SELECT id, node FROM accelerators_host ORDER BY id")
    assert old[1] == "n" and new[1] == f"n~{new[0]}"
    devices = fetch("SELECT key, state, returns_to FROM accelerators_device ORDER BY id")
    assert devices == [
        ("serial:1", "quarantined", None),
        ("pci:0000:01:00.0", "missing", "quarantined"),
        ("serial:2", "quarantined", None),
    ], devices
    servers = [
        str(server) for (server,) in fetch("SELECT instance_uuid FROM accelerators_acceleratorrequest ORDER BY id")
    ]
    ((reason,), *_) = fetch("SELECT state_reason FROM accelerators_device ORDER BY id")
    assert f"servers {servers[0]}, {servers[1]} hold one function: find out on the host" in reason, reason
    assert f"(if no guest has it, server {servers[1]}), then release and enable" in reason, reason
    claims = fetch("SELECT claim IS NULL FROM accelerators_acceleratorrequest ORDER BY id")
    assert claims == [(False,), (True,), (False,)], claims
    providers = fetch("SELECT rp_uuid IS NULL FROM accelerators_deployable ORDER BY id")
    assert providers == [(False,), (False,), (True,)], providers
    assert fetch("SELECT host_id FROM accelerators_providerowner") == [(old[0],)]
    events = fetch(
        "SELECT action, subject_name FROM accelerators_event WHERE actor = 'upgrade' AND host <> 'third' ORDER BY id"
    )
    assert [action for action, _ in events] == ["device.quarantined"] * 3 + ["host.changed"], events
    fetch(
        "DELETE FROM accelerators_acceleratorrequest WHERE id = (SELECT min(id) FROM accelerators_acceleratorrequest)"
        " RETURNING id"
    )
    claims = fetch("SELECT claim IS NULL FROM accelerators_acceleratorrequest ORDER BY id")
    assert claims == [(False,), (False,)], claims
    release_devices()


def release_devices() -> None:
    """Release the quarantined devices as an operator would, then enable them."""
    admin = Caller("admin", "u", frozenset({"admin"}), "p1")
    uuids = list(Device.objects.filter(state="quarantined").values_list("uuid", flat=True))
    for act in (Action.RELEASE, Action.ENABLE):
        results = lifecycle.apply_action(act, uuids, admin)
        assert [result.outcome for result in results] == ["moved"] * 2, results
    providers = fetch("SELECT rp_uuid IS NULL FROM accelerators_deployable ORDER BY id")
    assert providers == [(False,), (False,), (True,)], providers


if __name__ == "__main__":
    main()
