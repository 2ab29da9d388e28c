"""Send messages as plain-text mail: a single message, or several that are waiting as one digest."""

from __future__ import annotations

import smtplib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

from django.core.mail import EmailMessage

from cyborgweb.models.event_types import describe_event
from cyborgweb.notify.webhook import AttemptOutcome

MailMessage = tuple[datetime, str, Mapping[str, Any]]
"""One message: its time, its kind and its data."""
MAIL_TIMEOUT_S = 20.0
"""Seconds that sending one mail may take at most, whatever the mail server does."""
FOOTER = "You get this mail because of a subscription in the accelerator control plane. Change or delete it there."


def build_mail(to: str, messages: Sequence[MailMessage], message_id: str) -> EmailMessage:
    """Build the mail about these messages (at least one), a line for each; it is not sent.

    The header Message-ID is made from `message_id`, which is the id of the first message.
    """
    lines = [f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC  {describe_event(kind, data)}" for at, kind, data in messages]
    subject = describe_event(*messages[0][1:])[:150] if len(messages) == 1 else f"{len(messages)} messages"
    headers = {"Auto-Submitted": "auto-generated", "Message-ID": f"<{message_id}@cyborgweb>"}
    return EmailMessage(f"[Accelerators] {subject}", "\n".join([*lines, "", FOOTER, ""]), to=[to], headers=headers)


def send_mail(to: str, messages: Sequence[MailMessage], message_id: str) -> tuple[AttemptOutcome, bool]:
    """Send one mail about these messages. Return its outcome, and whether the mail server itself is unavailable, which
    affects everybody's mail; a refused recipient is only this mail's error.

    Blocks for at most `MAIL_TIMEOUT_S` seconds. Errors of SMTP and of the network are in the outcome and not raised.
    """
    try:
        _send_in_thread(build_mail(to, messages, message_id)).result(MAIL_TIMEOUT_S)
    except smtplib.SMTPRecipientsRefused:
        return AttemptOutcome("The mail server refused this address."), False
    except smtplib.SMTPException as error:
        return AttemptOutcome(f"The mail server refused the mail: {type(error).__name__}."), True
    except TimeoutError:
        return AttemptOutcome("The mail server did not answer in time."), True
    except OSError as error:
        return AttemptOutcome(f"The mail server cannot be reached: {error.strerror or type(error).__name__}."), True
    return AttemptOutcome(), False


def _send_in_thread(mail: EmailMessage) -> Future[None]:
    """Send the mail on a new daemon thread and return a future, which raises the error if sending fails.

    If the caller stops waiting before the mail server has answered, the thread goes on and may still send the mail.
    """
    future: Future[None] = Future()

    def run() -> None:
        """Send the mail, then complete the future."""
        try:
            mail.send()
        except Exception as error:  # noqa: BLE001 - the future raises it in the waiting thread
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True, name="mail").start()
    return future
