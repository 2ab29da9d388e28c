"""The browser that the tests drive: Debian's Chromium, or any other one of its family. Run by `make deps-browser`.

`TEST_BROWSER` names another executable. Playwright never downloads one of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "there is no Chromium here: `make deps-browser` as root, or set TEST_BROWSER to one's path"


def find() -> str:
    """Its path, '' where there is none."""
    wanted = os.environ.get("TEST_BROWSER")
    return next((path for name in ([wanted] if wanted else NAMES) if (path := shutil.which(name))), "")


def install() -> None:
    """Debian's package; raises OSError or CalledProcessError."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        subprocess.run(["apt-get", "-qq", *words], check=True, env=environment, stdout=subprocess.DEVNULL)


def main() -> int:
    """Exit status 0 when there is a browser in the end."""
    if not find() and os.geteuid() == 0:
        try:
            install()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"deps-browser: {error}", file=sys.stderr)
    if not find():
        print(f"deps-browser: {MISSING}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
