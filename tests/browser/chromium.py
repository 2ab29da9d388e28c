"""Find or install the browser for the tests: Debian's Chromium, or Chrome. `make deps-browser` runs this.

`TEST_BROWSER` can name another executable. Playwright never downloads a browser.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "there is no Chromium here: `make deps-browser` as root, or set TEST_BROWSER to one's path"


def find() -> str:
    """Return the path of the browser, '' if there is none."""
    wanted = os.environ.get("TEST_BROWSER")
    return next((path for name in ([wanted] if wanted else NAMES) if (path := shutil.which(name))), "")


def install() -> None:
    """Install Debian's package of Chromium; raise OSError or CalledProcessError if this fails."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        subprocess.run(["apt-get", "-qq", *words], check=True, env=environment, stdout=subprocess.DEVNULL)


def main() -> int:
    """Install Chromium if there is no browser; return 0 if there is one in the end, otherwise 1."""
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
