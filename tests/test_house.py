"""Test the house rules that a program can check.

They are about imports, exceptions, events, generated files, and the tests that a change selects.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import click
import pytest
from django.core import exceptions as django_exceptions
from rest_framework import exceptions as rest_exceptions

from drivers.errors import KINDS
from tests import changed
from tests.support import sharing, temporary
from tests.system.conftest import LONGEST_FIRST

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("drivers", "accelerators", "agents", "placement_sync", "cyborgweb", "tests")
SOURCES = [p for room in PACKAGES for p in sorted((ROOT / room).rglob("*.py")) if "migrations" not in p.parts]
ERROR_MODULES = ("accelerators/domain", "agents", "cyborgweb", "drivers", "placement_sync")
"""The folder of each package; the docstring of `errors.py` in it documents all exceptions of the package as a tree."""


@cache
def find_exceptions() -> dict[str, tuple[str, str]]:
    """Return every exception class of the product: its name → the name of its first base class, and its module."""
    libraries = (builtins, django_exceptions, rest_exceptions, click)
    classes = [value for library in libraries for value in vars(library).values() if isinstance(value, type)]
    known = {one.__name__ for one in classes if issubclass(one, BaseException)}
    unknown = [
        (node.name, [ast.unparse(base).rpartition(".")[2] for base in node.bases], ".".join(path.with_suffix("").parts))
        for path in (source.relative_to(ROOT) for source in SOURCES)
        if path.parts[0] != "tests"
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    found: dict[str, tuple[str, str]] = {}
    while new := {n: (bases[0], module) for n, bases, module in unknown if n not in found and known & {*bases}}:
        found |= new
        known |= {*new}
    return found


def read_documented_exceptions(errors_module: Path) -> dict[str, tuple[str, str]]:
    """Return the tree in the docstring of this file: name → name of the parent, and the module.

    Two blanks of indentation are one level.
    """
    parents, found = ["Exception"], {}
    for line in (ast.get_docstring(ast.parse(errors_module.read_text())) or "").splitlines():
        if entry := re.fullmatch(r" {4}((?:  )*)(\w+) +([\w.]+)", line):
            depth = len(entry[1]) // 2
            found[entry[2]] = (parents[depth], entry[3])
            parents[depth + 1 :] = [entry[2]]
    return found


def run_python(code: str) -> str:
    """Run code in a new Python interpreter and return what it prints. Fails if the exit status is not 0."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_exceptions_of_each_package_are_one_documented_tree() -> None:
    documented: dict[str, tuple[str, str]] = {}
    for folder in ERROR_MODULES:
        tree = read_documented_exceptions(ROOT / folder / "errors.py")
        assert [name for name, (parent, _) in tree.items() if parent == "Exception"] == [next(iter(tree))]
        assert {module.partition(".")[0] for _, module in tree.values()} == {folder.partition("/")[0]}
        documented |= tree
    assert find_exceptions() == documented


def test_the_names_of_exceptions_end_in_error() -> None:
    assert [name for name in find_exceptions() if not name.endswith("Error") and name not in KINDS] == []


@pytest.mark.system
def test_django_setup_imports_neither_openstack_nor_drf_spectacular() -> None:
    code = (
        "import django, sys; django.setup(); print([m for m in ('openstack', 'drf_spectacular') if m in sys.modules])"
    )
    assert run_python(f"import os; os.environ['DJANGO_SETTINGS_MODULE'] = 'cyborgweb.settings.base'; {code}") == "[]"


@pytest.mark.system
def test_the_agent_and_the_drivers_do_not_import_django() -> None:
    drivers = "drivers.isolation.runner, drivers.catalogue, drivers.pci.functions, drivers.fake.driver"
    modules = f"agents.host.main, agents.credentials, {drivers}"
    assert run_python(f"import {modules}, sys; print('django' in sys.modules)") == "False"


@pytest.mark.system
def test_the_supervisor_does_not_import_django() -> None:
    imported_later = "agents.gateway.announcements, cyborgweb.server.tls"
    code = f"import cyborgweb.server.supervisor, {imported_later}, sys; print('django' in sys.modules)"
    assert run_python(code) == "False"


def test_one_statement_inserts_events() -> None:
    inserting = [path.relative_to(ROOT) for path in SOURCES if "INSERT INTO accelerators_event" in path.read_text()]
    product = [path for path in inserting if path.parts[0] != "tests"]
    assert product == [Path("accelerators/conductor_sql.py")], "call `conductor_sql.build_event_insert`"


def test_one_function_registers_the_calls_after_a_commit_that_may_fail() -> None:
    registering = [path.relative_to(ROOT) for path in SOURCES if re.search(r"robust=True", path.read_text())]
    product = [path for path in registering if path.parts[0] != "tests"]
    assert product == [Path("accelerators/runtime/after_commit.py")], "call `after_commit.call_after_commit`"


def test_only_commands_of_manage_py_create_the_local_operator() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
    product = {name: text for name, text in texts.items() if not name.startswith("tests/")}
    assert [name for name, text in product.items() if re.search(r"\bis_local\W*=", text)] == [
        "accelerators/management/shell.py"
    ]
    assert [name for name, text in product.items() if "LocalRequest" in text] == [
        "cyborgweb/auth/authentication.py",
        "cyborgweb/management/local_api.py",
    ]


@pytest.mark.django_db
def test_migrations_match_the_models() -> None:
    from django.core.management import call_command

    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_the_configuration_page_equals_what_the_code_generates() -> None:
    from cyborgweb.management.commands.configuration_page import render_configuration_page

    assert (ROOT / "docs" / "configuration.md").read_text() == render_configuration_page(), "run `make docs`"


def test_tests_that_share_a_product_run_in_one_process() -> None:
    nova, sdk = (f"tests/system/clients/test_{name}.py::test_C1[a/b::c]" for name in ("nova", "openstacksdk"))
    assert sharing.group_of(nova) == sharing.group_of(sdk) == "tests/system/clients"
    for file in (*sharing.OWN_PRODUCT, "tests/system/test_kill.py"):
        assert sharing.group_of(f"{file}::test_it") == file
        assert (ROOT / file).exists()
    assert all("product" in (ROOT / folder / "conftest.py").read_text() for folder in sharing.FOLDERS)
    story, usage, live, keys = (
        f"{sharing.BROWSER_TESTS}/test_{n}.py" for n in ("story", "usage", "live", "keyboard_tasks")
    )
    assert (
        sharing.group_of(f"{story}::test_it") == sharing.group_of(f"{usage}::test_it") != sharing.group_of(f"{live}::a")
    )
    assert sharing.group_of(f"{keys}::test_it") == keys


def test_the_system_tests_that_begin_first_exist() -> None:
    groups = {sharing.group_of(f"{p.relative_to(ROOT)}") for p in (ROOT / "tests" / "system").rglob("test_*.py")}
    assert {*LONGEST_FIRST} <= {group.rpartition("/")[2] for group in groups}


def test_temporary_files_are_in_memory_only_if_it_has_space_and_nobody_chose_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tempfile.gettempdir()
    monkeypatch.delenv("TMPDIR", raising=False)
    assert temporary.choose_folder(tmp_path, 1) == str(tmp_path)
    assert temporary.choose_folder(tmp_path, 10**18) == temporary.choose_folder(tmp_path / "missing", 1) == usual
    monkeypatch.setenv("TMPDIR", usual)
    assert temporary.choose_folder(tmp_path, 1) == usual


def test_a_changed_file_selects_the_tests_of_its_package() -> None:
    assert changed.select_tests(["accelerators/admin/devices.py"]) == ["tests/cyborgweb/console", changed.ALWAYS_RUN]
    assert changed.select_tests(["agents/host/connection/link.py", "agents/wire.py", "agents/gateway/asgi_app.py"]) == [
        "tests/agents/gateway",
        "tests/agents/host/connection",
        "tests/agents/wire",
        changed.ALWAYS_RUN,
    ]
    assert changed.select_tests(["agents/models.py"]) == ["tests/agents", changed.ALWAYS_RUN]
    assert changed.select_tests(["tests/system/test_kill.py", "tests/qemu/boot.py"]) == [changed.ALWAYS_RUN]
    assert changed.select_tests(["tests/drivers/tree.py", "manage.py"]) == [
        "tests/cyborgweb/server",
        "tests/drivers",
        changed.ALWAYS_RUN,
    ]
    assert changed.select_tests(["tests/agents/host/fake_gateway.py"]) == ["tests/agents", changed.ALWAYS_RUN]
    assert changed.select_tests(["tests/agents/wire/transcripts/any.json"]) == ["tests/agents", changed.ALWAYS_RUN]
    assert changed.select_tests(["tests/bench/test_promises.py"]) == [
        "tests/bench/test_promises.py",
        changed.ALWAYS_RUN,
    ]
    assert changed.select_tests(["tests/conftest.py"]) == ["tests"]
    assert changed.select_tests(["tests/support/cache.py", "agents/wire.py"]) == ["tests"]
    assert all((ROOT / test).exists() for tests in changed.TESTS_BY_PREFIX.values() for test in tests)


def test_every_product_file_selects_at_least_one_test() -> None:
    product = [path.relative_to(ROOT) for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
    assert [path for path in product if not changed.tests_for_file(str(path))] == []
