"""The areas that are mutated: for each the files, and the tests that belong to it whatever coverage says.

Coverage does not see code that runs in another process (drivers, the write worker, `cyborg-agent`), so these tests are
added to those that were seen to execute a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("accelerators", "agents", "cyborgweb", "drivers", "placement_sync")


@dataclass(frozen=True)
class Area:
    """One stratum of the sample."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = (
    Area(
        "binding",
        ("accelerators/binding.py", "accelerators/binding_sql.py", "accelerators/programming.py"),
        ("tests/api/test_requests.py", "tests/accelerators/test_bind_commands.py", "tests/api/test_program.py"),
    ),
    Area(
        "diff and merge",
        ("accelerators/diff.py", "accelerators/merge.py", "accelerators/inventory_sql.py", "accelerators/sweep.py"),
        ("tests/accelerators/test_diff.py", "tests/accelerators/test_apply.py", "tests/accelerators/test_sweep.py"),
    ),
    Area(
        "life cycle and admission",
        (
            "accelerators/actions.py",
            "accelerators/admission.py",
            "accelerators/lifecycle.py",
            "accelerators/rules.py",
            "accelerators/states.py",
        ),
        ("tests/accelerators/test_lifecycle.py", "tests/accelerators/test_admission.py", "tests/own/test_lifecycle.py"),
    ),
    Area(
        "groups",
        ("accelerators/groups.py", "accelerators/profiles.py", "accelerators/traits.py"),
        ("tests/accelerators/test_groups.py", "tests/api/test_profiles.py"),
    ),
    Area(
        "capacity",
        ("accelerators/candidates.py", "accelerators/units.py", "accelerators/usage.py"),
        ("tests/own/test_usage.py", "tests/own/test_units.py"),
    ),
    Area(
        "safety",
        ("accelerators/safety.py", "accelerators/conductor.py", "accelerators/intents.py"),
        ("tests/accelerators/test_lifecycle.py", "tests/placement/test_witness.py"),
    ),
    Area(
        "sealing and verification",
        ("accelerators/chain.py", "accelerators/proof.py", "accelerators/retention.py", "accelerators/sealing.py"),
        ("tests/accelerators/test_seals.py",),
    ),
    Area(
        "commands",
        ("accelerators/commands.py", "accelerators/commands_sql.py", "accelerators/outcomes.py"),
        ("tests/accelerators/test_commands.py", "tests/accelerators/test_command_races.py"),
    ),
    Area(
        "reconcile and allocations",
        (
            "placement_sync/claims.py",
            "placement_sync/client.py",
            "placement_sync/mapping.py",
            "placement_sync/reconcile.py",
            "placement_sync/sync.py",
        ),
        ("tests/placement/test_reconcile.py", "tests/placement/test_attaching.py", "tests/agents/host/test_direct.py"),
    ),
    Area(
        "holder checks",
        ("placement_sync/nova.py", "placement_sync/watcher.py", "placement_sync/witness.py"),
        ("tests/placement/test_witness.py", "tests/placement/test_watcher.py"),
    ),
    Area(
        "gateway and writer",
        ("agents/gateway.py", "agents/spool.py", "agents/holders.py", "agents/leases.py", "agents/admission.py"),
        ("tests/agents/test_gateway.py", "tests/agents/test_spool.py", "tests/agents/test_writer.py"),
    ),
    Area(
        "wire and credentials",
        ("agents/wire.py", "agents/credentials.py"),
        ("tests/agents/test_hostile.py", "tests/agents/test_transcripts.py", "tests/agents/test_gateway.py"),
    ),
    Area(
        "journal",
        ("agents/host/journal.py", "agents/host/ledger.py"),
        ("tests/agents/host/test_journal.py", "tests/agents/host/test_commands.py"),
    ),
    Area(
        "executor and plan steps",
        (
            "agents/host/executor.py",
            "agents/host/orders.py",
            "agents/host/perform.py",
            "agents/host/recovery.py",
            "drivers/steps.py",
            "drivers/hand.py",
            "drivers/touch.py",
        ),
        (
            "tests/agents/host/test_executor.py",
            "tests/agents/host/test_recovery.py",
            "tests/drivers/test_hand.py",
            "tests/agents/host/test_commands.py",
            "tests/drivers/test_steps.py",
        ),
    ),
    Area(
        "preflight",
        ("agents/host/fence.py",),
        ("tests/agents/host/test_fence.py",),
    ),
    Area(
        "ownership and host usage",
        ("drivers/claims.py", "drivers/inuse.py", "drivers/binding.py"),
        ("tests/drivers/test_claims.py", "tests/drivers/test_inuse.py", "tests/drivers/test_pci.py"),
    ),
    Area(
        "policy and roles",
        ("cyborgweb/policy.py", "cyborgweb/roles.py", "cyborgweb/rules.py"),
        ("tests/web/test_policy.py", "tests/web/test_roles.py", "tests/web/test_console_roles.py"),
    ),
    Area(
        "CLI outcomes",
        (
            "cyborgweb/cli/following.py",
            "cyborgweb/cli/outcomes.py",
            "cyborgweb/cli/problems.py",
            "cyborgweb/cli/connection.py",
        ),
        ("tests/web/test_cli.py", "tests/web/test_cli_work.py"),
    ),
)
