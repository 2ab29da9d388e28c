"""Carry out plans on a ModelMachine like the agent, but without waiting, for tests of what drivers plan."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from drivers.base import Driver, Settings
from drivers.errors import Busy, DriverError, Failed, from_os
from drivers.plan import Act, Ask, Check, Plan, Step, stray
from tests.support.modelmachine import ModelMachine

MAX_ROUNDS = 4


class PlanRunner:
    """One driver on one host. `first_values` has the contents before the first write, `done_steps` what was done."""

    def __init__(self, host: ModelMachine, driver: Driver, **settings: object) -> None:
        self.host, self.driver, self.settings = host, driver, Settings(settings)
        self.first_values: dict[str, str] = {}
        self.done_steps: list[str] = []

    def plan(self, act: Act, ask: Ask) -> Plan:
        """Return the driver's plan, after checking that it writes only to the paths that the driver declares."""
        plan: Plan = getattr(self.driver, act)(self.host.machine, self.settings, ask)
        assert not stray(plan, self.driver.writes)
        return plan

    def run_act(self, act: Act, ask: Ask) -> int:
        """Carry out plans until no step is left; return their number. If a step fails, undo the plan and raise."""
        for count in range(MAX_ROUNDS):
            plan = self.plan(act, ask)
            if not plan.steps:
                return count
            self._steps(plan)
            if act == "reset":
                return count + 1
        assert not self.plan(act, ask).steps
        return MAX_ROUNDS

    def _steps(self, plan: Plan) -> None:
        for number, step in enumerate(plan.steps):
            if wrong := self._find_wrong_check(step.expect) or next(filter(self.host.machine.is_open, step.idle), ""):
                raise Busy(wrong)
            self._keep_first_value(step.write.path)
            self.done_steps.append(step.does)
            try:
                self.host.write(step.write.path, step.write.value)
            except OSError as error:
                self._undo(plan.steps[:number])
                raise from_os(error, step.does) from None
            if wrong := self._find_wrong_check(step.seen):
                self._undo(plan.steps[: number + 1])
                raise Failed(f"{step.does}: {wrong}")

    def _undo(self, done: Sequence[Step]) -> None:
        for step in reversed(done):
            for write in step.undo:
                self.host.write(write.path, write.value)

    def _keep_first_value(self, path: str) -> None:
        with contextlib.suppress(DriverError):  # Files such as `unbind` cannot be read.
            if text := self.host.machine.text(path):
                self.first_values.setdefault(path, text)

    def _find_wrong_check(self, checks: tuple[Check, ...]) -> str:
        for check in checks:
            look = self.host.machine.link if check.link else self.host.machine.text
            if look(check.path) != check.value:
                return f"{check.path} is {look(check.path)!r}, not {check.value!r}"
        return ""
