"""Check mail addresses and domains, and bring them into their plain ASCII form. It does not use Django, because the
configuration imports it.

An address is `LOCAL@DOMAIN`. LOCAL has at most 64 characters: words of ASCII letters, digits and `_+%&'~-`, each of
which begins with a letter, a digit or `_`, joined by single dots. DOMAIN has at most 253 characters: at least two
labels of letters, digits and inner hyphens, the last of which is no number, or only `localhost`. An internationalised
domain is converted by IDNA 2008 with the mappings of UTS 46. RFC 5321 allows more: quoted local parts, literals,
comments. Headers and SMTP commands can be made of these, so they are not accepted.
"""

from __future__ import annotations

import re

from cyborgweb.errors import CyborgwebError

MAX_LOCAL_PART, MAX_DOMAIN = 64, 253
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_+%&'~-]*"
_LOCAL_PART = re.compile(rf"{_WORD}(?:\.{_WORD})*")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.)+(?![0-9]+\Z){_LABEL}|localhost")
_SENDER = re.compile(r"(?:[A-Za-z0-9 ._-]{1,100} )?<([^<>]+)>")


class MailAddressError(CyborgwebError):
    """This is no mail address, or no domain of one, that we send mail to. The text says what is accepted."""


def parse_mail_address(text: str) -> str:
    """Return the address in its plain form: the domain in lower-case ASCII, the local part as it is written.

    Raises MailAddressError for everything that the grammar of this module does not contain.
    """
    local_part, _, domain = text.rpartition("@")
    if len(local_part) > MAX_LOCAL_PART or not _LOCAL_PART.fullmatch(local_part):
        raise MailAddressError(
            "This is no e-mail address that mail can be sent to: write NAME@DOMAIN, where NAME has only ASCII letters,"
            f" digits, single dots and _+%&'~-, and at most {MAX_LOCAL_PART} characters."
        )
    return f"{local_part}@{parse_mail_domain(domain)}"


def find_plain_form(stored: str) -> str:
    """Return a stored address in its plain form; as it is if we do not accept it any more. An earlier release stored
    addresses as they were written.
    """
    try:
        return parse_mail_address(stored)
    except MailAddressError:
        return stored


def parse_mail_domain(text: str) -> str:
    """Return the domain in lower-case ASCII. Raises MailAddressError if it is no domain that mail can be sent to."""
    domain = text.lower()
    if not text.isascii() and len(text) <= MAX_DOMAIN:
        import idna  # imported only when it is needed, because it is rarely needed

        try:
            domain = idna.encode(text, uts46=True, std3_rules=True).decode("ascii")
        except ValueError:  # IDNAError, too
            domain = ""
    if len(domain) > MAX_DOMAIN or not _DOMAIN.fullmatch(domain):
        raise MailAddressError("This is no e-mail address that mail can be sent to: its domain is no name in DNS.")
    return domain


def parse_sender(text: str) -> str:
    """Return the address of a sender that is written as ADDRESS or as `NAME <ADDRESS>`. Raises MailAddressError."""
    found = _SENDER.fullmatch(text)
    return parse_mail_address(found[1] if found else text)
