"""Build the environment of the processes that tests start."""

from __future__ import annotations

import os

UNWANTED = ("CYBORG_", "COVERAGE_", "DJANGO_", "OS_", "PYTEST_", "Q_CLUSTER")


def without_settings(**more: str) -> dict[str, str]:
    """Return this process's environment plus `more`, without variables that configure the product, a cloud or pytest.

    CYBORG_PG_BIN is kept, because it says where PostgreSQL is installed.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(UNWANTED)}
    if folder := os.environ.get("CYBORG_PG_BIN"):
        kept["CYBORG_PG_BIN"] = folder
    return kept | more
