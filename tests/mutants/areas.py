"""The areas that are mutated: the files of each, and the tests that belong to it.

Coverage does not see code that runs in another process (drivers, the write worker, `cyborg-agent`), so the tests of an
area are added to those that execute a line according to coverage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("accelerators", "agents", "cyborgweb", "drivers", "placement_sync")


@dataclass(frozen=True)
class Area:
    """One stratum of the sample: its files, and the test files that belong to it."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = (
    Area(
        "binding",
        (
            "accelerators/requests/binding.py",
            "accelerators/requests/binding_sql.py",
            "accelerators/commands/programming.py",
        ),
        (
            "tests/accelerators/api/v2/test_requests.py",
            "tests/accelerators/requests/test_bind_commands.py",
            "tests/accelerators/api/v2/test_program.py",
        ),
    ),
    Area(
        "diff and merge",
        (
            "accelerators/domain/diff.py",
            "accelerators/inventory/merge.py",
            "accelerators/inventory/merge_sql.py",
            "accelerators/workflows/retention_sweep.py",
        ),
        (
            "tests/accelerators/domain/test_diff.py",
            "tests/accelerators/inventory/test_merge.py",
            "tests/accelerators/workflows/test_sweep.py",
        ),
    ),
    Area(
        "life cycle and admission",
        (
            "accelerators/domain/device_actions.py",
            "accelerators/domain/admission.py",
            "accelerators/devices/lifecycle.py",
            "accelerators/devices/admission_rules.py",
            "accelerators/domain/states.py",
        ),
        (
            "tests/accelerators/devices/test_lifecycle.py",
            "tests/accelerators/devices/test_admission.py",
            "tests/accelerators/api/own/test_lifecycle.py",
        ),
    ),
    Area(
        "groups",
        ("accelerators/domain/groups.py", "accelerators/requests/profiles.py", "accelerators/domain/traits.py"),
        ("tests/accelerators/domain/test_groups.py", "tests/accelerators/api/v2/test_profiles.py"),
    ),
    Area(
        "capacity",
        (
            "accelerators/requests/candidates.py",
            "accelerators/devices/partitioning.py",
            "accelerators/requests/capacity.py",
        ),
        ("tests/accelerators/api/own/test_usage.py", "tests/accelerators/api/own/test_units.py"),
    ),
    Area(
        "safety",
        ("accelerators/safety.py", "accelerators/conductor.py", "accelerators/outbox.py"),
        ("tests/accelerators/devices/test_lifecycle.py", "tests/placement_sync/test_holder_checks.py"),
    ),
    Area(
        "sealing and verification",
        (
            "accelerators/domain/hash_chain.py",
            "accelerators/audit/verification.py",
            "accelerators/audit/retention.py",
            "accelerators/audit/sealing.py",
            "accelerators/audit/signing.py",
            "accelerators/audit/trust.py",
            "accelerators/audit/key_change.py",
        ),
        ("tests/accelerators/audit/test_seals.py", "tests/accelerators/audit/test_signed_seals.py"),
    ),
    Area(
        "commands",
        (
            "accelerators/commands/command_queue.py",
            "accelerators/commands/sql.py",
            "accelerators/workflows/command_endings.py",
        ),
        ("tests/accelerators/commands/test_commands.py", "tests/accelerators/commands/test_command_races.py"),
    ),
    Area(
        "reconcile and allocations",
        (
            "placement_sync/allocations.py",
            "placement_sync/client.py",
            "placement_sync/mapping.py",
            "placement_sync/reconcile.py",
            "placement_sync/apply_writes.py",
        ),
        (
            "tests/placement_sync/test_reconcile.py",
            "tests/placement_sync/test_attaching.py",
            "tests/agents/host/execution/test_agent_writer.py",
        ),
    ),
    Area(
        "holder checks",
        (
            "placement_sync/nova/client.py",
            "placement_sync/nova/deleted_instances.py",
            "placement_sync/nova/endpoints.py",
            "placement_sync/jobs/holder_checks.py",
        ),
        ("tests/placement_sync/test_holder_checks.py", "tests/placement_sync/test_deleted_instances.py"),
    ),
    Area(
        "gateway and writer",
        (
            "agents/gateway/asgi_app.py",
            "agents/gateway/writer.py",
            "agents/gateway/sessions.py",
            "agents/gateway/leases.py",
            "agents/gateway/throttling.py",
        ),
        (
            "tests/agents/gateway/test_gateway.py",
            "tests/agents/gateway/test_report_writer.py",
            "tests/agents/gateway/test_placement_writer.py",
        ),
    ),
    Area(
        "wire and credentials",
        ("agents/wire.py", "agents/credentials.py"),
        (
            "tests/agents/gateway/test_hostile.py",
            "tests/agents/wire/test_transcripts.py",
            "tests/agents/gateway/test_gateway.py",
        ),
    ),
    Area(
        "journal",
        ("agents/host/journal/journal.py", "agents/host/journal/command_log.py"),
        ("tests/agents/host/journal/test_journal.py", "tests/agents/host/execution/test_commands.py"),
    ),
    Area(
        "executor and plan steps",
        (
            "agents/host/execution/executor.py",
            "agents/host/execution/command_semantics.py",
            "agents/host/execution/plan_runner.py",
            "agents/host/execution/recovery.py",
            "drivers/plan.py",
            "drivers/isolation/host_writer.py",
            "drivers/isolation/write_worker.py",
        ),
        (
            "tests/agents/host/execution/test_executor.py",
            "tests/agents/host/execution/test_recovery.py",
            "tests/drivers/isolation/test_host_writer.py",
            "tests/agents/host/execution/test_commands.py",
            "tests/drivers/test_steps.py",
        ),
    ),
    Area(
        "preflight",
        ("agents/host/execution/preflight.py",),
        ("tests/agents/host/execution/test_preflight.py",),
    ),
    Area(
        "ownership and host usage",
        (
            "drivers/pci/ownership.py",
            "drivers/pci/host_usage.py",
            "drivers/pci/guest_usage.py",
            "drivers/pci/binding.py",
        ),
        (
            "tests/drivers/pci/test_ownership.py",
            "tests/drivers/pci/test_host_usage.py",
            "tests/drivers/pci/test_guest_usage.py",
            "tests/drivers/pci/test_pci.py",
        ),
    ),
    Area(
        "policy and roles",
        ("cyborgweb/auth/policy.py", "cyborgweb/auth/roles.py", "cyborgweb/auth/policy_rules.py"),
        (
            "tests/cyborgweb/auth/test_policy.py",
            "tests/cyborgweb/auth/test_roles.py",
            "tests/cyborgweb/auth/test_console_roles.py",
        ),
    ),
    Area(
        "CLI outcomes",
        (
            "cyborgweb/cli/following.py",
            "cyborgweb/cli/many_targets.py",
            "cyborgweb/cli/exit_codes.py",
            "cyborgweb/cli/connection.py",
        ),
        ("tests/cyborgweb/cli/test_cli.py", "tests/cyborgweb/cli/test_cli_work.py"),
    ),
)
