"""One process of `test_race`: so many threads, each with a request of its own, all after the last handle.

For every line on standard input: all threads bind at once; the answer is a line with the uuids that won.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import django

django.setup()

from django.db import connection  # noqa: E402

from accelerators import binding  # noqa: E402
from accelerators.binding import Bind  # noqa: E402
from accelerators.caller import Caller  # noqa: E402
from accelerators.refusals import Reason, Refused  # noqa: E402
from drivers.process import die_with_parent  # noqa: E402

NOVA = Caller("nova", "u", frozenset({"member"}), "p1", service=True)


def main() -> None:
    """`fighter DATABASE PROVIDER REQUEST…`: one thread a request."""
    die_with_parent()
    database, provider, *requests = sys.argv[1:]
    connection.settings_dict["NAME"] = database
    barrier = Barrier(len(requests))

    def fight(uuid: str) -> str:
        barrier.wait()
        try:
            binding.bind([Bind(uuid, "cmp1", provider, uuid)], NOVA)
        except Refused as refused:
            assert refused.reason == Reason.NONE_FREE, refused.text
            return ""
        return uuid

    with ThreadPoolExecutor(len(requests)) as pool:
        for _ in sys.stdin:
            print(*filter(None, pool.map(fight, requests)), flush=True)


if __name__ == "__main__":
    main()
