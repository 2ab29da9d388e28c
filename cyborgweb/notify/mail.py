"""Messages as plain mail: one, or what came meanwhile in one mail. Called by `sender`."""

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
"""When, of what kind, what."""
WHOLE_S = 20.0
"""A letter takes so long at most, whatever the server does."""
FOOT = "You get this because of a subscription in the accelerator control plane; change or delete it there."


def letter(to: str, told: Sequence[Told], message: str) -> EmailMessage:
    """The mail about these; `message` is the id of the first."""
    lines = [f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC  {sentence(kind, data)}" for at, kind, data in told]
    subject = sentence(*told[0][1:])[:150] if len(told) == 1 else f"{len(told)} messages"
    headers = {"Auto-Submitted": "auto-generated", "Message-ID": f"<{message}@cyborgweb>"}
    return EmailMessage(f"[Accelerators] {subject}", "\n".join([*lines, "", FOOT, ""]), to=[to], headers=headers)


def send(to: str, told: Sequence[Told], message: str) -> tuple[Outcome, bool]:
    """What came of it within `WHOLE_S`, and whether the server is away, for everybody's mail."""
    try:
        _sent(letter(to, told, message)).result(WHOLE_S)
    except smtplib.SMTPRecipientsRefused:
        return Outcome("The mail server refuses this address."), False
    except smtplib.SMTPException as error:
        return Outcome(f"The mail server refuses our mail: {type(error).__name__}."), True
    except TimeoutError:
        return Outcome("The mail server did not answer in time."), True
    except OSError as error:
        return Outcome(f"The mail server cannot be reached: {error.strerror or type(error).__name__}."), True
    return Outcome(), False


def _sent(one: EmailMessage) -> Future[None]:
    """Done on a thread, which is left to itself when the server is slower than we wait."""
    came: Future[None] = Future()

    def run() -> None:
        try:
            one.send()
        except Exception as error:  # noqa: BLE001 - it is raised where the outcome is awaited
            came.set_exception(error)
        else:
            came.set_result(None)

    threading.Thread(target=run, daemon=True, name="mail").start()
    return came
