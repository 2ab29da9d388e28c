"""`python -m tests.bench [--full]`: measure every row, print the table and write `$CYBORG_STATE_DIR/bench.json`.

The exit status is 0 if everything could be measured, even if a row misses its bound. With --check nothing is measured:
the `bench.json` of the last run is read; the exit status is 1 if a row does not hold or was not measured (each is
named), and 2 if the file is missing, unusable or older than the product.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from drivers.isolation.process import die_with_parent
from tests.bench.figures import Row, table
from tests.bench.lab import Generator, Lab
from tests.bench.product import RunningProduct
from tests.bench.promises import NoResultError, find_broken, read_result
from tests.bench.remote_calls import MeasurementError

GROUPS = {"samples", "wire", "merge", "api", "whole", "agent", "uevent", "silence", "commands", "openstack", "console"}
GROUPS |= {"fleet", "startup", "changes", "cli"}
WITHOUT_PRODUCT = {"wire", "merge", "openstack", "console", "samples", "startup", "cli"}
"""Groups that do not use the running product that all other groups share."""


def main(words: list[str] | None = None) -> int:
    """Run the bench and return its exit status, as the docstring of this module describes it."""
    parser = argparse.ArgumentParser(prog="tests.bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="published sizes instead of smoke sizes")
    parser.add_argument("--only", default="", help=f"groups to measure, comma separated: {', '.join(sorted(GROUPS))}")
    parser.add_argument("--soak", type=float, metavar="S", help="how long a fleet is soaked (600; smoke: not at all)")
    parser.add_argument("--check", action="store_true", help="judge the last run's bench.json instead of measuring")
    arguments = parser.parse_args(words)
    state = Path(os.environ.get("CYBORG_STATE_DIR", "./var"))
    if arguments.check:
        return check(state / "bench.json")
    die_with_parent()
    began = time.monotonic()
    try:
        with Lab(state) as lab:
            rows = _measure(lab, full=arguments.full, only=arguments.only, soak_s=arguments.soak)
    except MeasurementError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    (state / "bench.json").write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    print(f"\n{table(rows)}\n")
    missed = sum(not row.ok for row in rows)
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s, {missed} missed; written to {state / 'bench.json'}")
    return 0


def check(file: Path) -> int:
    """Print which rows of `file` do not hold; return 0 if all hold, 1 if not, 2 without a usable result."""
    try:
        rows = read_result(file)
    except NoResultError as error:
        print(f"bench-check: {error}", file=sys.stderr)
        return 2
    if broken := find_broken(rows):
        print("\n".join(f"bench-check: {one}" for one in broken), file=sys.stderr)
        return 1
    print(f"bench-check: all {len(rows)} rows of {file} hold")
    return 0


def _measure(lab: Lab, *, full: bool, only: str, soak_s: float | None) -> list[Row]:
    wanted = set(filter(None, only.split(","))) or GROUPS
    startup: list[Row] = []
    if "startup" in wanted:
        from tests.bench import rows_startup

        startup = rows_startup.rows(5 if full else 3, progress)
    lab.start_database()
    from tests.bench import rows_api, rows_merge, rows_wire

    generator = Generator(lab)
    rows = startup
    if "wire" in wanted:
        size = rows_wire.Size(500, 30, 1.0) if full else rows_wire.Size(500, 7, 0.5)
        rows += rows_wire.rows(lab, generator, size, progress)
    if "merge" in wanted:
        rows += rows_merge.rows(rows_merge.Size(2000, 5) if full else rows_merge.Size(300, 5), progress)
    if "api" in wanted:
        smoke, published = (
            rows_api.Size((1000,), 10_000, 6, 0.5, beats=4, cycles_s=4.0),
            rows_api.Size((1000, 10_000), 100_000, 10, 1.0, beats=8, cycles_s=12.0),
        )
        rows += rows_api.rows(lab, generator, published if full else smoke, progress)
    if "console" in wanted:
        from tests.bench import rows_console, rows_live

        seconds, events = (20.0, 1_000_000) if full else (4.0, 300_000)  # fewer have no word that only older ones have
        rows += rows_console.rows(lab, generator, 100_000, seconds, progress)
        rows += rows_console.search_rows(lab, generator, 100_000, events, seconds, progress)
        rows += rows_live.rows(lab, 60.0 if full else 10.0, progress)
    if "cli" in wanted:
        from tests.bench import rows_cli

        smoke_cli, published_cli = (
            rows_cli.Size(1000, 20_000, 2000, 20, 500, shows=20),
            rows_cli.Size(1000, 100_000, 20_000, 20, 2000, shows=50),
        )
        rows += rows_cli.rows(lab, published_cli if full else smoke_cli, progress)
    if "samples" in wanted:
        from tests.bench import rows_samples

        size = rows_samples.Size(1000, 5, 10.0) if full else rows_samples.Size(200, 3, 3.0)
        rows += rows_samples.rows(lab, generator, size, progress)
    if wanted - WITHOUT_PRODUCT:
        rows += _measure_product_groups(lab, generator, full=full, wanted=wanted, soak_s=soak_s)
    if "openstack" in wanted:
        from tests.bench import rows_openstack

        rows += rows_openstack.rows(lab, full=full, progress=progress)
    return rows


def _measure_product_groups(
    lab: Lab, generator: Generator, *, full: bool, wanted: set[str], soak_s: float | None
) -> list[Row]:
    from tests.bench import fixtures, rows_agent, rows_commands, rows_requests, rows_silence, rows_uevent, rows_whole
    from tests.bench.product import run_product

    fixtures.empty_inventory()
    lab.stop_database()
    progress("starting the whole product")
    size = rows_whole.Size(300, 5000, 3) if full else rows_whole.Size(50, 1000, 3)
    rows: list[Row] = []
    at_rest: list[Row] = []
    with run_product(lab) as product:

        def measure_at_rest() -> None:
            if "agent" in wanted:
                at_rest.extend(rows_agent.rows(product, 65.0 if full else 10.0, progress))

        if "api" in wanted:
            rows += rows_requests.measure_one_command_server(product, generator, 12.0 if full else 4.0, progress)
        if "whole" in wanted:
            rows += rows_whole.measure_visibility(product, generator, size, progress)
            rows += rows_whole.measure_storm(lab, product, generator, size, progress)
        if "silence" in wanted:
            rows += rows_silence.rows(lab, product, generator, size.agents, progress, measure_at_rest)
        else:
            time.sleep(5)  # until the agent has finished its first discovery and report
            measure_at_rest()
        if "uevent" in wanted:
            rows += rows_uevent.rows(lab, product, 200 if full else 30, progress)
        if "commands" in wanted:
            rows += rows_commands.rows(product, generator, 2000 if full else 200, 10_000 if full else 1000, progress)
        if "changes" in wanted:
            from tests.bench import rows_changes

            rows += rows_changes.rows(lab, product, 20 if full else 5, progress)
        if "fleet" in wanted:
            rows += _measure_fleet(lab, product, generator, full=full, soak_s=soak_s)
    return rows + at_rest


def _measure_fleet(
    lab: Lab, product: RunningProduct, generator: Generator, *, full: bool, soak_s: float | None
) -> list[Row]:
    from tests.bench import rows_fleet

    fleet = rows_fleet.Size(5000, 10_000, 30.0, soak_s=600.0) if full else rows_fleet.Size(500, 500, 6.0)
    fleet = fleet if soak_s is None else replace(fleet, soak_s=soak_s)
    return rows_fleet.rows(lab, product, generator, fleet, progress)


def progress(text: str) -> None:
    """Print one line of progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
