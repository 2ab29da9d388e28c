"""`python -m tests.fleet N`: run a scenario with N agents, show it, and judge at the end whether anything was lost.

The exit status is 0 if every promise held, 1 if one did not, 2 if the scenario could not be run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from drivers.isolation.process import die_with_parent
from tests.bench.remote_calls import MeasurementError
from tests.fleet import verdict
from tests.fleet.installation import Installation, running_installation
from tests.fleet.neighbours import DATABASE_DELAY_S, SHORT_S, SHORT_SETTINGS, running_beside_neighbours
from tests.fleet.scenarios import LONG_SCENARIOS, NEIGHBOURS, SCENARIOS, ScenarioRun, run_and_judge
from tests.fleet.view import FleetView

HELP_EPILOG = """\
scenarios:
{scenarios}
  all               all of these one after the other, without those that take minutes ({long})

The whole product is started on free ports with a state directory of its own; no process of it is left, however this
ends. Every agent has a key of its own, speaks the real wire, backs off as the real agent does, and reports its
devices. Make sure of open files first: N agents need 1.5 N + 200 here and N + 200 in the web process (`ulimit -Hn`).

examples:
  python -m tests.fleet 500                           a quick one
  python -m tests.fleet 5000 --scenario power-return  a data centre gets its power back
  python -m tests.fleet 100 --scenario soak           parts are killed in turn; growing memory is found
  python -m tests.fleet 200 --scenario hostile-neighbours --seed 7    ten minutes for each of three runs
  make fleet N=2000 SCENARIO=all
"""


def main() -> int:
    """Run the scenario that the arguments name, or all of them; return the exit status."""
    known = SCENARIOS | LONG_SCENARIOS
    scenarios = "\n".join(f"  {name:<17} {(one.__doc__ or '').splitlines()[0]}" for name, one in known.items())
    parser = argparse.ArgumentParser(
        prog="tests.fleet",
        description="Thousands of simulated agents against the whole product.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=HELP_EPILOG.format(scenarios=scenarios, long=", ".join(LONG_SCENARIOS)),
    )
    parser.add_argument("count", type=int, nargs="?", default=1000, help="how many agents (1000)")
    parser.add_argument("--scenario", default="cold-start", choices=[*known, "all"], help="what happens to them")
    parser.add_argument("--devices", type=int, default=8, help="of each (8)")
    parser.add_argument("--hold", type=float, default=15.0, help="seconds that unrest and outages last (15)")
    parser.add_argument("--soak", type=float, default=180.0, metavar="S", help="seconds that the soak lasts (180)")
    parser.add_argument("--seed", type=int, help="repeat the random choices of a long scenario (others each time)")
    parser.add_argument(
        "--hostile", type=float, default=600.0, metavar="S", help="seconds of each run beside hostile neighbours (600)"
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=2.0,
        help="how many times as long as in the control run the well-behaved may wait; 0: only report it (2)",
    )
    parser.add_argument(
        "--database-delay",
        type=float,
        default=DATABASE_DELAY_S,
        metavar="S",
        help=f"latency of the slow database ({DATABASE_DELAY_S:g})",
    )
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until all must be settled (300)")
    parser.add_argument("--handshakes", type=int, default=512, help="CYBORG_HANDSHAKES of the product (512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there, too")
    arguments = parser.parse_args()
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    settings = {"CYBORG_HANDSHAKES": str(arguments.handshakes)}
    if arguments.scenario == NEIGHBOURS and arguments.hostile < SHORT_S:
        settings |= SHORT_SETTINGS
    verdicts: dict[str, list[verdict.PromiseLine]] = {}
    with tempfile.TemporaryDirectory(prefix="cyborg-fleet-") as folder:
        try:
            make = running_beside_neighbours if arguments.scenario == NEIGHBOURS else running_installation
            with make(Path(folder), arguments.count, arguments.devices, **settings) as installation:
                for name in SCENARIOS if arguments.scenario == "all" else [arguments.scenario]:
                    verdicts[name] = _run_scenario(name, installation, arguments)
        except (MeasurementError, KeyboardInterrupt) as error:
            print(f"fleet: {error or 'stopped'}", file=sys.stderr)
            return 2
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode(verdicts))
    return int(not all(line.holds for lines in verdicts.values() for line in lines))


def _run_scenario(name: str, installation: Installation, arguments: argparse.Namespace) -> list[verdict.PromiseLine]:
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"{name}, seed {seed}: {((SCENARIOS | LONG_SCENARIOS)[name].__doc__ or '').strip()}", flush=True)
    view = FleetView(f"{name}, {installation.count} agents", installation.count, installation.devices)
    run = ScenarioRun(
        installation,
        view,
        arguments.patience,
        arguments.hold,
        arguments.soak,
        seed,
        arguments.hostile,
        arguments.factor,
        arguments.database_delay,
    )
    lines = run_and_judge(name, run)
    print(f"\n{verdict.table(lines)}\n", flush=True)
    return lines


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
    sys.exit(main())
