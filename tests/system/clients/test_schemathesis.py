"""Test both APIs with schemathesis, as an administrator and as a member: requests that their documents allow or forbid.

The requests are the same in each run. V2_EXEMPTIONS and API_EXEMPTIONS list the checks that may fail, with reasons.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.system import environments
from tests.system.clients.cloud import KeystoneCloud, running_cloud
from tests.system.clients.neighbours import neighbours
from tests.system.clients.v2_document import document
from tests.system.conftest import fresh_folder
from tests.system.keystone import running

pytestmark = pytest.mark.system
PHASES = {"admin": ("coverage,fuzzing", 2), "member": ("fuzzing", 3)}
"""By user: the phases of schemathesis and the number of examples per operation. The coverage phase runs only once."""
SILENCE_S = 180.0
"""Seconds in which schemathesis must finish a further scenario: all requests of one phase for one operation, which are
about 200 at most. A busy machine may take long for all of them together."""


@dataclass(frozen=True)
class Failure:
    """One request that failed a check of schemathesis."""

    check: str
    method: str
    target: str
    """The path and the query of the request."""
    status: int
    message: str
    answer: str

    def __str__(self) -> str:
        return f"{self.check}: {self.method} {self.target} → {self.status}\n    {self.message}\n    {self.answer[:300]}"


@dataclass(frozen=True)
class Exemption:
    """Requests that may fail a check. `target_pattern` matches `METHOD target`, `message_pattern` message or answer.

    `reason` names a section of the contract or says why the document cannot express the rule.
    """

    check: str
    target_pattern: str
    message_pattern: str
    reason: str

    def covers(self, failure: Failure) -> bool:
        """Tell whether this exemption covers a failure."""
        asked = f"{failure.method} {failure.target}"
        told = failure.message + failure.answer
        return (
            self.check == failure.check
            and bool(re.match(self.target_pattern, asked))
            and bool(re.search(self.message_pattern, told))
        )


_COLLECTION = r"/accelerator/v2/(device_profiles|devices|deployables|attributes)(\?|$)"
V2_EXEMPTIONS = (
    Exemption(
        "unsupported_method", f"PATCH {_COLLECTION}", "404", "2.0, Methods: PATCH of a collection without one is 404"
    ),
    Exemption(
        "allow_header_conformance", ".*", "`Allow: ", "2.0, Methods: Allow lists the controller's verbs, not the URL's"
    ),
    Exemption(
        "negative_data_rejection",
        r"POST /accelerator/v2/(device_profiles|attributes|accelerator_requests)/.+",
        "in path",
        "2.0, Methods: POST to a member is a normal create, whatever the path says",
    ),
    Exemption(
        "not_a_server_error", r"POST .*/device_profiles", "at most 255", "annex A.4: 500 for a name of 256 characters"
    ),
    Exemption(
        "negative_data_rejection",
        ".*",
        "`OpenStack-API-Version` in header",
        "1.5: an empty header is 2.0, and bare values, lists and other spellings are understood",
    ),
    Exemption("not_a_server_error", r"POST .*/device_profiles", "name needed", "annex A.4: 500 for an empty name"),
    Exemption(
        "positive_data_acceptance",
        r"PATCH .*/program",
        "The image cannot be programmed",
        "2.5: which images there are, a schema cannot say",
    ),
    Exemption(
        "positive_data_acceptance",
        r"GET .*[?&]marker=",
        "must be the uuid of an item",
        "annex B: marker is ours, and a page that starts nowhere is 400",
    ),
)
API_EXEMPTIONS = (
    Exemption(
        "positive_data_acceptance",
        "POST /api/(commands|attachments|rollouts)/",
        "not found with uuid|There is no host|No host is chosen",
        "A schema cannot say which devices and hosts there are.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/bulk_actions/",
        "There is no (device|attachment|accelerator)|No (device|attachment|accelerator) is chosen|selector: |"
        "No admission rule would move",
        "A schema cannot say which objects and rules there are; the selector takes the filters of their list.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/(rollouts|bulk_actions|accelerators)/",
        "store_draft: give it only with dry_run",
        "Whether a draft is stored is a matter of previews only.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/rollouts/",
        "looks like a secret",
        "A schema cannot say which words in a driver's settings are taken for a secret.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/rollouts/",
        "Send the generation that you have read",
        "A generation is needed for a single host; a schema cannot say how many hosts a selector matches.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/rollouts/",
        "Say what to change|No host of this rollout has failed|nothing to change|token: leave it out",
        "The rule depends on the operation and on its fields together, and on which hosts of the rollout have failed.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/bulk_actions/[0-9a-f-]{36}/retry/",
        "token: leave it out|No device of this bulk action",
        "Which devices have failed is known to the database; dry_run and token exclude each other.",
    ),
    Exemption(
        "positive_data_acceptance",
        "(POST|PATCH) /api/backends/",
        "Say the kind of the backend|There is no host|is not usable|cannot be called|has no setting",
        "The settings of a backend are the driver's own, and its code checks them.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/join_tokens/",
        "names no port|There is no host|the address must begin with http",
        "A given address must be a URL; whether it may be left out depends on the installation.",
    ),
    Exemption(
        "positive_data_acceptance",
        "GET /api/[a-z_]+/",
        "uuid_prefix: say the beginning of a uuid",
        "The filter takes the digits with and without hyphens, in any case.",
    ),
    Exemption(
        "positive_data_acceptance",
        "GET /api/[a-z_]+/",
        "saved_view: you have no saved view",
        "A schema cannot say which views the caller has saved.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/accelerators/(delete/)?",
        "selector: |The selector matches no device",
        "The selector takes the filters of the list of devices, and a schema cannot say which devices there are.",
    ),
    Exemption(
        "negative_data_rejection",
        "POST /api/accelerators/(delete/)?",
        "The body is larger than",
        "A body with more targets than allowed may also be larger than any body may be: 413.",
    ),
    Exemption(
        "positive_data_acceptance",
        "POST /api/accelerators/",
        "A generation is only for a single device",
        "A schema cannot say how many devices a host and a backend stand for.",
    ),
    Exemption(
        "positive_data_acceptance",
        "PATCH /api/devices/",
        "The device's layout has no setting",
        "Each driver takes words of its own in a layout, which the device shows.",
    ),
    Exemption(
        "positive_data_acceptance",
        r"(POST|PATCH) /api/subscriptions/",
        "sends no mail|A webhook's URL|no e-mail address|takes no target|needs the scope cloud",
        "Where a target may lead depends on the way, on the installation and, of a PATCH, on what is stored.",
    ),
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[KeystoneCloud]:
    """A separate product with its own Keystone, because the random requests would disturb other tests."""
    with (
        running() as keystone,
        fresh_folder() as place,
        neighbours() as there,
        running_cloud(keystone, place, there) as one,
    ):
        yield one


def run_while_it_reports(command: list[str], report: Path, output: Path) -> int:
    """Run the command until it ends, and return its exit code; fail if its report has not grown for SILENCE_S."""
    size, grown_at = 0, time.monotonic()
    with output.open("w") as text, subprocess.Popen(command, cwd=report.parent, stdout=text, stderr=text) as process:
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if report.exists() and report.stat().st_size > size:
                    size, grown_at = report.stat().st_size, time.monotonic()
                silent_s = time.monotonic() - grown_at
                assert silent_s < SILENCE_S, f"no scenario ended for {silent_s:.0f} s: {output.read_text()[-3000:]}"
        finally:
            process.kill()
    return process.returncode


def run_schemathesis(cloud: KeystoneCloud, place: Path, user: str, location: str) -> list[Failure]:
    """Run schemathesis with all checks and return all failures; fail if it crashed or made too few requests."""
    report = place / "report.ndjson"
    phases, examples = PHASES[user]
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", location, "--url", cloud.url]
    command += ["--header", f"X-Auth-Token: {cloud.token(user)}", "--checks", "all", "--phases", phases]
    command += ["--max-examples", str(examples), "--seed", "1", "--generation-deterministic"]
    command += ["--continue-on-failure", "--warnings", "off", "--report-ndjson-path", str(report)]
    output = place / "output.txt"
    code = run_while_it_reports(command, report, output)
    assert code in (0, 1) and report.exists(), output.read_text()[-3000:]
    events = [json.loads(line) for line in report.read_text().splitlines()]
    finished = [event["ScenarioFinished"]["recorder"] for event in events if "ScenarioFinished" in event]
    assert sum(len(recorder["cases"]) for recorder in finished) > 50, output.read_text()[-3000:]
    return [failure for recorder in finished for failure in list_failures(recorder)]


def list_failures(recorder: dict[str, Any]) -> Iterator[Failure]:
    """Yield the failures among the requests of one scenario."""
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


def describe_failures(found: list[Failure], exempt: tuple[Exemption, ...]) -> str:
    """Describe one failure per check, method and kind of target that no exemption covers; '' if all are covered."""
    left = [one for one in found if not any(exemption.covers(one) for exemption in exempt)]
    kinds = {(one.check, one.method, re.sub(r"[0-9a-f-]{36}.*|\?.*", "…", one.target)): one for one in left}
    return "\n".join(str(one) for one in kinds.values())


@pytest.mark.parametrize("user", ["admin", "member"])
def test_the_v2_api_passes_schemathesis_but_for_the_exemptions(
    fuzzed: KeystoneCloud, tmp_path: Path, user: str
) -> None:
    location = tmp_path / "v2.json"
    location.write_text(json.dumps(document()))
    found = run_schemathesis(fuzzed, tmp_path, user, str(location))
    assert not describe_failures(found, V2_EXEMPTIONS), describe_failures(found, V2_EXEMPTIONS)


@pytest.mark.parametrize("user", ["admin", "member"])
def test_our_own_api_passes_schemathesis_but_for_the_exemptions(
    fuzzed: KeystoneCloud, tmp_path: Path, user: str
) -> None:
    found = run_schemathesis(fuzzed, tmp_path, user, str(environments.ROOT / "docs" / "openapi.yaml"))
    assert not describe_failures(found, API_EXEMPTIONS), describe_failures(found, API_EXEMPTIONS)
