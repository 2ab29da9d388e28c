"""Send messages as plain-text mail: a single message, or several that are waiting as one digest."""

from __future__ import annotations

import smtplib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

from django.core.mail import EmailMessage

from cyborgweb.models.event_types import sentence
from cyborgweb.notify.webhook import Outcome

Told = tuple[datetime, str, Mapping[str, Any]]
"""One message: its time, its kind and its data."""
WHOLE_S = 20.0
"""Seconds that sending one mail may take at most, whatever the mail server does."""
FOOT = "You get this mail because of a subscription in the accelerator control plane. Change or delete it there."


def letter(to: str, told: Sequence[Told], message: str) -> EmailMessage:
    """Build the mail about these messages (at least one). `message` is the id of the first one and becomes the
    Message-ID.
    """
    lines = [f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC  {sentence(kind, data)}" for at, kind, data in told]
    subject = sentence(*told[0][1:])[:150] if len(told) == 1 else f"{len(told)} messages"
    headers = {"Auto-Submitted": "auto-generated", "Message-ID": f"<{message}@cyborgweb>"}
    return EmailMessage(f"[Accelerators] {subject}", "\n".join([*lines, "", FOOT, ""]), to=[to], headers=headers)


def send(to: str, told: Sequence[Told], message: str) -> tuple[Outcome, bool]:
    """Send one mail. Return its outcome, and whether the mail server itself is unavailable, which affects everybody's
    mail.

    Blocks for at most `WHOLE_S` and raises nothing for errors of SMTP or the network.
    """
    try:
        _sent(letter(to, told, message)).result(WHOLE_S)
    except smtplib.SMTPRecipientsRefused:
        return Outcome("The mail server refused this address."), False
    except smtplib.SMTPException as error:
        return Outcome(f"The mail server refused the mail: {type(error).__name__}."), True
    except TimeoutError:
        return Outcome("The mail server did not answer in time."), True
    except OSError as error:
        return Outcome(f"The mail server cannot be reached: {error.strerror or type(error).__name__}."), True
    return Outcome(), False


def _sent(one: EmailMessage) -> Future[None]:
    """Send the mail on a daemon thread and return its future. A thread whose server is slower than the caller waits is
    left running.
    """
    came: Future[None] = Future()

    def run() -> None:
        try:
            one.send()
        except Exception as error:  # noqa: BLE001 - the future raises it in the waiting thread
            came.set_exception(error)
        else:
            came.set_result(None)

    threading.Thread(target=run, daemon=True, name="mail").start()
    return came
