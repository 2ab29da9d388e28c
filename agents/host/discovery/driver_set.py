"""The set of drivers that run on this host, with their settings; it can change while the agent runs.

It results from the host's own configuration and the desired states in the journal; a desired state has precedence. New
settings are tried first, in a driver process of their own that is only asked what it finds, so wrong settings do not
disturb the running driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from agents import wire
from agents.host.journal.desired_drivers import DesiredDrivers
from drivers import catalogue
from drivers.errors import DriverError, Invalid
from drivers.inventory import DriverDeclaration, DriverReport
from drivers.isolation.runner import DriverProcess

log = logging.getLogger("cyborg.agent")

DriverSettings = Mapping[str, object]


class DriverSet:
    """The drivers of this host: which ones run (`running`), and how to start, stop or reconfigure one.

    `enabled_locally` names the drivers that the host's own configuration enables, and `local_settings` holds its
    settings by driver. `desired_drivers` is the journal's table of the states that the conductor wants, which override
    that configuration; if it is None, `configure_driver` always raises Invalid. `make_process` creates a driver without
    starting its process. `list_installed` returns the names of all installed drivers.
    """

    def __init__(
        self,
        enabled_locally: Sequence[str],
        local_settings: Mapping[str, DriverSettings],
        desired_drivers: DesiredDrivers | None,
        make_process: Callable[[str, DriverSettings], DriverProcess],
        list_installed: Callable[[], tuple[str, ...]] = catalogue.list_driver_names,
    ) -> None:
        self._enabled_locally, self._local_settings, self._desired_drivers = (
            tuple(enabled_locally),
            local_settings,
            desired_drivers,
        )
        self._make_process, self._list_installed, self._installed_names = make_process, list_installed, list_installed()
        names = dict.fromkeys((*self._enabled_locally, *(desired_drivers.list_drivers() if desired_drivers else ())))
        self.running = {
            name: make_process(name, self._choose_settings(name, self._get_desired_state(name)))
            for name in names
            if self._should_run(name)
        }
        """The running drivers by name, in the order in which they claim devices. It changes while the agent runs."""

    def complete_reports(self, reports: Iterable[DriverReport]) -> tuple[DriverReport, ...]:
        """Add to each report the driver's version, quarantine and generation, and append the drivers without a report.

        An empty report is appended for each driver that is installed, enabled or has a desired state, and is not in
        `reports`.
        """
        completed = [self._add_driver_state(report) for report in reports]
        desired_names = self._desired_drivers.list_drivers() if self._desired_drivers else ()
        unreported = {*self._installed_names, *self._enabled_locally, *desired_names} - {
            report.driver for report in completed
        }
        return (*completed, *(self._build_inactive_report(name) for name in sorted(unreported)))

    def determine_configure_result(self, command: wire.Command) -> tuple[wire.ResultOutcome, str]:
        """Return how an interrupted `configure` ended.

        It has *succeeded* if the journal holds its desired state or a later one. After the restart the drivers run
        according to the journal, so this is certain.
        """
        if command.wish and self._get_generation(command.driver) >= command.wish.generation:
            return "succeeded", "interrupted, because the agent stopped while it ran, but completed"
        return "refused", "interrupted, because the agent stopped while it ran: nothing was changed"

    async def configure_driver(self, driver: str, desired: wire.Wish) -> str:
        """Start, stop or reconfigure a driver according to a desired state, from now on and after every restart.

        Return a sentence about the result. Raises DriverError (the desired state is not newer than the known one, the
        driver is not installed, or it fails with these settings) and sqlite3.OperationalError; then nothing was
        changed.
        """
        if (known_generation := self._get_generation(driver)) >= desired.generation or self._desired_drivers is None:
            raise Invalid(f"{driver}: this host already has the wanted state of generation {known_generation}")
        trial, limitations = await self._start_trial(driver, desired) if desired.should_run else (None, ())
        try:
            self._desired_drivers.store_desired_state(driver, desired)
        except BaseException:
            if trial:
                await trial.close()
            raise
        former_process = self.running.get(driver)
        if trial:
            self.running[driver] = trial
        else:
            self.running.pop(driver, None)
        if former_process:
            await former_process.close()
        log.info("driver %s is now %s (generation %d)", driver, _describe_desired_state(desired), desired.generation)
        return "; ".join((f"{driver} is {_describe_desired_state(desired)}", *limitations))

    async def _start_trial(self, driver: str, desired: wire.Wish) -> tuple[DriverProcess, tuple[str, ...]]:
        """Start the driver with the new settings; return it, and the reasons why it cannot use all of this host.

        Raises Invalid, with the process ended, when the driver is not installed, when it fails with these settings, or
        when they contain `acts`, which only the host's own configuration may set.
        """
        self._installed_names = self._list_installed()
        if driver not in self._installed_names:
            installed_text = ", ".join(self._installed_names) or "none"
            raise Invalid(
                f"the driver {driver} is not installed on this host (installed: {installed_text}): "
                "install its package there, in the Python environment of cyborg-agent (pip install PACKAGE), and try "
                "again"
            )
        if "acts" in (desired.settings or {}):
            raise Invalid("`acts` (the allowed acts) can be set only in this host's own CYBORG_DRIVER_SETTINGS")
        trial = self._make_process(driver, self._choose_settings(driver, desired))
        try:
            limitations, error = await trial.probe(), (await trial.discover()).error
            if not error:
                return trial, limitations
        except DriverError as problem:
            error = str(problem)
        except BaseException:
            await trial.close()
            raise
        await trial.close()
        raise Invalid(f"the driver fails with these settings, so nothing was changed: {error}")

    def _get_desired_state(self, name: str) -> wire.Wish | None:
        """Return the desired state of a driver, None when the journal has none."""
        return self._desired_drivers.get_desired_state(name) if self._desired_drivers else None

    def _choose_settings(self, name: str, desired: wire.Wish | None) -> DriverSettings:
        """Return the settings of the desired state if it has any, else those of the host's own configuration."""
        return desired.settings if desired and desired.settings is not None else self._local_settings.get(name, {})

    def _should_run(self, name: str) -> bool:
        """Return whether a driver should run: as its desired state says, else whether the host's own configuration
        enables it."""
        desired = self._get_desired_state(name)
        return desired.should_run if desired else name in self._enabled_locally

    def _get_generation(self, name: str) -> int:
        """Return the generation of the driver's desired state, 0 when it has none."""
        desired = self._get_desired_state(name)
        return desired.generation if desired else 0

    def _add_driver_state(self, report: DriverReport) -> DriverReport:
        """Return the report with the driver's version, state (*quarantined* or ''), generation and declaration."""
        driver = self.running.get(report.driver)
        declaration = driver.manifest.declares if driver else DriverDeclaration()
        return msgspec.structs.replace(
            report,
            version=driver.manifest.version if driver else "",
            state="quarantined" if driver and driver.is_quarantined else "",
            generation=self._get_generation(report.driver),
            declares=declaration if declaration != DriverDeclaration() else None,
        )

    def _build_inactive_report(self, name: str) -> DriverReport:
        """Make the empty report of a driver that does not run: *disabled* by its desired state, else *absent*."""
        desired = self._get_desired_state(name)
        state = "disabled" if desired and desired.installed else "absent"
        return DriverReport(name, state=state, generation=self._get_generation(name))


def _describe_desired_state(desired: wire.Wish) -> str:
    """Return the desired state as a word for people: enabled, disabled or uninstalled."""
    return "enabled" if desired.should_run else "disabled" if desired.installed else "uninstalled"
