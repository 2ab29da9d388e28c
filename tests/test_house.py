"""The house rules that a machine can check: who imports whom, how big things are, what is generated."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import changed
from tests.support import sharing

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("drivers", "accelerators", "agents", "placement_sync", "cyborgweb", "tests")
SOURCES = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")) if "migrations" not in p.parts]
MAX_FILE, MAX_FUNCTION = 400, 60


def python(code: str) -> str:
    """What a fresh interpreter prints."""
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


def faults_of(path: Path, root: Path = ROOT) -> list[str]:
    """Return what is wrong with one source file; each entry names the file."""
    text, name = path.read_text(), path.relative_to(root)
    tree = ast.parse(text)
    found = [] if ast.get_docstring(tree) else [f"{name}: the module has no docstring"]
    if text.count("\n") > MAX_FILE:
        found.append(f"{name}: more than {MAX_FILE} lines")
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION:
            found.append(f"{name}: {node.name} has {MAX_FUNCTION} lines or more")
    return found


def test_files_and_functions_stay_small_and_say_what_they_are() -> None:
    assert len(SOURCES) > 600
    assert [fault for path in SOURCES for fault in faults_of(path)] == []


def test_a_large_file_a_long_function_and_a_missing_docstring_are_found(tmp_path: Path) -> None:
    written = tmp_path / "bad.py"
    written.write_text("def f():\n" + "    x = 1\n" * MAX_FILE)
    faults = faults_of(written, tmp_path)
    assert len(faults) == 3 and all(fault.startswith("bad.py") for fault in faults), faults


def test_start_up_does_not_import_what_it_does_not_need() -> None:
    code = (
        "import django, sys; django.setup(); print([m for m in ('openstack', 'drf_spectacular') if m in sys.modules])"
    )
    assert python(f"import os; os.environ['DJANGO_SETTINGS_MODULE'] = 'cyborgweb.settings.base'; {code}") == "[]"


def test_the_agent_and_the_drivers_never_see_django() -> None:
    modules = "agents.host.main, agents.credentials, drivers.runner, drivers.catalogue, drivers.pci, drivers.fake"
    assert python(f"import {modules}, sys; print('django' in sys.modules)") == "False"


def test_the_supervisor_never_sees_django() -> None:
    assert python("import cyborgweb.serve, sys; print('django' in sys.modules)") == "False"


@pytest.mark.django_db
def test_migrations_match_the_models() -> None:
    from django.core.management import call_command

    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_the_configuration_page_is_the_codes() -> None:
    from cyborgweb.management.commands.configuration_page import page

    assert (ROOT / "docs" / "configuration.md").read_text() == page(), "run `make docs`"


def test_tests_that_share_a_product_run_in_one_process() -> None:
    nova, sdk = (f"tests/system/clients/test_{name}.py::test_C1[a/b::c]" for name in ("nova", "openstacksdk"))
    assert sharing.group_of(nova) == sharing.group_of(sdk) == "tests/system/clients"
    for file in (*sharing.OWN_PRODUCT, "tests/system/test_kill.py"):
        assert sharing.group_of(f"{file}::test_it") == file
        assert (ROOT / file).exists()
    assert all("product" in (ROOT / folder / "conftest.py").read_text() for folder in sharing.FOLDERS)


def test_a_change_selects_its_own_tests() -> None:
    assert changed.selected(["accelerators/admin/devices.py"]) == ["tests/console", changed.ALWAYS]
    assert changed.selected(["agents/host/link.py", "agents/wire.py"]) == ["tests/agents", changed.ALWAYS]
    assert changed.selected(["tests/system/test_kill.py", "README.md"]) == [changed.ALWAYS]
    assert changed.selected(["tests/support/cache.py", "agents/wire.py"]) == ["tests"]
    assert all((ROOT / test).exists() for tests in changed.TESTS_OF.values() for test in tests)


def test_every_product_file_belongs_to_some_tests() -> None:
    product = [path.relative_to(ROOT) for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
    assert [path for path in product if not changed.tests_of(str(path))] == []
