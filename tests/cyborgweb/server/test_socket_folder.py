"""Test that the embedded database uses no folder that another local user made or may write in."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest

from cyborgweb.database import postgres
from cyborgweb.database.postgres import Postgres, PostgresError, choose_socket_folder, open_private_folder
from tests.support.database import STATE

ROOT = Path(__file__).resolve().parents[3]
STRANGER = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of other users")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder like /tmp, which is the temporary folder during the test."""
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.fixture
def server(tmp_path: Path, temporary: Path) -> Postgres:
    """Return a server whose path is too long for a socket; it must not be started by a refused start."""
    server = Postgres(tmp_path / ("long" * 25) / "postgres")
    assert server.socket.parent == temporary
    return server


def check_start_is_refused(server: Postgres, reason: str) -> None:
    with pytest.raises(PostgresError, match=reason):
        server.start()
    assert server.process is None and not server.data.exists()


@needs_root
def test_a_socket_folder_of_another_user_is_refused_also_by_root(server: Postgres) -> None:
    server.socket.mkdir(mode=0o700)
    os.chown(server.socket, STRANGER, STRANGER)
    check_start_is_refused(server, "belongs to another user .*CYBORG_STATE_DIR")


def test_a_symlink_in_place_of_the_socket_folder_is_refused(server: Postgres, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    server.socket.symlink_to(tmp_path / "own")
    check_start_is_refused(server, "not a folder but a link")


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_file_or_a_dangling_link_in_place_of_the_socket_folder_is_refused(
    server: Postgres, tmp_path: Path, kind: str
) -> None:
    if kind == "file":
        server.socket.touch()
    else:
        server.socket.symlink_to(tmp_path / "absent")
    check_start_is_refused(server, "not a folder but a link or a file")
    assert not (tmp_path / "absent").exists()


def test_a_socket_folder_that_cannot_be_made_is_a_refusal_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PostgresError, match=r"cannot be made or opened \(Not a directory\): check .*file"):
        open_private_folder(tmp_path / "file" / "run", frozenset([os.getuid()]))


@pytest.mark.slow
@needs_root
def test_a_plain_user_is_told_who_owns_a_folder_that_he_may_not_open() -> None:
    probe = (
        "import os, sys; from pathlib import Path; from cyborgweb.database import postgres\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "try: postgres.open_private_folder(Path(sys.argv[1]), postgres._list_server_users())\n"
        "except postgres.PostgresError as error: print(error)"
    )
    with tempfile.TemporaryDirectory(dir=STATE.parent) as folder:
        os.chmod(folder, 0o1777)
        (private := Path(folder) / "run").mkdir(mode=0o700)
        words = [sys.executable, "-c", probe, private]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.startswith(f"{private} belongs to another user (uid 0): "), done.stderr


def test_a_socket_folder_in_which_others_may_write_is_refused(server: Postgres) -> None:
    server.socket.mkdir()
    server.socket.chmod(0o770)
    check_start_is_refused(server, "other users may write")
    check_start_is_refused(server, "move its state directory to a shorter path")


def test_a_temporary_folder_without_sticky_bit_is_refused(server: Postgres, temporary: Path) -> None:
    temporary.chmod(0o777)
    check_start_is_refused(server, "any user may replace folders")


@needs_root
def test_a_temporary_folder_of_another_user_is_refused(server: Postgres, temporary: Path) -> None:
    temporary.chmod(0o755)
    os.chown(temporary, STRANGER, STRANGER)
    check_start_is_refused(server, "could replace the database's socket")


def test_a_database_folder_of_another_user_or_open_to_writers_is_refused(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "postgres")
    server.home.mkdir()
    server.home.chmod(0o777)
    check_start_is_refused(server, "other users may write")
    check_start_is_refused(server, "it may hold the database: look for files that others may have put there")


def test_nobody_is_told_to_remove_the_folder_that_holds_the_database(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "postgres")
    server.home.mkdir()
    server.home.chmod(0o770)
    with pytest.raises(PostgresError, match=r"others may have put there.*chmod go-w") as refused:
        server.start()
    server.home.rmdir()
    server.home.symlink_to(tmp_path)
    with pytest.raises(PostgresError, match=r"not a folder but a link.*where the database is") as refused_link:
        server.start()
    assert "remove it" not in f"{refused.value} {refused_link.value}"


def test_a_folder_that_others_may_only_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(mode=0o755)
    os.close(open_private_folder(tmp_path / "one", frozenset([os.getuid()])))
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700


def run_client(state: Path) -> subprocess.CompletedProcess[str]:
    """Run a management command that uses the embedded database of this state directory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CYBORG_", "DJANGO_"))}
    command = [sys.executable, ROOT / "manage.py", "shell", "-c", "from django.db import connection as c; c.cursor()"]
    environment["CYBORG_STATE_DIR"] = str(state)
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_clients_refuse_a_socket_folder_that_is_a_link_while_the_server_is_down(server: Postgres) -> None:
    server.socket.symlink_to(STATE)
    done = run_client(server.home.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"manage.py: {server.socket} is not a folder but a link")


def test_a_client_takes_the_name_of_the_socket_folder_before_others_can(server: Postgres) -> None:
    assert server.secure_socket_folder() == server.socket
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    short = Postgres(server.home.parents[1] / "short")
    assert short.secure_socket_folder() == short.home / "run" and not short.home.exists()


def test_the_socket_accepts_the_servers_own_user_only() -> None:
    socket = choose_socket_folder(STATE / "postgres" / "run") / ".s.PGSQL.5432"
    assert stat.S_IMODE(socket.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700


@pytest.mark.slow
@needs_root
def test_another_user_cannot_connect_even_in_a_folder_that_is_open_to_all() -> None:
    socket = choose_socket_folder(STATE / "postgres" / "run") / ".s.PGSQL.5432"
    probe = (
        "import os, socket, sys; os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    )
    with tempfile.TemporaryDirectory(dir=STATE.parent) as folder:
        os.chmod(folder, 0o755)
        os.link(socket, link := Path(folder) / socket.name)
        words = [sys.executable, "-c", probe, link]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr
        with psycopg.connect(host=folder, user="postgres", dbname="postgres") as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_the_log_of_the_server_is_not_written_through_a_link(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "postgres")
    server.home.mkdir(mode=0o700)
    (server.home / "log").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        server._open_log(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert not (tmp_path / "target").exists()


@needs_root
def test_the_account_of_the_server_gets_the_folders_but_nothing_that_it_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "UNPRIVILEGED_ACCOUNTS", ("absent-account", "nobody"))
    nobody = postgres._find_accounts()[0].pw_uid
    home, run = tmp_path / "postgres", tmp_path / "run"
    folders = [open_private_folder(path, postgres._list_server_users()) for path in (home, run)]
    (home / "before").touch()
    prefix = postgres._make_account_prefix(home, folders)
    assert prefix[:2] == ["setpriv", f"--reuid={nobody}"]
    (home / "after").touch()
    postgres._make_account_prefix(home, folders)
    owners = [path.stat().st_uid for path in (home, run, home / "before", home / "after")]
    assert owners == [nobody, nobody, nobody, 0]
    for path, folder in zip((home, run), folders, strict=True):
        os.close(folder)
        os.close(open_private_folder(path, postgres._list_server_users()))
