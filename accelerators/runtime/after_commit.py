"""Call functions after the commit of a transaction; the failure of one stops neither the others nor the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVarTuple

from django.db import transaction

Arguments = TypeVarTuple("Arguments")


def call_after_commit(function: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
    """Call `function` with these arguments after the commit of the current transaction; at once if there is none.

    If it raises an exception, that is logged only, because the changes are committed all the same: the caller goes on,
    and what else waits for the commit is done. Nothing is called if the transaction is rolled back. A `partial` cannot
    be given to `transaction.on_commit(robust=True)` instead: Django 5.2 reads its missing `__qualname__` for the log
    (ticket 36487), and that exception is raised in the place of the logged one.
    """

    def call() -> None:
        """Call the function."""
        function(*arguments)

    transaction.on_commit(call, robust=True)
