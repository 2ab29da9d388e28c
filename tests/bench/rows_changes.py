"""Rows of cached data: how soon a process uses an edited policy file, and a profile that another process deleted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from accelerators.requests import profiles
from tests.bench.figures import Row
from tests.bench.lab import Lab
from tests.bench.product import RunningProduct, api_token, delete, get, post, wait_for
from tests.bench.promises import POLICY, PROFILE
from tests.bench.remote_calls import MeasurementError

WITHIN_MS = 1000.0
"""The bound in README.md for the policy file, and in docs/architecture.md for profiles."""
PATH = "/v2/device_profiles"
RULE = '"cyborg:device_profile:get_all": "{}"\n'
NO_RULES = "{}\n"
GROUPS = [{"resources:FPGA": "1"}]


def rows(lab: Lab, product: RunningProduct, samples: int, progress: Callable[[str], None]) -> list[Row]:
    """Measure both times `samples` times; return a row with the worst time of each."""
    progress(f"an edited policy file and a deleted profile, {samples} times each")
    token, chance = api_token(), random.Random(1)
    return [
        _make_row(
            POLICY, [_time_policy_edit(lab.home / "policy.yaml", product, token, chance) for _ in range(samples)]
        ),
        _make_row(PROFILE, [_time_profile(product, token, number) for number in range(samples)]),
    ]


def _make_row(name: str, times: list[float]) -> Row:
    note = f"the worst of {len(times)}; the shortest {min(times):.0f} ms"
    return Row(name, max(times), "ms", "idle, promised within a second", WITHIN_MS, note=note)


def _time_policy_edit(file: Path, product: RunningProduct, token: str, chance: random.Random) -> float:
    """Return the milliseconds from the edit of a rule until the API refuses the call; restore the rule afterwards."""

    def get_status() -> int:
        status, body = get(product.port, PATH, token)
        if status not in (200, 403):
            raise MeasurementError(f"GET {PATH}: {status} {body[:200]!r}")
        return status

    wait_for(lambda: get_status() == 200, "profiles are listed again after the rule was put back")
    sleep(chance.uniform(0.0, 1.0))  # an edit may happen at any time between two checks of the file
    get_status()
    began = monotonic()
    file.write_text(RULE.format("!"))
    try:
        wait_for(lambda: get_status() == 403, "profiles are refused")
        return (monotonic() - began) * 1000
    finally:
        file.write_text(NO_RULES)  # if the file were removed, its rules would stay in force


def _time_profile(product: RunningProduct, token: str, number: int) -> float:
    """Return the milliseconds from the response to DELETE until the profile is gone from this process's cache."""
    name = f"bench-{number}"
    status, body = post(product.port, PATH, token, [{"name": name, "groups": GROUPS}])
    if status != 201:
        raise MeasurementError(f"POST {PATH}: {status} {body[:200]!r}")
    if profiles.get_profile_by_name(name) is None:
        raise MeasurementError(f"profile {name} was created but cannot be found")
    status, body = delete(product.port, f"{PATH}/{json.loads(body)['uuid']}", token)
    if status != 204:
        raise MeasurementError(f"DELETE {PATH}/{name}: {status} {body[:200]!r}")
    began = monotonic()
    wait_for(lambda: profiles.get_profile_by_name(name) is None, "the profile is forgotten")
    return (monotonic() - began) * 1000
