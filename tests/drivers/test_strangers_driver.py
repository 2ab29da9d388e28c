"""Test that the instructions of docs/writing-a-driver.md work: its files become a package and its commands are run.

The package is installed into a temporary virtual environment on top of ours. Driver processes find it by its entry
point.
"""

from __future__ import annotations

import asyncio
import os
import re
import site
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

from drivers.generic import settings as generic
from drivers.inventory import Sample
from drivers.isolation.runner import DriverProcess
from drivers.plan import Ask
from tests.support import kernel
from tests.support.environment import without_settings

ROOT = Path(__file__).resolve().parents[2]
FENCED_BLOCK = re.compile(r"^```\w+ (?P<name>\S+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {one["name"]: one["text"] for one in FENCED_BLOCK.finditer((ROOT / "docs/writing-a-driver.md").read_text())}
"""The blocks of the document that have a file name in the line of the fence, by that name."""
DEVICE = "pci:0000:00:0b.0"


class DocumentedDriver:
    """A folder with the document's files, and a virtual environment of its own."""

    def __init__(self, root: Path) -> None:
        self.folder, self.bin = root / "npu", root / "venv/bin"
        self.folder.mkdir()
        for name, text in BLOCKS.items():
            (self.folder / name).write_text(text)
        venv.create(root / "venv", symlinks=True)
        (packages,) = (root / "venv").glob("lib/python*/site-packages")
        below = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        (packages / "below.pth").write_text("".join(below))
        program = self.bin / "cyborg-agent"
        program.write_text(f"#!{self.bin}/python\nfrom agents.host.main import main\n\nraise SystemExit(main())\n")
        program.chmod(0o755)

    def run(self, script: str) -> str:
        """Run one of the document's scripts in a shell in that environment; return what it prints."""
        more = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        done = subprocess.run(
            ["sh", "-e", script],
            cwd=self.folder,
            env=without_settings(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_the_documented_settings_of_the_generic_driver_are_valid() -> None:
    backends = generic.parse_backends(tomllib.loads(BLOCKS["drivers.toml"])["generic_driver"])
    assert {name: kind.kind for name, kind in backends.items()} == {
        "disks": "pci",
        "nics": "pci",
        "vgpu": "mdev",
        "npu": "accel-class",
    }


@pytest.mark.system
def test_the_documented_driver_can_be_installed_tested_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for its own tests, a run by hand, `--once` and the runner, because installing takes seconds."""
    stranger = DocumentedDriver(tmp_path)
    assert " passed" in stranger.run("install.sh")
    if reason := kernel.why_level_1_is_missing():
        pytest.skip(reason)
    manifest, report, *rest = stranger.run("by-hand.sh").splitlines()
    assert manifest.startswith('{"ready":{"name":"npu","version":"1.0","api":1,')
    assert f'"devices":[{{"key":"{DEVICE}"' in report
    assert rest == BLOCKS["by-hand.json"].splitlines()
    assert stranger.run("once.sh") == BLOCKS["once.txt"]
    monkeypatch.setenv("LD_PRELOAD", "libumockdev-preload.so.0")
    monkeypatch.setenv("UMOCKDEV_DIR", str(stranger.folder / "host"))
    asyncio.run(check_with_runner(stranger))


async def check_with_runner(stranger: DocumentedDriver) -> None:
    """Run the driver as the agent does, confined and over the pipe, and check its answers."""
    process = DriverProcess(
        "npu", "cmp1", {}, command=[f"{stranger.bin}/python", "-I", "-m", "drivers.isolation.driver_main", "npu"]
    )
    try:
        report = await process.discover()
        shown = [(device.key, device.to_install) for device in report.devices]
        assert shown == [(DEVICE, "let 0000:00:0b.0 stay awake")], report
        assert (await process.plan("install", Ask(DEVICE))).said == "awake"
        assert not (await process.plan("uninstall", Ask(DEVICE))).steps
        assert (await process.health(Ask(DEVICE))).samples[0].value == 2.5
        assert await process.samples([Ask(DEVICE)]) == (Sample(DEVICE, "busy_seconds_total", 2.5),)
    finally:
        await process.close()
