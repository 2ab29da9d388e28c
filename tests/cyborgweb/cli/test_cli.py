"""Test the `cyborg` command: help, login, the output formats of lists, names, and refusals with their exit codes."""

from __future__ import annotations

import csv
import json
import re
import ssl
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import User as Person
from hypothesis import given
from hypothesis import strategies as st

from accelerators import conductor
from accelerators.models import Command, Device
from cyborgweb.auth.keystone import service_session
from cyborgweb.cli import connection, many_targets, options, output
from cyborgweb.cli.exit_codes import ExitCode, to_printable_line
from cyborgweb.cli.main import VERB_COMMANDS
from cyborgweb.models import ApiToken, SavedView
from cyborgweb.server import tls
from cyborgweb.settings.keys import Keys, get_keys
from drivers.inventory import Backend
from tests.cyborgweb.cli.conftest import Cyborg, assert_refused, run_cyborg
from tests.support.keystone import Keystone, User, vouching
from tests.support.reports import (
    apply_report,
    create_heard_host,
    get_or_create_host,
    make_card,
    make_driver_report,
)

ROOT = Path(__file__).resolve().parents[3]
UNREACHABLE_URL = "http://127.0.0.1:1"
LISTS_WITHOUT_VIEWS = {"image-list"}
"""Lists that the console does not have."""
uses_database = pytest.mark.django_db(transaction=True)


@pytest.mark.slow
def test_help_loads_no_heavy_modules_and_every_verb_has_an_example() -> None:
    heavy = "[m for m in ('django', 'requests', 'keystoneauth1', 'yaml', 'openstack') if m in sys.modules]"
    code = f"import sys; from cyborgweb.cli.main import cli; cli(['--help'], standalone_mode=False); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("[]\n") and all(verb.name in done.stdout for verb in VERB_COMMANDS)
    for verb in VERB_COMMANDS:
        told = run_cyborg(verb.name or "", "--help")
        assert told.exit_code == 0 and f"Example:\n    cyborg {verb.name} " in told.output, told.output


def test_the_manual_describes_every_verb_and_every_exit_code() -> None:
    manual = (ROOT / "docs" / "cli.md").read_text()
    assert [verb.name for verb in VERB_COMMANDS if f"$ cyborg {verb.name} " not in manual.replace("\n", " ")] == []
    assert [code for code in ExitCode if f"| {code.value} |" not in manual] == []


def test_verbs_that_read_names_from_standard_input_say_so() -> None:
    readers = [verb for verb in VERB_COMMANDS if any(one.callback is options.read_dash for one in verb.params)]
    assert len(readers) > 1
    assert [verb.name for verb in readers if "standard input" not in " ".join((verb.help or "").split())] == []


def read_verbs_of_manual(heading: str) -> list[set[str]]:
    """Return the verbs in the first cell of each row of the table of `docs/cli.md` with this heading."""
    table = (ROOT / "docs" / "cli.md").read_text().partition(f"{heading}\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.split("|")[1].partition("for example")[0] for line in table.splitlines()]
    return [set(cell.split("`")[1::2]) - {"--count"} for cell in cells]


def test_the_manual_names_exactly_the_verbs_that_ask_for_confirmation() -> None:
    asking = {verb.name for verb in VERB_COMMANDS if any("--yes" in one.opts for one in verb.params)}
    assert set.union(*read_verbs_of_manual("| verbs | ask |")) == asking


def test_the_manual_names_exactly_the_verbs_whose_dry_run_does_more_than_print_the_request() -> None:
    dry_runs = {verb.name: one for verb in VERB_COMMANDS for one in verb.params if "--dry-run" in one.opts}
    asking_service, using_no_service, others = read_verbs_of_manual("| verbs | `--dry-run` |")
    assert using_no_service == {"announcement-key", "announce-certificate"} and not others
    assert asking_service | using_no_service == {name for name, one in dry_runs.items() if one.expose_value}


def test_every_verb_that_changes_something_has_a_dry_run() -> None:
    changing = [verb for verb in VERB_COMMANDS if not re.search(r"-list$|-show$", verb.name or "")]
    missing = {verb.name for verb in changing if not any("--dry-run" in one.opts for one in verb.params)}
    assert missing == {"completion", "load-census", "usage"}


@uses_database
def test_every_list_can_be_limited_to_a_saved_view(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 2)
    device = Device.objects.order_by("key")[1]
    owner = Person.objects.get()
    views = [("device", f"q={device.address}"), ("agents.agent", "q=no-such-row")]
    for model, query in views:
        of = model if "." in model else f"accelerators.{model}"
        SavedView.objects.create(user=owner, of=of, name="mine", query=query)
    assert cyborg("device-list", "--saved-view", "mine", "--quiet").stdout.split() == [str(device.uuid)]
    assert json.loads(cyborg("agent-list", "--saved-view", "mine", "--json").stdout) == []
    lists = {verb.name for verb in VERB_COMMANDS if (verb.name or "").endswith("-list")} - {"device-list", "agent-list"}
    assert len(lists) > 8
    for name in lists - LISTS_WITHOUT_VIEWS:
        assert_refused(cyborg(name, "--saved-view", "mine"), ExitCode.REFUSED, "you have no saved view 'mine'")


@uses_database
def test_a_dry_run_prints_the_request_and_changes_nothing(cyborg: Cyborg) -> None:
    host = create_heard_host("cmp1", 1)
    revocation = f'POST /api/agents/{host.uuid}/revoke/ {{"reason": "stolen"}}'
    for words, request in {
        (
            "agent-revoke",
            host.name,
            "--reason",
            "stolen",
        ): revocation,
        ("join-token-delete", "12"): "DELETE /api/join_tokens/12/",
        ("host-rescan", host.name): f'POST /api/commands/ {{"op": "rescan", "host": "{host.uuid}"}}',
        ("discover-services", "--all-hosts"): f'POST /api/commands/ {{"op": "rescan", "host": "{host.uuid}"}}',
    }.items():
        done = cyborg(*words, "--dry-run")
        assert (done.exit_code, done.stdout) == (0, f"{request}\n"), done.output
    assert not Command.objects.exists()


def test_shell_completion_offers_verbs_and_option_values() -> None:
    assert "_CYBORG_COMPLETE=zsh_complete" in run_cyborg("completion", "zsh").output
    for words, offered in (
        ("cyborg dri", "driver-list"),
        ("cyborg device-list --state mis", "missing"),
        ("cyborg accelerator-update --ba", "--backend"),
        ("cyborg bulk-show --li", "--limit"),
    ):
        complete = {"_CYBORG_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert f"plain,{offered}\n" in run_cyborg(**complete).output


@uses_database
def test_a_list_can_be_printed_as_table_json_yaml_and_csv(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 3)
    table = cyborg("device-list", "--host", "cmp1").stdout.splitlines()
    assert table[0].split()[:3] == ["uuid", "state", "status"] and len(table) == 4
    assert "inactive" in table[1] and "cmp1" in table[1] and "0000:00:00.0" in table[1]
    whole = json.loads(cyborg("device-list", "--format", "json").stdout)
    assert [row["address"] for row in whole] == ["0000:00:00.0", "0000:01:00.0", "0000:02:00.0"]
    assert whole[0]["host"]["name"] == "cmp1" and whole[0]["next_actions"]
    some = yaml.safe_load(cyborg("--format", "yaml", "--columns", "address,host.name", "device-list").stdout)
    assert some[2] == {"address": "0000:02:00.0", "host.name": "cmp1"}
    rows = list(csv.DictReader(cyborg("device-list", "-f", "csv", "-c", "uuid,host,held").stdout.splitlines()))
    assert rows[0] == {"uuid": whole[0]["uuid"], "host": "cmp1", "held": "0"}
    nothing = cyborg("device-list", "--host", "cmp9")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "No devices.\n")
    assert_refused(cyborg("device-list", "-c", "colour"), 2, "There is no column colour. The columns are uuid, state")
    assert (
        cyborg("agent-list", "--state", "up", "-c", "host,version", "-f", "csv").stdout == "host,version\ncmp1,0.1.0\n"
    )


@uses_database
def test_devices_are_listed_by_health_and_backends_by_whether_they_fail(cyborg: Cyborg) -> None:
    failed, good = make_card(1, status="failed", backend="nics"), make_card(2, status="ok")
    backends = Backend("nics", "pci", error="the kernel holds it"), Backend("disks", "pci")
    apply_report(get_or_create_host("cmp1"), make_driver_report(failed, good, backends=backends))
    devices = ("device-list", "-f", "csv", "-c", "address", "--health")
    assert cyborg(*devices, "ok").stdout.split() == ["address", "0000:02:00.0"]
    assert cyborg(*devices, "ok", "--health", "degraded").stdout.split() == ["address", "0000:02:00.0"]
    names = ("backend-list", "-f", "csv", "-c", "name")
    assert cyborg(*names, "--failing").stdout.split() == ["name", "nics"]
    assert cyborg(*names, "--answering").stdout.split() == ["name", "disks"]


@uses_database
def test_pages_are_followed_to_the_end_or_the_limit(cyborg: Cyborg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAGE_SIZE", 2)
    create_heard_host("cmp1", 5)
    words = ("device-list", "--state", "inactive", "--state", "ready", "-f", "json", "-c", "address")
    assert len(json.loads(cyborg(*words).stdout)) == 5
    some = cyborg(*words, "--limit", "3")
    assert len(json.loads(some.stdout)) == 3 and some.stderr == (
        "Only the first 3 rows are shown. Give a larger --limit to see more.\n"
    )


@uses_database
@pytest.mark.slow
def test_a_device_can_be_named_by_uuid_beginning_of_uuid_or_host_and_address(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 2)
    device = Device.objects.get(address="0000:01:00.0")
    for name in (str(device.uuid), str(device.uuid)[:13].upper(), "cmp1/0000:01:00.0"):
        assert json.loads(cyborg("device-show", name, "-f", "json").stdout)["uuid"] == str(device.uuid)
    shown = [line.split() for line in cyborg("device-show", "cmp1/0000:01:00.0").stdout.splitlines()]
    assert ["host", "cmp1", f"({device.host.uuid})"] in shown and [
        "next_actions",
        "enable,",
        "quarantine,",
        "retire",
    ] in shown
    assert_refused(cyborg("device-show", "cmp1/0000:07:00.0"), 3, "no device 'cmp1/0000:07:00.0'", "device-list")
    assert_refused(cyborg("device-show", "the fast one"), 2, "give its uuid")
    with conductor.writing():
        for n, one in enumerate(Device.objects.all()):
            Device.objects.filter(pk=one.pk).update(uuid=f"abcd{n:04}-0000-4000-8000-000000000000")
    assert_refused(cyborg("device-show", "abcd"), 3, "'abcd' is not one device but 2", "give more of its uuid")
    assert "abcd0001" in cyborg("device-show", "abcd0001").stdout


@uses_database
@pytest.mark.slow
def test_refusals_have_their_exit_codes_and_say_what_to_do(cyborg: Cyborg, url: str, tmp_path: Path) -> None:
    create_heard_host("cmp1", 1)
    assert_refused(run_cyborg("device-list"), 4, "CYBORG_URL", "OS_…")
    assert_refused(run_cyborg("device-list", CYBORG_TOKEN="abc"), 2, "--url")
    assert_refused(run_cyborg("device-list", "--url", url, "--token", "a\nb"), 2, "This is no token")
    assert_refused(run_cyborg("device-list", "--url", url, "--token", "nope"), 4, "token is not known")
    assert_refused(run_cyborg("device-list", "--url", "ftp://x", "--token", "abc"), 2, "no address")
    assert_refused(
        run_cyborg("device-list", "--url", UNREACHABLE_URL, "--token", "abc"),
        5,
        UNREACHABLE_URL,
        "(Connection refused)",
    )
    assert_refused(
        run_cyborg("device-list", "--url", url, "--token-file", str(tmp_path / "none")),
        2,
        "cannot be read: No such file",
    )
    assert_refused(cyborg("device-list", role="member"), 4, "cyborg:inventory:get_all", "[not_allowed]")
    assert_refused(cyborg("device-show", "00000000-0000-4000-8000-000000000000"), 3, "nothing here", "[not_found]")
    assert_refused(cyborg("device-ready", "cmp1/0000:00:00.0", "--reason", "x" * 501), 2, "at most 500")
    assert_refused(cyborg("device-retire", "cmp1/0000:00:00.0"), 2, "give --yes")
    assert cyborg("device-ready", "cmp1/0000:00:00.0").exit_code == 0
    assert_refused(cyborg("device-retire", "cmp1/0000:00:00.0", "--yes"), 1, "drain or disable it first. [conflict]")


@uses_database
def test_discover_services_without_hosts_succeeds(cyborg: Cyborg) -> None:
    assert cyborg("discover-services", "--all-hosts").exit_code == 0


@uses_database
@pytest.mark.slow
def test_an_action_on_several_devices_reports_each_outcome_and_exits_with_6(cyborg: Cyborg) -> None:
    create_heard_host("cmp1", 2)
    two = ("cmp1/0000:00:00.0", "cmp1/0000:01:00.0")
    assert cyborg("device-ready", two[0]).exit_code == 0
    done = cyborg("device-retire", *two, "--yes", "-f", "json")
    assert done.exit_code == 6, done.output
    assert {(row["device"][-12:], row["outcome"], row["reason"]) for row in json.loads(done.stdout)} == {
        ("0000:00:00.0", "refused", "conflict"),
        ("0000:01:00.0", "done", ""),
    }
    unknown = "00000000-0000-4000-8000-000000000000"
    assert_refused(cyborg("device-maintain", two[0], unknown), 1, f"There is no device {unknown}", "[invalid]")
    assert Device.objects.get(address="0000:00:00.0").state == "ready"
    assert_refused(cyborg("device-ready", *two, role="manager"), 4, "[not_allowed]")


@uses_database
@pytest.mark.parametrize(("wrong", "code"), [("cmp1/0000:09:00.0", 3), ("abcdabcd", 3), ("the fast one", 2)])
def test_a_wrong_name_among_devices_changes_none(cyborg: Cyborg, wrong: str, code: int) -> None:
    create_heard_host("cmp1", 2)
    words = ("device-ready", "cmp1/0000:00:00.0", wrong, "cmp1/0000:01:00.0")
    assert_refused(cyborg(*words), code, f"{wrong!r}")
    assert Device.objects.filter(state="inactive").count() == 2


@uses_database
def test_a_token_file_may_contain_the_output_of_manage_py_api_token(cyborg: Cyborg, url: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = ApiToken.create_with_secret("me", Person.objects.get(), ["admin"], "p1")
    file.write_text(f"Token 'me' with the role admin:\n{token}\n")
    assert run_cyborg("device-list", CYBORG_URL=f"{url}/api/", CYBORG_TOKEN_FILE=str(file)).exit_code == 0
    assert (
        run_cyborg("device-list", "--url", url, "--token-file", str(file), CYBORG_TOKEN="x").stderr == "No devices.\n"
    )


CLOUDS_YAML = """
clouds:
  ours:
    auth: {{auth_url: "{url}", username: alice, password: "{password}", project_name: p1,
           user_domain_name: Default, project_domain_name: Default}}
    region_name: north
"""


@uses_database
@pytest.mark.slow
def test_the_cloud_is_taken_from_clouds_yaml_or_from_the_environment(url: str, tmp_path: Path) -> None:
    with vouching() as keystone:
        keystone.users.append(User("alice", "secret", {"p1": ["admin"]}))
        service_session(), get_keys()  # the service reads its own variables before the command is given others
        original_log_in = keystone.log_in

        def with_catalogue(wanted: dict[str, Any]) -> str | None:
            secret = original_log_in(wanted)
            endpoint = {"interface": "public", "region_id": "north", "region": "north", "id": "e"}
            if secret:
                there = [endpoint | {"url": f"{url}/accelerator/v2"}]
                keystone.tokens[secret]["catalog"] = [
                    {"type": "accelerator", "id": "s", "name": "", "endpoints": there}
                ]
            return secret

        credentials = {
            "OS_AUTH_URL": keystone.url,
            "OS_USERNAME": "alice",
            "OS_PASSWORD": "secret",
            "OS_PROJECT_NAME": "p1",
        }
        credentials |= {"OS_USER_DOMAIN_NAME": "Default", "OS_PROJECT_DOMAIN_NAME": "Default"}
        assert run_cyborg("device-list", "--url", url, **credentials).stderr == "No devices.\n"
        assert_refused(run_cyborg("device-list", **credentials), 2, "no service of type accelerator", "--url")
        keystone.log_in = with_catalogue  # type: ignore[method-assign]
        assert run_cyborg("device-list", **credentials).stderr == "No devices.\n"
        assert_refused(run_cyborg("device-list", **credentials | {"OS_PASSWORD": "wrong"}), 4, "not logged in")
        assert_refused(
            run_cyborg("device-list", OS_AUTH_TYPE="magic", OS_AUTH_URL=keystone.url), 2, "OS_… variables", "magic"
        )
        assert_refused(
            run_cyborg("device-list", **credentials | {"OS_AUTH_URL": UNREACHABLE_URL}), 5, "Keystone cannot be reached"
        )
        clouds = tmp_path / "clouds.yaml"
        clouds.write_text(CLOUDS_YAML.format(url=keystone.url, password="secret"))
        clouds_file = {"OS_CLIENT_CONFIG_FILE": str(clouds)}
        assert run_cyborg("--os-cloud", "ours", "device-list", **clouds_file).stderr == "No devices.\n"
        assert_refused(
            run_cyborg("device-list", OS_CLOUD="theirs", **clouds_file), 2, "The cloud 'theirs' cannot be used"
        )
        stale = clouds_file | {"CYBORG_URL": url, "CYBORG_TOKEN": "stale"}
        assert_refused(run_cyborg("device-list", OS_CLOUD="ours", **stale), 4, "token is not known")
        assert run_cyborg("device-list", "--os-cloud", "ours", **stale).stderr == "No devices.\n", (
            "what is typed goes first"
        )
        assert run_cyborg("--os-cloud", "ours", "device-list", **stale).stderr == "No devices.\n"
        assert_refused(
            run_cyborg("--os-cloud", "ours", "device-list", "--token", "abc", **clouds_file),
            2,
            "Give only one of --token",
        )
        assert (
            isinstance(keystone, Keystone)
            and "secret" not in run_cyborg("device-list", OS_CLOUD="theirs", **clouds_file).output
        )


class ForeignServer(BaseHTTPRequestHandler):
    """An HTTP server that is not the conductor. It answers every request with `response` (status, content type, body,
    Location), and appends its path to `requested_paths`."""

    response = (200, "text/html", "<html>", "")
    requested_paths: list[str] = []

    def do_GET(self) -> None:
        """Send `response`."""
        status, kind, body, location = self.response
        self.requested_paths.append(self.path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Location", location) if location else None
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


@contextmanager
def run_foreign_server(context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run a ForeignServer on a free port, with TLS if a context is given; yield the port."""
    server = HTTPServer(("127.0.0.1", 0), ForeignServer)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    ForeignServer.requested_paths = []
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def strange() -> Iterator[str]:
    with run_foreign_server() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ((200, "text/html", "<html>", ""), 5, "answered 200, but not as this API does"),
        ((404, "text/html", "<html>", ""), 3, "answered 404, but not as this API does"),
        (
            (302, "text/html", "", f"{UNREACHABLE_URL}/login"),
            5,
            f"redirects to {UNREACHABLE_URL}/login: give the right",
        ),
        ((503, "application/json", '{"error_message": "The service is busy: try again in a second."}', ""), 5, "busy"),
        (
            (500, "application/json", '{"error": {"message": "It failed.", "request_id": "req-1"}}', ""),
            1,
            "(request req-1)",
        ),
        ((409, "application/json", '{"error": {"message": "It is.", "reason": "in_use"}}', ""), 1, "It is. [in_use]"),
        ((200, "application/json", '{"rows": []}', ""), 5, "/api/devices/ answered no list"),
    ],
)
def test_answers_of_a_foreign_server_are_reported_as_errors(
    strange: str, answer: tuple[int, str, str, str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForeignServer, "response", answer)
    result = run_cyborg("device-list", "--url", strange, "--token", "abc")
    assert_refused(result, code, says)
    assert result.stderr.rstrip().endswith("]") == ('"reason"' in answer[2]), "only a stable code is in brackets"
    assert len(ForeignServer.requested_paths) == 1


def test_a_keystone_that_cannot_log_users_in_is_named_with_its_answer(
    strange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForeignServer, "response", (503, "text/html", "<html>", ""))
    login = {"OS_AUTH_URL": f"{strange}/v3", "OS_USERNAME": "alice", "OS_PASSWORD": "secret", "OS_PROJECT_NAME": "p1"}
    login |= {"OS_USER_DOMAIN_NAME": "Default", "OS_PROJECT_DOMAIN_NAME": "Default"}
    result = run_cyborg("device-list", "--url", strange, **login)
    assert_refused(result, 5, "cannot log users in now: ", "(HTTP 503)")


def test_a_silent_server_is_given_up_after_the_timeout() -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert_refused(
            run_cyborg("device-list", "--url", url, "--token", "a", "--timeout", "0.1"),
            5,
            "did not answer within 0.1 s",
        )
        uuid = "00000000-0000-4000-8000-000000000000"
        assert_refused(
            run_cyborg("device-ready", uuid, "--url", url, "--token", "a", "--timeout", "0.1"), 5, "may have been made"
        )


def test_each_row_of_several_targets_has_an_outcome_and_a_text() -> None:
    rows = many_targets.run_for_each(["a", "b"], lambda target: {"target": target})
    assert rows == [{"outcome": "done", "text": "", "target": target} for target in "ab"]


random_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(st.tuples(random_texts, random_texts, random_texts), min_size=1, max_size=8), st.integers(40, 120))
def test_a_table_fits_its_width_and_contains_no_control_characters(rows: list[tuple[str, ...]], width: int) -> None:
    lines = list(
        output.format_table_lines(
            [("a", "b", "c"), *([to_printable_line(text) for text in row] for row in rows)], width
        )
    )
    assert len(lines) == len(rows) + 1
    assert all(len(line) <= width and line.isprintable() for line in lines)


def test_long_texts_in_a_table_are_wrapped_instead_of_cut() -> None:
    sentence = "the driver says that there is no memory for as many functions as that"
    rows = [("host", "text"), ("cmp1.example", sentence), ("cmp2", "done")]
    lines = list(output.format_table_lines(rows, 40))
    assert len(lines) == 5 and all(len(line) <= 40 for line in lines)
    assert " ".join(line[14:].strip() for line in lines[1:-1]) == sentence
    assert list(output.format_table_lines(rows, 0))[1] == f"cmp1.example  {sentence}"
    uuid = "6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b"
    assert list(output.format_table_lines([("uuid", "host"), (uuid, "cmp1")], 30))[1] == "6a0c1d0e-0a53  cmp1"


@given(random_texts, random_texts)
def test_csv_cells_cannot_be_spreadsheet_formulas(first: str, second: str) -> None:
    written = output._format_csv([[f"={first}", f"{first};={second}"]])
    for separator in (",", ";", "|"):
        cells = next(csv.reader([written], delimiter=separator))
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in cells)


def test_an_untrusted_certificate_is_refused_unless_insecure_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForeignServer, "response", (503, "application/json", '{"error_message": "It is busy."}', ""))
    tls.read_fingerprint(Keys(state_dir=str(tmp_path)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / tls.CERTIFICATE_FILE)
    with run_foreign_server(context) as port:
        arguments = ("device-list", "--url", f"https://localhost:{port}", "--token", "nope")
        assert_refused(run_cyborg(*arguments), 5, "cannot be trusted (self-signed certificate)", "--cacert")
        with warnings.catch_warnings(record=True) as caught:
            assert_refused(run_cyborg(*arguments, "--insecure"), 5, "It is busy.")
        assert not caught
