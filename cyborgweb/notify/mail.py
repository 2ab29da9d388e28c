"""Messages as plain mail: one, or what came meanwhile in one mail. Called by `sender`."""

from __future__ import annotations

import smtplib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django.core.mail import EmailMessage

from cyborgweb.notify.kinds import sentence
from cyborgweb.notify.webhook import Outcome

Told = tuple[datetime, str, Mapping[str, Any]]
"""When, of what kind, what."""
FOOT = "You get this because of a subscription in the accelerator control plane; change or delete it there."


def letter(to: str, told: Sequence[Told], message: str) -> EmailMessage:
    """The mail about these; `message` is the id of the first."""
    lines = [f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC  {sentence(kind, data)}" for at, kind, data in told]
    subject = sentence(*told[0][1:])[:150] if len(told) == 1 else f"{len(told)} messages"
    headers = {"Auto-Submitted": "auto-generated", "Message-ID": f"<{message}@cyborgweb>"}
    return EmailMessage(f"[Accelerators] {subject}", "\n".join([*lines, "", FOOT, ""]), to=[to], headers=headers)


def send(to: str, told: Sequence[Told], message: str) -> tuple[Outcome, bool]:
    """What came of it, and whether the server is away, for everybody's mail."""
    try:
        letter(to, told, message).send()
    except smtplib.SMTPRecipientsRefused:
        return Outcome("The mail server refuses this address."), False
    except smtplib.SMTPException as error:
        return Outcome(f"The mail server refuses our mail: {type(error).__name__}."), True
    except OSError as error:
        return Outcome(f"The mail server cannot be reached: {error.strerror or type(error).__name__}."), True
    return Outcome(), False
