"""Check and prepare what the simulation of several machines needs: root, network namespaces and nginx; and Prometheus.

`namespaces` and `deployment` use this module. Debian's nginx and Prometheus are unpacked into `.sim/` of the checkout
and not installed, because their packages would start servers. `make deps-sim` runs this file with any Python, before a
virtual environment exists, and after `tests.qemu.prepare`, because that empties `.sim/` when it makes it again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

UNSHARED = ("--net", "--mount", "--uts", "--pid")
HOLD = ("setpriv", "--pdeathsig", "KILL", "unshare", *UNSHARED, "--fork", "--kill-child", "--mount-proc", "sh", "-c")
"""The command that runs a shell script in its own namespaces and kills it when the process that started it ends."""
BRIDGE = "ip link add bridge type bridge forward_delay 0 && ip link set bridge up"
FOLDER = Path(__file__).resolve().parents[2] / ".sim" / "nginx"
NGINX = FOLDER / "usr/sbin/nginx"
STREAM = FOLDER / "usr/lib/nginx/modules/ngx_stream_module.so"
PACKAGES = ("nginx", "libnginx-mod-stream")
PROMETHEUS_FOLDER = FOLDER.parent / "prometheus"
PROMETHEUS, PROMTOOL = (PROMETHEUS_FOLDER / "usr/bin" / name for name in ("prometheus", "promtool"))


def missing() -> str:
    """Return the reason why several machines cannot be simulated here; '' if they can."""
    return _why_namespaces_are_refused() or (
        "" if NGINX.exists() and STREAM.exists() else "there is no nginx in .sim (make deps-sim)"
    )


def _why_namespaces_are_refused() -> str:
    if os.geteuid():
        return "only root makes networks"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if not shutil.which(program):
            return f"there is no {program} here (apt-get install iproute2 util-linux)"
    tried = subprocess.run([*HOLD, BRIDGE], capture_output=True, text=True, check=False)
    return f"there can be no networks of one's own here: {tried.stderr.strip()}" if tried.returncode else ""


def fetch(folder: Path, packages: Sequence[str], tried: Sequence[str]) -> None:
    """Download these packages of Debian, unpack them into `folder`, and try the command `tried`.

    The program of this command is a path in the folder. Raises OSError, CalledProcessError.
    """
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
        into = Path(temporary) / folder.name
        into.mkdir()
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "download", "-qq", *packages], cwd=into, check=True)
        for archive in into.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, into], check=True)
            archive.unlink()
        subprocess.run([into / tried[0], *tried[1:]], check=True, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        into.rename(folder)


def main() -> int:
    """Unpack nginx and Prometheus if they are missing.

    Return 0 if everything is there; else print the reason and return 1.
    """
    if why := _why_namespaces_are_refused():
        print(f"deps-sim: {why}", file=sys.stderr)
        return 1
    try:
        if missing():
            fetch(FOLDER, PACKAGES, ["usr/sbin/nginx", "-v"])
        if not (PROMETHEUS.exists() and PROMTOOL.exists()):
            fetch(PROMETHEUS_FOLDER, ["prometheus"], ["usr/bin/promtool", "--version"])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"deps-sim: nginx or Prometheus cannot be had: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
