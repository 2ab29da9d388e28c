"""Sign texts with the time of the database's clock: machines that sign and machines that verify have other clocks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.signing import SignatureExpired, TimestampSigner, b62_decode, b62_encode

from accelerators.runtime import database_clock


class DatabaseTimestampSigner(TimestampSigner):
    """A signer whose times are those of the database's clock.

    It uses the last measurement of the clock and sends no statement, so it can be used on the event loop. Call
    `database_clock.refresh` before where statements are allowed.
    """

    def timestamp(self) -> str:
        """Return the present time as it is written into a signature."""
        return b62_encode(int(database_clock.estimate_timestamp()))

    def unsign(self, value: str, max_age: int | float | timedelta | None = None) -> str:
        """Return the signed text. Raises BadSignature if it is not signed with our key, and SignatureExpired if it was
        signed more than `max_age` seconds ago."""
        text = super().unsign(value)
        if max_age is not None:
            limit_s = max_age.total_seconds() if isinstance(max_age, timedelta) else max_age
            age_s = database_clock.estimate_timestamp() - b62_decode(value.rsplit(self.sep, 2)[1])
            if age_s > limit_s:
                raise SignatureExpired(f"Signature age {age_s} > {limit_s} seconds")
        return text


def sign_object(value: Any, salt: str) -> str:
    """Return the value as signed text, in the format of `django.core.signing.dumps`. May send a statement."""
    database_clock.refresh()
    return DatabaseTimestampSigner(salt=salt).sign_object(value)


def read_object(text: str, salt: str, max_age_s: float | None = None) -> Any:
    """Return the value that `sign_object` has signed with this salt, at most `max_age_s` seconds ago. May send a
    statement. Raises BadSignature."""
    database_clock.refresh()
    return DatabaseTimestampSigner(salt=salt).unsign_object(text, max_age=max_age_s)
