"""Test the verbs that sign announcements of certificates, as an operator uses them on a machine without a network."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agents import certificates
from cyborgweb.cli.main import cli
from cyborgweb.server import tls

OLD, NEW, NEWER = "a" * 64, "b" * 64, "c" * 64


def run(*words: object, text: str = "") -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], input=text)


def announce(folder: Path, old: object, new: object, *more: object, text: str = "") -> Result:
    words = ("--key", folder / "key", "--replaces", old, "--certificate", new, "--to", folder / "file", *more)
    return run("announce-certificate", *words, text=text)


def test_an_announcement_key_is_private_and_made_once(tmp_path: Path) -> None:
    first, second = (run("announcement-key", tmp_path / "key") for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout == second.stdout and len(first.stdout.strip()) == 44
    assert "Keep it offline" in first.stderr and second.stderr == ""
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_dry_run_of_a_key_or_an_announcement_writes_no_file(tmp_path: Path) -> None:
    assert "would be stored" in run("announcement-key", tmp_path / "key", "--dry-run").stdout
    assert not (tmp_path / "key").exists()
    run("announcement-key", tmp_path / "key")
    shown = announce(tmp_path, OLD, NEW, "--dry-run")
    assert shown.exit_code == 0 and "This line would be added" in shown.stdout
    assert not (tmp_path / "file").exists()


def test_announcements_are_signed_and_numbered_in_one_file(tmp_path: Path) -> None:
    public_key = run("announcement-key", tmp_path / "key").stdout.strip()
    pem = tmp_path / "new.pem"
    fingerprint = tls.write_new_certificate(pem)
    begin = int(time.time())
    assert announce(tmp_path, f"sha256:{OLD}", pem, "--both-days", 10).exit_code == 0
    last = announce(tmp_path, fingerprint, NEWER)
    assert last.exit_code == 0 and "Announcement 2 is in" in last.stderr
    text = (tmp_path / "file").read_text()
    assert text.splitlines()[-1] == last.stdout.strip()
    one, two = certificates.parse_announcements(text, public_key)
    assert (one.number, one.replaces, one.fingerprint) == (1, OLD, fingerprint)
    assert (two.number, two.replaces, two.fingerprint) == (2, fingerprint, NEWER)
    assert 10 * 86400 <= one.both_until - begin <= 10 * 86400 + 60


def test_an_encrypted_announcement_key_needs_its_passphrase(tmp_path: Path) -> None:
    made = run("announcement-key", tmp_path / "key", "--encrypt", text="secret\nsecret\n")
    assert made.exit_code == 0 and b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    wrong = announce(tmp_path, OLD, NEW, text="other\n")
    assert wrong.exit_code == 1 and "the passphrase is wrong" in wrong.stderr
    assert not (tmp_path / "file").exists()
    assert announce(tmp_path, OLD, NEW, text="secret\n").exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (OLD, OLD, "are the same certificate"),
        (OLD, "nowhere.pem", "is not the SHA-256 fingerprint"),
        (OLD, __file__, "holds no certificate"),
        (NEWER, OLD, f"names the certificate {NEW}"),
    ],
)
def test_an_announcement_that_no_agent_could_follow_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    run("announcement-key", tmp_path / "key")
    announce(tmp_path, OLD, NEW)
    before = (tmp_path / "file").read_text()
    refused = announce(tmp_path, old, new)
    assert refused.exit_code == 1 and says in refused.stderr, refused.stderr
    assert (tmp_path / "file").read_text() == before


def test_a_file_with_announcements_of_another_key_is_refused(tmp_path: Path) -> None:
    run("announcement-key", tmp_path / "key")
    announce(tmp_path, OLD, NEW)
    (tmp_path / "key").unlink()
    run("announcement-key", tmp_path / "key")
    refused = announce(tmp_path, NEW, NEWER)
    assert refused.exit_code == 1 and "line 1 is not signed with the announcement key" in refused.stderr
    (tmp_path / "key").write_text("no key")
    assert "is no announcement key" in announce(tmp_path, NEW, NEWER).stderr
