"""Write messages as plain-text mail, and send mails one by one, each over a connection of its own."""

from __future__ import annotations

import logging
import re
import smtplib
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.mail import EmailMessage, get_connection

from cyborgweb.errors import CyborgwebError
from cyborgweb.models.event_types import describe_event
from cyborgweb.notify.mail_links import LinkAction, build_link
from cyborgweb.notify.webhook import AttemptOutcome
from cyborgweb.settings.mail_address import MailAddressError, parse_mail_address
from drivers.errors import Failed
from drivers.isolation.threads import start_in_thread

log = logging.getLogger(__name__)

MailMessage = tuple[datetime, str, Mapping[str, Any]]
"""One message: its time, its kind and its data."""
CONNECT_TIMEOUT_S, MAIL_TIMEOUT_S = 10.0, 20.0
"""Seconds that connecting to the mail server and sending one mail may take at most, whatever the mail server does."""
FOOTER = "You get this mail because of a subscription in the accelerator control plane. Change or delete it there."
END_FOOTER = "To end these mails, without a login: "
CONFIRMATION_TEXT = """{asker} wants the accelerator control plane to send messages to this address.
They are sent only if you confirm it, within three days:

{link}

If you do not want them, ignore this mail.
"""
_LOGIN_NEEDED = (530, 534, 535, 538)
"""Answers of a mail server that wants another login: they concern all mail."""
_TOO_BIG = 552
_CLOSING = 421
"""The answer of a mail server that closes the connection."""
_POLICY = re.compile(rb"5\.7\.\d|(?![245]\.\d).*(relay|#5\.7\.)", re.IGNORECASE | re.DOTALL)
"""Answers that refuse an address because of the mail server's policy: a relay that is configured wrongly refuses every
address with one. Some mail servers send no enhanced status code, only a text ("relay not permitted").
"""
_STATUS_CODE = re.compile(rb"[245]\.\d{1,3}\.\d{1,3}\b")


class MailServerError(CyborgwebError):
    """The mail server sends no mail for anybody now. The text says why."""


@dataclass(frozen=True)
class MailOutcome(AttemptOutcome):
    """Result of one attempt to send a mail. `is_server_fault` means that other mail may fail for the same reason: the
    mail server ended the connection, did not answer in time, or refused the address because of its policy.
    """

    is_server_fault: bool = False


def build_mail(to: str, messages: Sequence[MailMessage], message_id: str, subscription: str) -> EmailMessage:
    """Build the mail about these messages (at least one), a line for each; it is not sent.

    The header Message-ID is made from `message_id`, which is the id of the first message. `subscription` is the uuid of
    the subscription.
    """
    lines = [f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC  {describe_event(kind, data)}" for at, kind, data in messages]
    subject = describe_event(*messages[0][1:])[:150] if len(messages) == 1 else f"{len(messages)} messages"
    body = "\n".join([*map(_blank_unprintable, lines), "", FOOTER])
    return _build_letter(to, _blank_unprintable(subject), body, message_id, subscription)


def build_confirmation(to: str, asker: str, message_id: str, subscription: str) -> EmailMessage:
    """Build the mail that asks the recipient to confirm the address; it is not sent. `asker` is a user's name."""
    link = build_link(LinkAction.CONFIRM, subscription, to)
    body = CONFIRMATION_TEXT.format(asker=_blank_unprintable(asker)[:100] or "Somebody", link=link)
    return _build_letter(to, "Confirm this address", body, message_id, subscription)


def _build_letter(to: str, subject: str, body: str, message_id: str, subscription: str) -> EmailMessage:
    """Build a mail with the link that ends the subscription's mails: in the text, and in the headers of RFC 8058. The
    link is left out if CYBORG_PUBLIC_URL is not set.
    """
    headers = {"Auto-Submitted": "auto-generated", "Message-ID": f"<{message_id}@cyborgweb>"}
    if link := build_link(LinkAction.END, subscription, to):
        headers |= {"List-Unsubscribe": f"<{link}>", "List-Unsubscribe-Post": "List-Unsubscribe=One-Click"}
        body = f"{body}\n{END_FOOTER}\n{link}"
    return EmailMessage(f"[Accelerators] {subject}", f"{body}\n", to=[to], headers=headers)


def _blank_unprintable(line: str) -> str:
    """Return the line with a blank in place of each control character and each other unprintable character."""
    return "".join(character if character.isprintable() else " " for character in line)


def check_mail_address(address: str) -> str:
    """Return the address in its plain form (`cyborgweb.settings.mail_address`). Raises MailAddressError, with the
    reason, if it is no address that we accept, or if mail may not be sent to its domain.
    """
    plain = parse_mail_address(address)
    domains = settings.KEYS.allowed_mail_domains
    if "*" not in domains and plain.rpartition("@")[2] not in domains:
        raise MailAddressError(f"Mail can be sent to addresses at {', '.join(domains)} only.")
    return plain


def send_mail(letter: EmailMessage) -> MailOutcome:
    """Send one mail over a connection of its own, and return its outcome, whatever exception it raises.

    A permanent refusal is an answer from 500 on, or means that this cannot be written as a mail. Blocks for at most
    `CONNECT_TIMEOUT_S` and `MAIL_TIMEOUT_S` seconds. Raises MailServerError if the mail server sends no mail for
    anybody now; then this mail was not tried.
    """
    backend = _connect()
    try:
        _call_in_time(lambda: backend.send_messages([letter]), MAIL_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - an error of one mail must not stop the others
        _shut_down(backend)
        return _classify(error)
    finally:
        with suppress(Failed):
            start_in_thread(backend.close)  # nobody waits for the answer to QUIT: the mail's outcome is known
    return MailOutcome()


def _shut_down(backend: Any) -> None:
    """Shut the connection down at once, so that a thread that still waits for the mail server ends."""
    sock = getattr(getattr(backend, "connection", None), "sock", None)
    if isinstance(sock, socket.socket):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _connect() -> Any:
    """Return one of Django's mail backends with an open connection, over which the mail server has greeted us.

    Raises MailServerError if that is not possible within `CONNECT_TIMEOUT_S` seconds.
    """
    backend = get_connection()

    def greet() -> None:
        """Open the connection, log in, and exchange the greetings."""
        backend.open()
        if isinstance(server := getattr(backend, "connection", None), smtplib.SMTP):
            server.ehlo_or_helo_if_needed()

    try:
        _call_in_time(greet, CONNECT_TIMEOUT_S)
    except TimeoutError:
        raise MailServerError("The mail server did not answer in time.") from None
    except smtplib.SMTPResponseException as error:
        raise MailServerError(f"The mail server refused the connection or the login ({_code_text(error)}).") from None
    except smtplib.SMTPException as error:
        raise MailServerError(f"The mail server refused the connection: {type(error).__name__}.") from None
    except (OSError, Failed, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise MailServerError(f"The mail server cannot be reached: {reason}.") from None
    return backend


def _call_in_time(work: Callable[[], Any], seconds: float) -> None:
    """Do the work on a daemon thread, because a read of a socket or a lookup of a name cannot be cancelled. Raises
    TimeoutError after `seconds`, Failed if no thread can be started, and whatever `work` raises.
    """
    start_in_thread(work).result(seconds)


def _classify(error: Exception) -> MailOutcome:
    """Return the outcome of an attempt that raised this. Raises MailServerError if the error concerns all mail."""
    match error:
        case smtplib.SMTPSenderRefused() if error.smtp_code != _TOO_BIG:
            raise MailServerError(f"The mail server refused our address ({_code_text(error)}): see CYBORG_MAIL_FROM.")
        case smtplib.SMTPHeloError():
            raise MailServerError(f"The mail server refused our greeting ({_code_text(error)}).")
        case smtplib.SMTPRecipientsRefused():
            answer = smtplib.SMTPResponseException(*next(iter(error.recipients.values())))
            outcome = _outcome_of_answer(answer, "this address")
            if outcome.is_permanent and _POLICY.match(_answer_bytes(answer)):
                outcome = MailOutcome(outcome.error, is_server_fault=True)
        case smtplib.SMTPResponseException():
            outcome = _outcome_of_answer(error, "the mail")
        case smtplib.SMTPNotSupportedError() | ValueError():
            outcome = MailOutcome(f"This cannot be sent as a mail: {type(error).__name__}.", is_permanent=True)
        case smtplib.SMTPServerDisconnected():
            outcome = MailOutcome("The mail server closed the connection.", is_server_fault=True)
        case TimeoutError():
            outcome = MailOutcome("The mail server did not answer in time.", is_server_fault=True)
        case OSError():
            reason = error.strerror or type(error).__name__
            outcome = MailOutcome(f"The connection to the mail server was lost: {reason}.", is_server_fault=True)
        case _:
            log.error("a mail could not be sent", exc_info=error)
            outcome = MailOutcome(f"This was not sent because of an error in the product: {type(error).__name__}.")
    return outcome


def _outcome_of_answer(error: smtplib.SMTPResponseException, refused: str) -> MailOutcome:
    """Return the outcome of a mail that the server has refused with this answer. Raises MailServerError if the answer
    concerns all mail. `refused` is the noun for the refused object.
    """
    code = error.smtp_code
    if code in _LOGIN_NEEDED:
        raise MailServerError(f"The mail server wants another login ({_code_text(error)}).")
    if 500 <= code < 600:
        return MailOutcome(f"The mail server refused {refused} ({_code_text(error)}).", is_permanent=True)
    text = f"The mail server does not accept {refused} now ({_code_text(error)})."
    return MailOutcome(text, is_server_fault=code == _CLOSING or code < 0)


def _code_text(error: smtplib.SMTPResponseException) -> str:
    """Return the code of the server's answer, with its enhanced status code if it has one: `550 5.1.1`. The rest of the
    answer may name addresses of the operator's network, which the subscriber may not see.
    """
    found = _STATUS_CODE.match(_answer_bytes(error))
    return f"{error.smtp_code} {found[0].decode()}" if found else str(error.smtp_code)


def _answer_bytes(error: smtplib.SMTPResponseException) -> bytes:
    """Return the text of the server's answer."""
    return error.smtp_error if isinstance(error.smtp_error, bytes) else str(error.smtp_error).encode()
