"""The set of drivers that run on this host, with their settings; it can change while the agent runs.

It results from the host's own configuration and the wishes in the journal; a wish has precedence. New settings are
tried first, in a driver process of their own that is only asked what it finds, so wrong settings do not disturb the
running driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from agents import wire
from agents.host.journal.desired_drivers import Wishes
from drivers import catalogue
from drivers.errors import DriverError, Invalid
from drivers.inventory import DriverReport
from drivers.isolation.runner import DriverProcess

log = logging.getLogger("cyborg.agent")

Settings = Mapping[str, object]


class Roster:
    """The drivers of this host: which ones run (`running`), and how to start, stop or reconfigure one.

    `enabled_locally` names the drivers that the host's own configuration enables, and `local_settings` holds its
    settings by driver. `make_process` creates a driver without starting its process. `list_installed` returns the names
    of all installed drivers. Without `desired_drivers` the set cannot be changed.
    """

    def __init__(
        self,
        local: Sequence[str],
        tables: Mapping[str, Settings],
        wishes: Wishes | None,
        make: Callable[[str, Settings], DriverProcess],
        installed: Callable[[], tuple[str, ...]] = catalogue.names,
    ) -> None:
        self._local, self._tables, self._wishes = tuple(local), tables, wishes
        self._make, self._installed, self._here = make, installed, installed()
        named = dict.fromkeys((*self._local, *(wishes.drivers() if wishes else ())))
        self.running = {name: make(name, self._settings(name, self._wish(name))) for name in named if self._runs(name)}
        """The running drivers by name, in the order in which they claim devices. It changes while the agent runs."""

    def told(self, reports: Iterable[DriverReport]) -> tuple[DriverReport, ...]:
        """Add to each report the driver's version, quarantine and generation, and append the drivers without a report.

        An empty report is appended for each driver that is installed, enabled or has a wish, and is not in `reports`.
        """
        said = [self._stamped(report) for report in reports]
        wished = self._wishes.drivers() if self._wishes else ()
        rest = {*self._here, *self._local, *wished} - {report.driver for report in said}
        return (*said, *(self._off(name) for name in sorted(rest)))

    def verdict(self, command: wire.Command) -> tuple[wire.Outcome, str]:
        """Return how an interrupted `configure` ended: *succeeded* if the journal holds its wish or a later one.

        After the restart the drivers run according to the journal, so this is certain.
        """
        if command.wish and self._generation(command.driver) >= command.wish.generation:
            return "succeeded", "interrupted, because the agent stopped while it ran, but completed"
        return "refused", "interrupted, because the agent stopped while it ran: nothing was changed"

    async def configure(self, driver: str, wish: wire.Wish) -> str:
        """Start, stop or reconfigure a driver according to a wish, from now on and after every restart.

        Return a sentence about the result. Raises DriverError (the wish is not newer than the known one, the driver is
        not installed, or it fails with these settings) and sqlite3.OperationalError; then nothing was changed.
        """
        if (known := self._generation(driver)) >= wish.generation or self._wishes is None:
            raise Invalid(f"{driver}: this host already has the wanted state of generation {known}")
        trial, lacks = await self._trial(driver, wish) if wish.runs else (None, ())
        try:
            self._wishes.keep(driver, wish)
        except BaseException:
            if trial:
                await trial.close()
            raise
        old = self.running.get(driver)
        if trial:
            self.running[driver] = trial
        else:
            self.running.pop(driver, None)
        if old:
            await old.close()
        log.info("driver %s is now %s (generation %d)", driver, _state(wish), wish.generation)
        return "; ".join((f"{driver} is {_state(wish)}", *lacks))

    async def _trial(self, driver: str, wish: wire.Wish) -> tuple[DriverProcess, tuple[str, ...]]:
        """Start the driver with the new settings; return it, and the reasons why it cannot use all of this host.

        Raises Invalid, with the process ended, when the driver is not installed, when it fails with these settings, or
        when they contain `acts`, which only the host's own configuration may set.
        """
        self._here = self._installed()
        if driver not in self._here:
            raise Invalid(
                f"the driver {driver} is not installed on this host (installed: {', '.join(self._here) or 'none'}): "
                "install its package there, in the Python environment of cyborg-agent (pip install PACKAGE), and try "
                "again"
            )
        if "acts" in (wish.settings or {}):
            raise Invalid("`acts` (the allowed acts) can be set only in this host's own CYBORG_DRIVER_SETTINGS")
        trial = self._make(driver, self._settings(driver, wish))
        try:
            lacks, error = await trial.probe(), (await trial.discover()).error
            if not error:
                return trial, lacks
        except DriverError as problem:
            error = str(problem)
        except BaseException:
            await trial.close()
            raise
        await trial.close()
        raise Invalid(f"the driver fails with these settings, so nothing was changed: {error}")

    def _wish(self, name: str) -> wire.Wish | None:
        return self._wishes.get(name) if self._wishes else None

    def _settings(self, name: str, wish: wire.Wish | None) -> Settings:
        """Return the settings of the wish if it has any, else those of the host's own configuration."""
        return wish.settings if wish and wish.settings is not None else self._tables.get(name, {})

    def _runs(self, name: str) -> bool:
        wish = self._wish(name)
        return wish.runs if wish else name in self._local

    def _generation(self, name: str) -> int:
        wish = self._wish(name)
        return wish.generation if wish else 0

    def _stamped(self, report: DriverReport) -> DriverReport:
        driver = self.running.get(report.driver)
        return msgspec.structs.replace(
            report,
            version=driver.manifest.version if driver else "",
            state="quarantined" if driver and driver.quarantined else "",
            generation=self._generation(report.driver),
        )

    def _off(self, name: str) -> DriverReport:
        """Make the empty report of a driver that does not run: *disabled* by a wish, else *absent*."""
        wish = self._wish(name)
        state = "disabled" if wish and wish.installed else "absent"
        return DriverReport(name, state=state, generation=self._generation(name))


def _state(wish: wire.Wish) -> str:
    return "enabled" if wish.runs else "disabled" if wish.installed else "uninstalled"
