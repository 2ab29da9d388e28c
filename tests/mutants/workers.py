"""Worker processes. Each has a copy of the checkout and a small virtual environment that imports from the copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tests.mutants.areas import ROOT
from tests.support.environment import without_settings

LEFT_OUT = ("tests/test_house.py", "tests/test_docs.py", "tests/system", "tests/qemu", "tests/browser", "tests/bench")
"""Tests that read the sources would detect a mutant by its text; the other ones do not belong to the fast lane."""


class WorkerError(RuntimeError):
    """A worker process ended or did not start; the text says where its output is."""


class Worker:
    """One process of `tests.mutants.worker`. All its files are in `folder`, none in the user's checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tests: list[str] = []
        self.import_lines: dict[str, list[int]] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: TextIO | None = None
        self._answers: TextIO | None = None

    def prepare(self) -> None:
        """Copy the checkout and create the virtual environment."""
        command = ["git", "ls-files", "-zco", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            target = self.folder / "tree" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, target)
        environment = self.folder / "venv"
        venv.EnvBuilder(symlinks=True).create(environment)
        packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
        own = environment / "lib" / packages.parent.name / "site-packages"
        # Not PYTHONPATH, because drivers start with `python -I`. The .pth file of the checkout is not read here.
        (own / "copy.pth").write_text(f"{self.folder / 'tree'}\n{packages}\n")
        for script in Path(sys.executable).parent.iterdir():
            if script.name in {"cyborg", "cyborg-agent"}:
                rest = script.read_text().split("\n", 1)[1]
                (environment / "bin" / script.name).write_text(f"#!{environment}/bin/python\n{rest}")
                (environment / "bin" / script.name).chmod(0o755)

    def start(self, *, trace_import: bool = False) -> None:
        """Start the process and wait until it has imported and collected all tests."""
        shutil.rmtree(self.folder / "t", ignore_errors=True)
        (self.folder / "t").mkdir()
        jobs, ours = os.pipe()
        theirs, answers = os.pipe()
        environment = without_settings(
            MUTANTS_JOBS=str(jobs), MUTANTS_ANSWERS=str(answers), TMPDIR=str(self.folder / "t")
        )
        environment |= {"MUTANTS_TRACE_IMPORT": "yes" if trace_import else "", "PYTHONDONTWRITEBYTECODE": ""}
        left_out = [f"--ignore={name}" for name in LEFT_OUT]
        command = [self.folder / "venv" / "bin" / "python", "-m", "pytest", "-s", "-p", "no:cacheprovider", *left_out]
        with (self.folder / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "-p", "tests.mutants.worker", "-m", "not system and not qemu and not browser"],
                cwd=self.folder / "tree",
                env=environment,
                pass_fds=(jobs, answers),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.close(jobs)
        os.close(answers)
        self._jobs, self._answers = os.fdopen(ours, "w", buffering=1), os.fdopen(theirs, "r")
        ready = self._answer()
        self.tests, self.import_lines = ready["ready"], ready["import_lines"]

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job and return the answer; raise WorkerError if the process ends meanwhile."""
        assert self._jobs
        try:
            print(json.dumps(job), file=self._jobs)
        except BrokenPipeError:
            raise WorkerError(f"a worker has ended: see {self.folder / 'output.txt'}") from None
        return self._answer()

    def stop(self) -> None:
        """Close the pipe and wait for the process, so that its database server ends too; kill it after 30 s."""
        if self._process and self._jobs:
            self._jobs.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._jobs = None

    def _answer(self) -> dict[str, Any]:
        assert self._answers
        if not (line := self._answers.readline()):
            raise WorkerError(f"a worker has ended: see {self.folder / 'output.txt'}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def prepare_workers(count: int) -> Iterator[list[Worker]]:
    """Yield prepared workers that are not started; remove their folders at the end, and those of killed runs now."""
    above = Path(tempfile.gettempdir())
    for old in above.glob("mutants-*-*"):
        if not Path(f"/proc/{old.name.split('-')[1]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"mutants-{os.getpid()}-"))
    workers = [Worker(folder / str(number)) for number in range(count)]
    try:
        for worker in workers:
            worker.folder.mkdir()
            worker.prepare()
        yield workers
    finally:
        for worker in workers:
            worker.stop()
        shutil.rmtree(folder, ignore_errors=True)
