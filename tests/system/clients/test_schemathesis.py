"""Both APIs under schemathesis: everything their documents allow, and everything they do not, as two identities.

The same requests every time. What may fail all the same is named in EXEMPT, each with its reason.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.system import environments
from tests.system.clients.cloud import Cloud, cloud_with
from tests.system.clients.neighbours import neighbours
from tests.system.clients.v2_document import document
from tests.system.conftest import fresh
from tests.system.keystone import running

pytestmark = pytest.mark.system
PHASES = {"admin": ("coverage,fuzzing", 2), "member": ("fuzzing", 3)}
"""What is run as whom, and with how many examples per operation; every corner of a document once is enough."""
RUN_S = 400.0


@dataclass(frozen=True)
class Failure:
    """One request that failed a check of schemathesis."""

    check: str
    method: str
    target: str
    """Path and query."""
    status: int
    message: str
    answer: str

    def __str__(self) -> str:
        return f"{self.check}: {self.method} {self.target} → {self.status}\n    {self.message}\n    {self.answer[:300]}"


@dataclass(frozen=True)
class Exempt:
    """Requests that may fail a check: `where` matches `METHOD target`, `said` is found in message or answer."""

    check: str
    where: str
    said: str
    why: str

    def covers(self, failure: Failure) -> bool:
        """Whether this is the exemption of that failure."""
        asked = f"{failure.method} {failure.target}"
        told = failure.message + failure.answer
        return self.check == failure.check and bool(re.match(self.where, asked)) and bool(re.search(self.said, told))


_COLLECTION = r"/accelerator/v2/(device_profiles|devices|deployables|attributes)(\?|$)"
V2 = (
    Exempt(
        "unsupported_method", f"PATCH {_COLLECTION}", "404", "2.0, Methods: PATCH of a collection without one is 404"
    ),
    Exempt(
        "allow_header_conformance", ".*", "`Allow: ", "2.0, Methods: Allow lists the controller's verbs, not the URL's"
    ),
    Exempt(
        "negative_data_rejection",
        r"POST /accelerator/v2/(device_profiles|attributes|accelerator_requests)/.+",
        "in path",
        "2.0, Methods: POST to a member is a normal create, whatever the path says",
    ),
    Exempt(
        "not_a_server_error", r"POST .*/device_profiles", "at most 255", "annex A.4: 500 for a name of 256 characters"
    ),
    Exempt(
        "negative_data_rejection",
        ".*",
        "`OpenStack-API-Version` in header",
        "1.5: an empty header is 2.0, and bare values, lists and other spellings are understood",
    ),
    Exempt("not_a_server_error", r"POST .*/device_profiles", "name needed", "annex A.4: 500 for an empty name"),
    Exempt(
        "positive_data_acceptance",
        r"PATCH .*/program",
        "The image cannot be programmed",
        "2.5: which images there are, a schema cannot say",
    ),
    Exempt(
        "positive_data_acceptance",
        r"GET .*[?&]marker=",
        "must be the uuid of an item",
        "annex B: marker is ours, and a page that starts nowhere is 400",
    ),
)
API = (
    Exempt(
        "positive_data_acceptance",
        "POST /api/(commands|attachments|rollouts)/",
        "not found with uuid|There is no host|No host is chosen",
        "A schema cannot say which devices and hosts there are.",
    ),
    Exempt(
        "positive_data_acceptance",
        "POST /api/rollouts/",
        "looks like a secret",
        "A schema cannot say which words in a driver's settings are taken for a secret.",
    ),
    Exempt(
        "positive_data_acceptance",
        "POST /api/accelerators/",
        "A generation is only for a single device",
        "A schema cannot say how many devices a host and a backend stand for.",
    ),
    Exempt(
        "positive_data_acceptance",
        "PATCH /api/devices/",
        "The layout of device .* has no word",
        "Each driver takes words of its own in a layout, which the device shows.",
    ),
    Exempt(
        "positive_data_acceptance",
        r"(POST|PATCH) /api/subscriptions/",
        "sends no mail|A webhook's URL|no e-mail address|takes no target|needs the scope cloud",
        "Where a target may lead depends on the way, on the installation and, of a PATCH, on what is stored.",
    ),
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Cloud]:
    """A product of its own, because what was done to it here no other test should meet."""
    with running() as keystone, fresh() as place, neighbours() as there, cloud_with(keystone, place, there) as one:
        yield one


def run(cloud: Cloud, place: Path, user: str, location: str) -> list[Failure]:
    """Every failure of one run, with all checks."""
    report = place / "report.ndjson"
    phases, examples = PHASES[user]
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", location, "--url", cloud.url]
    command += ["--header", f"X-Auth-Token: {cloud.token(user)}", "--checks", "all", "--phases", phases]
    command += ["--max-examples", str(examples), "--seed", "1", "--generation-deterministic"]
    command += ["--continue-on-failure", "--warnings", "off", "--report-ndjson-path", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S, cwd=place)
    assert done.returncode in (0, 1) and report.exists(), (done.stdout + done.stderr)[-3000:]
    events = [json.loads(line) for line in report.read_text().splitlines()]
    finished = [event["ScenarioFinished"]["recorder"] for event in events if "ScenarioFinished" in event]
    assert sum(len(recorder["cases"]) for recorder in finished) > 50, done.stdout[-3000:]
    return [failure for recorder in finished for failure in failures(recorder)]


def failures(recorder: dict[str, Any]) -> Iterator[Failure]:
    """What failed among the requests of one operation."""
    for case, checks in recorder["checks"].items():
        for check in checks:
            if check["status"] != "success":
                seen = recorder["interactions"][case]
                answer = seen.get("response") or {"status_code": 0, "content": None}
                content = (answer["content"] or {}).get("$base64", "")
                yield Failure(
                    check["name"],
                    seen["request"]["method"],
                    re.sub(r"^http://[^/]+", "", seen["request"]["uri"]),
                    answer["status_code"],
                    check["failure_info"]["failure"]["message"],
                    base64.b64decode(content).decode(errors="replace"),
                )


def report(found: list[Failure], exempt: tuple[Exempt, ...]) -> str:
    """What is no exemption, one example per check and kind of target; '' when all is."""
    left = [one for one in found if not any(exemption.covers(one) for exemption in exempt)]
    kinds = {(one.check, one.method, re.sub(r"[0-9a-f-]{36}.*|\?.*", "…", one.target)): one for one in left}
    return "\n".join(str(one) for one in kinds.values())


@pytest.mark.parametrize("user", ["admin", "member"])
def test_v2(fuzzed: Cloud, tmp_path: Path, user: str) -> None:
    location = tmp_path / "v2.json"
    location.write_text(json.dumps(document()))
    found = run(fuzzed, tmp_path, user, str(location))
    assert not report(found, V2), report(found, V2)


@pytest.mark.parametrize("user", ["admin", "member"])
def test_api(fuzzed: Cloud, tmp_path: Path, user: str) -> None:
    found = run(fuzzed, tmp_path, user, str(environments.ROOT / "docs" / "openapi.yaml"))
    assert not report(found, API), report(found, API)
