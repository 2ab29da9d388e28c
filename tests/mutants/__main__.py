"""`python -m tests.mutants --sample 400 --seed 1 [--resume]`: plant faults in copies of the core and run its tests.

Results are stored in `var/mutants`; the checkout is not changed. Print the table, and write it with the survivors to
`var/mutants/figures.md`. The exit status is 0 if enough mutants were detected, 1 if not, 2 if this could not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivers.isolation.process import die_with_parent
from tests.mutants import state
from tests.mutants.areas import ROOT
from tests.mutants.choosing import Recording
from tests.mutants.figures import Run, survivors, table, verdict
from tests.mutants.mutant import Mutant
from tests.mutants.mutating import draw_sample, format_diff, list_all_mutants, mutate_source
from tests.mutants.workers import Worker, WorkerError, prepare_workers

WANTED = 0.9
MAX_FAILING_SHARE = 0.02
"""Share of the tests that may fail without a mutant. If more fail, the runner is at fault, not the tests."""
RECORD_S, FLOOR_S, FACTOR, COLD_S = 1800.0, 20.0, 5.0, 60.0


def main() -> int:
    """Run the mutants and return the exit status, as the docstring of this module describes it."""
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=400, help="how many mutants are drawn (400)")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing (1)")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (2)")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped or killed")
    parser.add_argument("--again", action="store_true", help="after tests were added: only the survivors, once more")
    parser.add_argument("--table", action="store_true", help="only print the figures of the last run")
    arguments = parser.parse_args()
    die_with_parent()
    product = state.product_hash()
    results = state.Lines(f"results-{product}-{arguments.seed}-{arguments.sample}.jsonl")
    if not (arguments.resume or arguments.again or arguments.table):
        results.set_aside()
    counts, sample = _load_or_draw_sample(product, arguments.sample, arguments.seed)
    run = Run(arguments.seed, state.commit(), len(sample), counts)
    if not arguments.table:
        try:
            with prepare_workers(arguments.workers) as workers:
                _Session(workers, product, results, arguments).run(sample)
        except WorkerError as error:
            print(f"mutants: {error}; --resume goes on", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nmutants: stopped; --resume goes on", file=sys.stderr)
            return 2
    wanted = {mutant.key for mutant in sample}
    latest = {result["key"]: result for result in results if result["key"] in wanted}
    return _report(run, list(latest.values()))


def _load_or_draw_sample(product: str, size: int, seed: int) -> tuple[dict[str, int], list[Mutant]]:
    """Return the number of mutants by area, and the sample; both are stored, as parsing takes half a minute."""
    sources = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("areas", "mutating", "operators")]
    operators = hashlib.sha256(b"".join(sources)).hexdigest()
    kept = state.FOLDER / f"sample-{product}-{seed}-{size}-{operators[:8]}.json"
    if not kept.exists():
        everything = list_all_mutants()
        sample = [asdict(mutant) for mutant in draw_sample(size, seed, everything)]
        counts = {name: len(each) for name, each in everything.items()}
        state.FOLDER.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"counts": counts, "sample": sample}))
    text = json.loads(kept.read_text())
    return text["counts"], [Mutant(**each) for each in text["sample"]]


def _report(run: Run, results: list[dict[str, Any]]) -> int:
    text = f"{table(run, results)}\n\n{survivors(results)}"
    state.FOLDER.mkdir(parents=True, exist_ok=True)
    (state.FOLDER / "figures.md").write_text(text + "\n")
    print(text)
    real = [verdict(result) for result in results if verdict(result) != "equivalent"]
    return int(not real or sum(each != "survived" for each in real) / len(real) < WANTED)


class _Session:
    """One run: start the workers, record which test executes which line, try the mutants."""

    def __init__(
        self, workers: list[Worker], product: str, results: state.Lines, arguments: argparse.Namespace
    ) -> None:
        self.workers = workers
        self.results = results
        self.arguments = arguments
        self.recordings = state.Lines(f"recorded-{product}.jsonl")
        self.lock = threading.Lock()

    def run(self, sample: list[Mutant]) -> None:
        """Try the mutants that have no result yet, or (`--again`) the survivors."""
        known = {entry["import"]: entry["lines"] for entry in self.recordings if "import" in entry}
        print(f"mutants: starting {len(self.workers)} workers", file=sys.stderr)
        self._run_jobs_in_parallel(
            "starting", list(self.workers), lambda _, w: w.start(trace_import=not known), by_worker=True
        )
        if not known:
            lines = next(worker.import_lines for worker in self.workers if worker.import_lines is not None)
            self.recordings.append({"import": "lines", "lines": lines})
        self._record_missing_files()
        recorded = self._load_recording()
        before = {result["key"]: verdict(result) for result in self.results}
        wanted = "survived" if self.arguments.again else None
        left = [mutant for mutant in sample if before.get(mutant.key) == wanted]
        self._run_jobs_in_parallel("mutants", left, lambda worker, mutant: self._try_mutant(worker, mutant, recorded))

    def _record_missing_files(self) -> None:
        """Run each test file under coverage, unless this was done for the same content of the file."""
        files: dict[str, list[str]] = {}
        for test in self.workers[0].tests:
            files.setdefault(test.partition("::")[0], []).append(test)
        done = {(entry["file"], entry["hash"]) for entry in self.recordings if "file" in entry}
        # Hash the copies, because files in the checkout may change meanwhile.
        hashes = {file: state.file_hash(self.workers[0].folder / "tree" / file) for file in files}
        left = [file for file in files if (file, hashes[file]) not in done]

        def record(worker: Worker, file: str) -> None:
            answer = worker.ask({"record": files[file], "limit_s": RECORD_S})
            entry = {
                "file": file,
                "hash": hashes[file],
                "seconds": {},
                "lines": {},
                "failed": [],
                "skipped": [],
            }
            with self.lock:
                self.recordings.append(entry | answer)

        if left:
            self._run_jobs_in_parallel("recording who executes what", left, record)

    def _load_recording(self) -> Recording:
        imported = next(entry["lines"] for entry in self.recordings if "import" in entry)
        recorded = Recording(imported)
        latest = {e["file"]: e for e in self.recordings if "file" in e and (ROOT / e["file"]).exists()}
        for entry in latest.values():
            recorded.add(entry)
            if entry["failed"]:
                print(f"mutants: left out, fails without a mutant: {', '.join(entry['failed'])}", file=sys.stderr)
        failing, tests = (sum(len(entry[name]) for entry in latest.values()) for name in ("failed", "seconds"))
        if failing > MAX_FAILING_SHARE * tests:
            raise WorkerError(f"{failing} of {tests} tests fail without a mutant: mend this runner or the tests first")
        for entry in self.recordings:
            recorded.add_times(entry.get("times", {}))
        return recorded

    def _try_mutant(self, worker: Worker, mutant: Mutant, recorded: Recording) -> None:
        choice = recorded.choose(mutant)
        seconds = [recorded.seconds[test] for test in choice.tests]
        limits = {t: FACTOR * recorded.seconds[t] + FLOOR_S for t in choice.tests}
        job = {
            "mutant": {"path": mutant.path, "source": mutate_source(mutant), "cold": choice.cold},
            "tests": choice.tests,
            "limits": limits,
            "limit_s": FACTOR * sum(seconds) + FLOOR_S + COLD_S,
        }
        answer = worker.ask(job)
        with self.lock:
            recorded.add_times(answer.get("seconds", {}))
            self.recordings.append({"times": answer.get("seconds", {})})
        outcome = "timeout" if answer.get("timeout") else "killed" if answer["failed"] else "survived"
        entry = {"key": mutant.key, "area": mutant.area, "path": mutant.path, "line": mutant.line, "outcome": outcome}
        entry |= {"operator": mutant.operator, "tests": len(choice.tests), "left_out": choice.left_out}
        entry |= {"killer": (answer["failed"] or [""])[0], "diff": format_diff(mutant), "took_s": answer["took_s"]}
        entry |= {"cold": answer["cold"], "unsteady": answer["unsteady"], "at": time.strftime("%FT%TZ", time.gmtime())}
        with self.lock:
            self.results.append(entry)

    def _run_jobs_in_parallel(
        self, name: str, jobs: list[Any], do: Callable[[Any, Any], None], *, by_worker: bool = False
    ) -> None:
        """Distribute jobs among the workers. A worker that ends during a job is restarted, at most twice for a job."""
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        bar, errors = Bar(name, len(jobs)), list[BaseException]()

        def serve(worker: Worker) -> None:
            while not errors:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    _attempt(worker, lambda job=job: do(worker, job), restart=not by_worker)
                except BaseException as error:  # noqa: BLE001
                    errors.append(error)
                bar.step()

        threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.5)
            threads[-1].join(0.5)
        if errors:
            raise errors[0]


def _attempt(worker: Worker, do: Callable[[], None], *, restart: bool) -> None:
    for turn in range(3):
        try:
            return do()
        except WorkerError:
            if not restart or turn == 2:
                raise
            worker.stop()
            worker.start()


class Bar:
    """Progress on standard error: a bar on a terminal, otherwise a line every 30 s."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0
        self.began = self.told = time.monotonic()
        self.lock = threading.Lock()

    def step(self) -> None:
        """Count one finished job and show the progress."""
        with self.lock:
            self.done += 1
            now = time.monotonic()
            terminal = sys.stderr.isatty()
            if self.done < self.total and now - self.told < (0.2 if terminal else 30):
                return
            self.told = now
            left = (now - self.began) / self.done * (self.total - self.done)
            filled = 30 * self.done // self.total
            line = (
                f"{self.name} [{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}, {left / 60:.0f} min left"
            )
            end = "\n" if not terminal or self.done == self.total else ""
            print(f"{chr(13) if terminal else ''}{line}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
