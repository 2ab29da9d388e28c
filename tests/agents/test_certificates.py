"""Test which announcements of certificates count, and which certificates an agent accepts because of them."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import credentials, wire
from agents.certificates import (
    AnnouncementError,
    PinnedCertificates,
    encode_announcement,
    normalize_fingerprint,
    parse_announcements,
    sign_announcement,
)

KEY = Ed25519PrivateKey.generate()
PUBLIC_KEY = credentials.encode_public_key(KEY.public_key())
FIRST, SECOND, THIRD, FOREIGN = ("a" * 64, "b" * 64, "c" * 64, "f" * 64)
TO_SECOND = sign_announcement(KEY, 1, FIRST, SECOND, both_until=100)
TO_THIRD = sign_announcement(KEY, 2, SECOND, THIRD, both_until=200)


def pins(*announcements: wire.CertificateAnnouncement, first: str = FIRST, key: str = PUBLIC_KEY) -> PinnedCertificates:
    return PinnedCertificates(first, key).add_announcements(announcements)


def test_both_certificates_are_accepted_until_the_announced_time_and_then_only_the_new_one() -> None:
    accepted = pins(TO_SECOND)
    assert accepted.list_accepted(99) == {FIRST, SECOND}
    assert accepted.list_accepted(100) == {SECOND}
    assert pins().list_accepted(10**12) == {FIRST}, "without announcements, the first for ever"


def test_a_host_that_was_away_for_two_replacements_accepts_the_last_one() -> None:
    assert pins(TO_SECOND, TO_THIRD).list_accepted(150) == {SECOND, THIRD}
    assert pins(TO_THIRD, TO_SECOND).list_accepted(10**10) == {THIRD}, "in whatever order they arrived"
    assert pins(TO_THIRD).list_accepted(150) == {FIRST}, "the chain must begin with the pinned certificate"


def test_a_replaced_certificate_comes_back_with_a_later_announcement() -> None:
    back = sign_announcement(KEY, 2, SECOND, FIRST, both_until=300)
    assert pins(TO_SECOND, back).list_accepted(250) == {FIRST, SECOND}
    assert pins(TO_SECOND, back).list_accepted(300) == {FIRST}


@pytest.mark.parametrize(
    "forged",
    [
        sign_announcement(Ed25519PrivateKey.generate(), 1, FIRST, FOREIGN, 10**9),
        wire.CertificateAnnouncement(1, FIRST, FOREIGN, TO_SECOND.both_until, TO_SECOND.signature),
        wire.CertificateAnnouncement(2, FIRST, SECOND, TO_SECOND.both_until, TO_SECOND.signature),
        wire.CertificateAnnouncement(1, FIRST, SECOND, 10**9, TO_SECOND.signature),
        wire.CertificateAnnouncement(1, FOREIGN, SECOND, TO_SECOND.both_until, TO_SECOND.signature),
        wire.CertificateAnnouncement(1, FIRST, FOREIGN, 10**9, ""),
    ],
)
def test_no_announcement_counts_unless_the_announcement_key_has_signed_all_of_it(
    forged: wire.CertificateAnnouncement,
) -> None:
    assert pins(forged) == pins()
    with pytest.raises(AnnouncementError, match="line 1 is not signed with the announcement key"):
        parse_announcements(encode_announcement(forged), PUBLIC_KEY)


def test_no_announcement_counts_without_a_key_or_without_a_pinned_certificate() -> None:
    assert pins(TO_SECOND, key="").announcements == () == pins(TO_SECOND, first="").announcements
    assert (pins(key="").newest, pins(first="").newest) == ("", "")
    assert (pins().newest, pins(TO_SECOND, TO_THIRD).newest) == (FIRST, THIRD)
    assert pins(TO_THIRD).newest == FIRST, "an announcement that does not lead on from the first certificate"


def test_the_announcement_that_was_known_first_stays_when_another_has_its_number() -> None:
    other = sign_announcement(KEY, 1, FIRST, FOREIGN, 10**9)
    assert pins(TO_SECOND).add_announcements([other]) == pins(TO_SECOND)


def test_only_the_newest_announcements_are_kept() -> None:
    many = [sign_announcement(KEY, number, FIRST, SECOND, number) for number in range(1, wire.MAX_ANNOUNCEMENTS + 3)]
    assert [one.number for one in pins(*many).announcements] == list(range(3, wire.MAX_ANNOUNCEMENTS + 3))
    with pytest.raises(AnnouncementError, match="more than 32 announcements"):
        parse_announcements("\n".join(map(encode_announcement, many)), PUBLIC_KEY)


def test_a_file_of_announcements_has_one_in_each_line_with_rising_numbers() -> None:
    lines = [encode_announcement(TO_SECOND), encode_announcement(TO_THIRD)]
    assert parse_announcements("\n\n".join(lines) + "\n", PUBLIC_KEY) == (TO_SECOND, TO_THIRD)
    assert parse_announcements("", PUBLIC_KEY) == ()
    for text, says in (
        ("\n".join(reversed(lines)), "line 2 does not have a higher number"),
        ("{}", "line 1 is no announcement"),
        ("[1]", "line 1 is no announcement"),
        (lines[0].replace("a" * 64, "A" * 64), "line 1 is no announcement"),
    ):
        with pytest.raises(AnnouncementError, match=says):
            parse_announcements(text, PUBLIC_KEY)


@pytest.mark.parametrize("text", ["AB" * 32, "sha256:" + "ab" * 32, ":".join(["AB"] * 32), f" {'ab' * 32}\n"])
def test_a_fingerprint_is_read_as_other_programs_print_it(text: str) -> None:
    assert normalize_fingerprint(text) == "ab" * 32


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "xy" * 32])
def test_a_text_that_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(AnnouncementError, match="not the SHA-256 fingerprint"):
        normalize_fingerprint(text)
