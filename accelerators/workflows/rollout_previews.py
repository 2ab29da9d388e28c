"""Predict what a rollout that is a draft would do on each of its hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accelerators import safety
from accelerators.commands import command_queue
from accelerators.domain.states import DeviceOutcome
from accelerators.models import Device, DriverWish, Rollout
from accelerators.workflows import driver_config
from accelerators.workflows.driver_config import DriverChange


@dataclass(frozen=True)
class HostForecast:
    """The predicted outcome on one host: `moved` means that the driver is changed there.

    `generation` is that of the driver's desired state when the hosts were chosen; `held_count` is the number of the
    driver's devices there that requests hold. `is_foreseen` says that a refusal was foreseen when the draft was stored.
    """

    host: str
    outcome: DeviceOutcome
    text: str
    generation: int | None
    device_count: int
    held_count: int
    is_foreseen: bool


@dataclass(frozen=True)
class RolloutPreview:
    """A preview of a rollout: one forecast for each host, by name."""

    hosts: Sequence[HostForecast]

    @property
    def held_count(self) -> int:
        """Return the number of held devices of the driver on these hosts."""
        return sum(one.held_count for one in self.hosts)

    @property
    def needs_confirmation(self) -> bool:
        """Return whether a person must confirm it separately: it reaches several hosts."""
        return len(self.hosts) > 1

    def count_hosts(self, outcome: DeviceOutcome) -> int:
        """Return the number of hosts with this forecast."""
        return sum(one.outcome == outcome for one in self.hosts)

    def group_forecasts(self) -> list[tuple[DeviceOutcome, str, bool, int]]:
        """Return each kind of outcome with its text, whether devices are held there, and its number of hosts, the most
        frequent first."""
        counts = Counter((one.outcome, one.text, one.held_count > 0) for one in self.hosts)
        return [(*kind, number) for kind, number in counts.most_common()]


def preview_new_draft(rollout: Rollout, change: DriverChange) -> RolloutPreview:
    """Predict what a rollout would do that is just being stored as a draft; `change` is its change.

    Every refusal is foreseen. Costs as many statements as `preview_rollout`.
    """
    hosts = _forecast_hosts(rollout, change)
    return RolloutPreview([replace(one, is_foreseen=one.outcome == DeviceOutcome.REFUSED) for one in hosts])


def preview_rollout(rollout: Rollout) -> RolloutPreview:
    """Predict what a rollout that is a draft would do now on each of its hosts. Costs a constant number of statements.

    A refusal that was not foreseen when the draft was stored may stop the rollout; its text says so. The holder checks
    and the agents are not asked, only the database.
    """
    hosts = _forecast_hosts(rollout, driver_config.build_change(rollout))
    if rollout.stop_on_failure:
        hosts = [
            replace(one, text=f"{one.text}; the rollout may stop there")
            if one.outcome == DeviceOutcome.REFUSED and not one.is_foreseen
            else one
            for one in hosts
        ]
    return RolloutPreview(hosts)


def _forecast_hosts(rollout: Rollout, change: DriverChange) -> list[HostForecast]:
    """Predict what a rollout of `change` would do now on each of its hosts, in the order of its steps. Costs a constant
    number of statements."""
    steps = list(rollout.steps.select_related("host").order_by("id"))
    host_ids = [step.host_id for step in steps if step.host_id is not None]
    wishes = DriverWish.objects.filter(driver=rollout.driver, host__in=host_ids).select_related("command")
    wish_by_host = {wish.host_id: wish for wish in wishes}
    devices = Device.objects.filter(driver=rollout.driver, host__in=host_ids).values_list("pk", "host_id", "busy_with")
    host_by_device = {pk: host for pk, host, _ in devices}
    busy_hosts = {host for _, host, busy_with in devices if busy_with}
    held_devices = {pk for pk, _ in safety.query_requests_of_devices(list(host_by_device), "id")}
    released_devices = {pk for pk, _ in safety.find_releases_of_devices(list(host_by_device))}
    released_hosts = {host_by_device[pk] for pk in released_devices}
    held_counts, device_counts = Counter(host_by_device[pk] for pk in held_devices), Counter(host_by_device.values())
    hosts = [step.host for step in steps if step.host is not None]
    unreachable = command_queue.explain_unreachable(hosts, may_wait=False)
    forecasts = []
    for step in steps:
        outcome, text = DeviceOutcome.REFUSED, "the host does not exist any more"
        if step.host is not None:
            wish, pk = wish_by_host.get(step.host.pk), step.host.pk
            outcome, text = driver_config.forecast_change(
                *(step.host, change, wish, unreachable.get(pk)),
                is_busy=pk in busy_hosts,
                is_held=pk in held_counts,
                is_released=pk in released_hosts,
            )
            if outcome == DeviceOutcome.MOVED and step.generation not in (None, wish.generation if wish else 0):
                outcome, text = DeviceOutcome.REFUSED, "somebody has changed it since the hosts were chosen"
        counts = (device_counts[step.host_id or 0], held_counts[step.host_id or 0])
        forecasts.append(
            HostForecast(step.host_name, outcome, text, step.generation, *counts, step.has_foreseen_refusal)
        )
    return forecasts
