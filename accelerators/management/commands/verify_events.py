"""`manage.py verify_events`: verify that events match their seals, for people and for scripts (`--json`, exit
status)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from accelerators.audit import anchors, sealing, verification
from accelerators.management import shell

EPILOG = """\
Every minute the events of all finished transactions are sealed: a seal is a signed hash over these events and the
previous seal. This command computes all seals again, verifies their signatures, and prints each event and seal that
does not match. Events that are not sealed yet are only counted.

An attacker who can change the whole database can remove its end, or make another chain with another key. Therefore
store the newest seal elsewhere from time to time, and compare the chain with the stored seals. A line is the number of
the seal, its hash, and the public key that signed it:

  manage.py verify_events --anchor >> /elsewhere/anchors
  manage.py verify_events --seal-file /elsewhere/anchors

`manage.py seal_events --show-key` prints the public key on the machine that seals. If a key was lost, trust begins
again with another one: verify_events fails until you name that key with --trust-key. The key of the first signed seal
must then be named, too.

Exit code 1: something does not match. docs/audit.md describes how to verify events without this program.
"""
BAR_WIDTH = 40


class Command(shell.OperatorCommand):
    """The management command `verify_events`."""

    epilog = EPILOG
    help = "Verify the hash chain over events, or print its newest seal, to be stored elsewhere."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options `--from`, `--to`, `--seal-file`, `--trust-key`, `--anchor` and `--json`."""
        parser.add_argument("--from", dest="first", type=int, default=1, metavar="N", help="start with this seal")
        parser.add_argument("--to", dest="last", type=int, metavar="N", help="end with this seal")
        parser.add_argument("--seal-file", type=Path, help="file of stored seals: a number, a hash and a key per line")
        parser.add_argument(
            "--trust-key", action="append", default=[], metavar="KEY", help="a public key that you know; repeatable"
        )
        parser.add_argument("--anchor", action="store_true", help="only print the newest seal")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        """Verify the seals and print the result; with `--anchor` only print the newest seal. Changes nothing.

        Exits with status 1 if something does not match. Raises CommandError for a wrong range, an unusable file of
        seals, or `--anchor` while there is no seal.
        """
        if options["anchor"]:
            last = sealing.get_newest_seal()
            if not last.number:
                raise CommandError("no event is sealed yet: the job `seals` seals events within a minute")
            self.stdout.write(f"{last.number} {last.hash} {last.key}".strip())
            return
        if options["first"] < 1 or (options["last"] or options["first"]) < options["first"]:
            raise CommandError("--from and --to: seals are numbered from 1 on")
        try:
            known = anchors.read_anchors(options["seal_file"]) if options["seal_file"] else {}
        except anchors.AnchorFileError as error:
            raise CommandError(str(error)) from None
        proof = verification.verify_seals(
            options["first"], options["last"], known, self._show_progress, options["trust_key"]
        )
        if options["json"]:
            self.stdout.write(json.dumps(asdict(proof) | {"ok": not proof.findings}, default=datetime.isoformat))
        else:
            self._print_proof(proof)
        if proof.findings:
            sys.exit(1)

    def _print_proof(self, proof: verification.VerificationResult) -> None:
        """Print each notice in a line that begins with `NOTICE:`, each finding in a line that begins with `!`, then the
        counts and, if there is one, the newest seal with the key that signed it."""
        for notice in proof.notices:
            self.stdout.write(f"NOTICE: {notice}")
        for finding in proof.findings:
            self.stdout.write(f"! {finding.text}")
        dropped = f", {proof.dropped} dropped by retention" if proof.dropped else ""
        self.stdout.write(
            f"{proof.seals} seals, {proof.events} events{dropped}, {proof.unsealed} not sealed yet: "
            + ("they do not match" if proof.findings else "they match")
        )
        if proof.number:
            self.stdout.write(f"newest seal: {proof.number} {proof.hash} {proof.key or '(not signed)'}")

    def _show_progress(self, done: int, total: int) -> None:
        """Draw a progress bar on stderr; `done` and `total` are numbers of events.

        Draws nothing if stderr is no terminal, or if `total` is at most `sealing.MAX_EVENTS_PER_SEAL`.
        """
        if sys.stderr.isatty() and total > sealing.MAX_EVENTS_PER_SEAL:
            filled = BAR_WIDTH * min(done, total) // total
            end = "\n" if done >= total else ""
            sys.stderr.write(f"\r[{'█' * filled}{' ' * (BAR_WIDTH - filled)}] {done}/{total} events{end}")
            sys.stderr.flush()
