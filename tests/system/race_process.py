"""One process of `test_race`: its threads, with one request each, try to bind the last handle at the same moment.

Each line on standard input starts a round and is the number of threads that take part. The process answers with one
line: the uuids of the requests that were bound.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import django

django.setup()

from django.db import connection  # noqa: E402

from accelerators.domain.caller import Caller  # noqa: E402
from accelerators.domain.errors import RefusalReason, RefusedError  # noqa: E402
from accelerators.requests import binding  # noqa: E402
from accelerators.requests.binding import BindSpec  # noqa: E402
from drivers.isolation.process import die_with_parent  # noqa: E402

NOVA_CALLER = Caller("nova", "u", frozenset({"member"}), "p1", service=True)


def main() -> None:
    """Run as `race_process DATABASE PROVIDER REQUEST…`, with one thread per request."""
    die_with_parent()
    database, provider, *requests = sys.argv[1:]
    connection.settings_dict["NAME"] = database

    def fight(barrier: Barrier, uuid: str) -> str:
        barrier.wait()
        try:
            binding.bind_requests([BindSpec(uuid, "cmp1", provider, uuid)], NOVA_CALLER)
        except RefusedError as refused:
            assert refused.reason == RefusalReason.NONE_FREE, refused.text
            return ""
        return uuid

    with ThreadPoolExecutor(len(requests)) as pool:
        for line in sys.stdin:
            rivals = requests[: int(line)]
            print(*filter(None, pool.map(partial(fight, Barrier(len(rivals))), rivals)), flush=True)


if __name__ == "__main__":
    main()
