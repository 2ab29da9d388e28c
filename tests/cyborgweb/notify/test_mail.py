"""Test mails over SMTP: each mail has a result of its own, whatever the mail server answers to the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.mail import EmailMessage
from django.test import Client

from accelerators.domain.errors import RefusedError
from accelerators.models import Event
from cyborgweb.models.notify import Delivery, MailServer, Subscription
from cyborgweb.notify import mail, sender, subscriptions
from cyborgweb.settings.keys import Keys, _check_public_keys
from cyborgweb.settings.mail_address import MailAddressError, parse_mail_address
from drivers.configuration import ConfigurationError
from tests.cyborgweb.notify.conftest import OLGA, PAST_TIME, Subscribe, make_retries_due
from tests.support.smtp import SmtpServer, run_smtp_server

pytestmark = pytest.mark.django_db
HEADER_AS_ADDRESS = "=?utf-8?q?=0a?=@example.org"
NOT_PLAIN = [
    HEADER_AS_ADDRESS,
    '"a b"@example.org',
    '"a\x01b"@example.org',
    "a@example.org\n",
    "a@example.org\r\nBcc: x@y.org",
    " a@example.org",
    "a@[127.0.0.1]",
    "a@1.2.3.4",
    "a..b@example.org",
    "-oQ@example.org",
    "ü@example.org",
    "a@example",
    "a@ex_ample.org",
    "a@" + "ü" * 250 + ".org",
    "a,b@example.org",
    "a@b@example.org",
    "a" * 65 + "@example.org",
    "",
]


@pytest.fixture
def smtp(settings: Any) -> Iterator[SmtpServer]:
    with run_smtp_server() as server:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.port
        yield server


def subscribe_mails(subscribe: Subscribe, *names: str, messages: int = 1) -> list[Subscription]:
    """Create, for each of these local parts, a subscription with waiting messages."""
    rows = [subscribe("email", name=name, target=f"{name}@example.org") for name in names]
    for row in rows:
        for number in range(messages):
            row.deliveries.create(kind="request.bound", data={"request": "r"}, event=number)
    return rows


def list_states() -> list[tuple[str, str, int]]:
    """Return the subscription's name, the progress and the attempts of each delivery."""
    rows = Delivery.objects.exclude(reader=OLGA.user_id).order_by("id")
    return list(rows.values_list("subscription__name", "progress", "attempts"))


def limit_time_of_mail(patch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    """Let the mail to this local part end after `seconds`. All others keep their limit, which is so long that a busy
    machine does not exceed it.
    """
    send_mail = mail.send_mail

    def send(letter: EmailMessage) -> mail.MailOutcome:
        with pytest.MonkeyPatch.context() as during_this_mail:
            if letter.to == [f"{name}@example.org"]:
                during_this_mail.setattr(mail, "MAIL_TIMEOUT_S", seconds)
            return send_mail(letter)

    patch.setattr(mail, "send_mail", send)


@pytest.mark.parametrize("address", NOT_PLAIN)
def test_an_address_that_is_not_plain_is_refused(address: str, subscribe: Subscribe) -> None:
    with pytest.raises(MailAddressError, match="no e-mail address"):
        parse_mail_address(address)
    with pytest.raises(RefusedError, match="no e-mail address"):
        subscribe("email", target=address)


def test_the_domain_of_an_address_is_stored_in_ascii(subscribe: Subscribe) -> None:
    assert subscribe("email", target="Olga.o'hara+gpu@BÜCHER.example").target == "Olga.o'hara+gpu@xn--bcher-kva.example"
    assert subscribe("email", target="a@faß.de").target == "a@xn--fa-hia.de", "IDNA 2003 would write to fass.de"
    row = subscriptions.edit(subscribe("email", target="a@b.org").pk, {"target": "a@Bücher.example"}, OLGA)
    assert row.target == "a@xn--bcher-kva.example"


def test_an_address_that_is_not_plain_is_refused_in_the_configuration_and_for_users(client: Client) -> None:
    for keys in (Keys(mail_from=HEADER_AS_ADDRESS), Keys(mail_from="A\n <a@b.org>"), Keys(mail_domains=("a b.org",))):
        with pytest.raises(ConfigurationError, match="CYBORG_MAIL_"):
            _check_public_keys(keys)
    good = Keys(mail_from="Cloud <cloud@Bücher.example>")
    _check_public_keys(good)
    assert good.allowed_mail_domains == ("xn--bcher-kva.example",)
    client.force_login(User.objects.create(username="vera", is_staff=True, is_superuser=True))
    user = User.objects.create(username="tim")
    form = {"username": "tim", "email": HEADER_AS_ADDRESS, "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    shown = client.post(f"/admin/auth/user/{user.pk}/change/", form)
    assert b"no e-mail address that mail can be sent to" in shown.content
    assert client.post(f"/admin/auth/user/{user.pk}/change/", form | {"email": "t@b.org"}).status_code == 302
    user.refresh_from_db()
    assert user.email == "t@b.org"


@pytest.mark.slow
def test_what_has_a_stored_address_that_is_not_plain_can_be_switched_off(subscribe: Subscribe, client: Client) -> None:
    client.force_login(User.objects.create(username="vera", is_staff=True, is_superuser=True))
    user = User.objects.create(username="tim", email="admin@corp")
    page = f"/admin/auth/user/{user.pk}/change/"
    form = {"username": "tim", "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    assert b"no e-mail address" in client.post(page, form | {"email": "other@corp"}).content
    assert client.post(page, form | {"email": "admin@corp"}).status_code == 302
    user.refresh_from_db()
    assert (user.is_active, user.email) == (False, "admin@corp")
    by_api, by_console = subscribe("email", target="a@b.org"), subscribe("email", target="a@b.org")
    Subscription.objects.update(target="admin@corp")
    assert subscriptions.edit(by_api.pk, {"standing": "off"}, OLGA).standing == "off"
    page = f"/admin/cyborgweb/subscription/{by_console.pk}/change/"
    values = {"name": "mine", "kinds": "request.bound", "scope": "cloud", "target": "admin@corp", "standing": "off"}
    values["generation"] = "1"
    answer = client.post(page, values)
    by_console.refresh_from_db()
    assert (answer.status_code, by_console.standing, by_console.target) == (302, "off", "admin@corp")
    for changes in ({"standing": "active"}, {"target": "other@corp"}):
        with pytest.raises(RefusedError, match="no e-mail address"):
            subscriptions.edit(by_api.pk, changes, OLGA)


def test_a_stored_address_that_is_not_plain_costs_only_its_own_mail(subscribe: Subscribe, smtp: SmtpServer) -> None:
    bad, *_ = subscribe_mails(subscribe, "bad", "good", "other")
    Subscription.objects.filter(pk=bad.pk).update(target=HEADER_AS_ADDRESS)
    sender.run_mails()
    assert list_states() == [("bad", "given up", 1), ("good", "delivered", 1), ("other", "delivered", 1)]
    bad.refresh_from_db()
    assert "no e-mail address that mail can be sent to" in bad.last_error
    make_retries_due()
    sender.run_mails()
    assert sorted(smtp.recipients) == ["good@example.org", "other@example.org"]


def test_a_stored_address_outside_the_domains_gets_no_mail(
    subscribe: Subscribe, smtp: SmtpServer, settings: Any
) -> None:
    subscribe_mails(subscribe, "olga")
    settings.KEYS = replace(settings.KEYS, mail_domains=("ours.org",))
    sender.run_mails()
    assert not smtp.accepted and "at ours.org only" in Delivery.objects.get().last_error


@pytest.mark.parametrize(
    ("verb", "answer", "progress", "says"),
    [
        ("RCPT", "550 5.1.1 no such user at 10.0.0.7", "given up", "The mail server refused this address (550 5.1.1)."),
        ("RCPT", "451 4.7.1 greylisted", "waiting", "The mail server does not accept this address now (451 4.7.1)."),
        ("RCPT", "550 5.1.1 no user at relay.corp", "given up", "The mail server refused this address (550 5.1.1)."),
        ("RCPT", "550 5.7.133 members only", "waiting", "The mail server refused this address (550 5.7.133)."),
        ("DATA", "554 no", "given up", "The mail server refused the mail (554)."),
        (".", "554 5.7.1 spam", "given up", "The mail server refused the mail (554 5.7.1)."),
        ("DATA", "550 5.7.1 not by our policy", "given up", "The mail server refused the mail (550 5.7.1)."),
        (".", "550 5.7.26 not authenticated", "given up", "The mail server refused the mail (550 5.7.26)."),
        (".", "554 relay policy", "given up", "The mail server refused the mail (554)."),
        (
            "DATA",
            "451 4.7.1 policy service is away",
            "waiting",
            "The mail server does not accept the mail now (451 4.7.1).",
        ),
        (".", "452 full", "waiting", "The mail server does not accept the mail now (452)."),
        (".", "closes", "waiting", "The mail server closed the connection."),
        ("DATA", "421 closing", "waiting", "The mail server does not accept the mail now (421)."),
        (".", "hangs", "waiting", "The mail server did not answer in time."),
    ],
)
@pytest.mark.slow
def test_a_refused_mail_is_settled_alone_and_no_accepted_mail_is_repeated(
    subscribe: Subscribe,
    smtp: SmtpServer,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    answer: str,
    progress: str,
    says: str,
) -> None:
    # A run goes on until nothing is due: on a busy machine the refused mail must not become due again meanwhile.
    monkeypatch.setattr(sender, "RETRY_DELAYS_S", (3600, 3600))
    _, refused, _ = subscribe_mails(subscribe, "first", "refused", "last", messages=2)
    smtp.answer = lambda at, _, to: answer if at == verb and to.startswith("refused") else ""
    with monkeypatch.context() as patch:
        if answer == "hangs":
            limit_time_of_mail(patch, "refused", 0.5)
        sender.run_mails()
    assert sorted(smtp.recipients) == ["first@example.org", "last@example.org"]
    assert (
        list_states()
        == [("first", "delivered", 1)] * 2 + [("refused", progress, 1)] * 2 + [("last", "delivered", 1)] * 2
    )
    refused.refresh_from_db()
    assert (refused.last_error, refused.failures) == (says, 1)
    assert not MailServer.objects.filter(failures__gt=0).exists()
    make_retries_due()
    smtp.answer = lambda *_: ""
    sender.run_mails()
    assert smtp.recipients.count("refused@example.org") == (progress == "waiting")
    assert len(smtp.accepted) == len(set(smtp.recipients)), "nobody's mail is repeated"


@pytest.mark.parametrize(
    "error", [UnicodeError("x"), ValueError("x"), KeyError("x"), TimeoutError("x"), OSError(5, "x")]
)
def test_any_exception_while_mailing_is_settled_with_its_own_mail(
    subscribe: Subscribe, smtp: SmtpServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    subscribe_mails(subscribe, "first", "broken", "last")
    write = EmailMessage.message

    def fail(letter: EmailMessage, *arguments: Any, **options: Any) -> Any:
        if letter.to == ["broken@example.org"]:
            raise error
        return write(letter, *arguments, **options)

    monkeypatch.setattr(EmailMessage, "message", fail)
    sender.run_mails()
    assert sorted(smtp.recipients) == ["first@example.org", "last@example.org"]
    progress = "given up" if isinstance(error, ValueError) else "waiting"
    assert list_states()[1] == ("broken", progress, 1)
    assert type(error).__name__ in (said := Delivery.objects.order_by("id")[1].last_error) or "server" in said


@pytest.mark.parametrize(
    ("answer", "progress"), [("550 5.7.1 not by our policy", "given up"), ("451 4.7.1 try later", "waiting")]
)
@pytest.mark.slow
def test_many_letters_refused_after_one_another_for_their_content_postpone_no_other_letter(
    subscribe: Subscribe, smtp: SmtpServer, answer: str, progress: str
) -> None:
    subscribe_mails(subscribe, *(f"refused{number}" for number in range(2 * sender.MAX_SERVER_FAULTS)), "last")
    smtp.answer = lambda at, _, to: answer if at == "." and to.startswith("refused") else ""
    sender.run_mails()
    assert smtp.recipients == ["last@example.org"]
    assert [state for _, state, _ in list_states()] == [progress] * 2 * sender.MAX_SERVER_FAULTS + ["delivered"]
    assert not MailServer.objects.filter(failures__gt=0).exists()
    make_retries_due()
    smtp.answer = lambda *_: ""
    sender.run_mails()
    tried_again = 2 * sender.MAX_SERVER_FAULTS if progress == "waiting" else 0
    assert len(smtp.recipients) == 1 + tried_again, "a refusal for good is not tried again"


def test_a_subscription_whose_mails_are_refused_repeatedly_is_paused(subscribe: Subscribe, smtp: SmtpServer) -> None:
    (row,) = subscribe_mails(subscribe, "gone")
    smtp.answer = lambda verb, *_: "550 5.1.1 no" if verb == "RCPT" else ""
    for number in range(1, sender.MAX_REFUSED_MAILS):
        sender.run_mails()
        make_retries_due()
        row.refresh_from_db()
        assert (row.standing, row.failures) == ("active", number)
        row.deliveries.create(kind="request.bound", event=number)
    sender.run_mails()
    row.refresh_from_db()
    assert row.standing == "paused"
    assert "refused 5 times" in Event.objects.get(action="subscription.paused").reason


def test_an_unavailable_mail_server_is_asked_once_per_pause_and_costs_no_attempt(
    subscribe: Subscribe, smtp: SmtpServer
) -> None:
    subscribe_mails(subscribe, "a", "b", "c")
    answers = ["421 busy", "closes", "554 go away"]
    for failures, answer in enumerate(answers, 1):
        smtp.answer = lambda verb, *_, answer=answer: answer if verb == "CONNECT" else ""
        for _ in range(3):
            sender.run_mails()
        assert (smtp.connections, MailServer.objects.get().failures) == (failures, failures)
        MailServer.objects.update(retry_at=PAST_TIME)
    smtp.answer = lambda verb, *_: "530 5.7.0 log in" if verb == "RCPT" else ""
    sender.run_mails()
    assert MailServer.objects.get().last_error == "The mail server wants another login (530 5.7.0)."
    MailServer.objects.update(retry_at=PAST_TIME)
    smtp.answer = lambda verb, *_: "553 5.1.8 who are you" if verb == "MAIL" else ""
    sender.run_mails()
    assert "see CYBORG_MAIL_FROM" in MailServer.objects.get().last_error
    assert {(progress, attempts) for _, progress, attempts in list_states()} == {("waiting", 0)}
    MailServer.objects.update(retry_at=PAST_TIME)
    smtp.answer = lambda *_: ""
    sender.run_mails()
    assert {(progress, attempts) for _, progress, attempts in list_states()} == {("delivered", 1)}
    assert (MailServer.objects.get().failures, MailServer.objects.get().last_error) == (0, "")


def test_a_mail_server_that_loses_every_connection_is_left_alone_for_a_while(
    subscribe: Subscribe, smtp: SmtpServer
) -> None:
    subscribe_mails(subscribe, *"abcdef")
    smtp.answer = lambda verb, *_: "closes" if verb == "." else ""
    for _ in range(3):
        sender.run_mails()
    assert smtp.connections == sender.MAX_SERVER_FAULTS == MailServer.objects.get().failures
    assert sum(attempts for _, _, attempts in list_states()) == sender.MAX_SERVER_FAULTS


@pytest.mark.parametrize(
    "answer",
    ["554 5.7.1 Relay access denied", "550 relay not permitted", "553 not in my list of allowed rcpthosts (#5.7.1)"],
)
@pytest.mark.slow
def test_L3_a_relay_that_denies_everybody_for_an_hour_loses_no_mail(
    subscribe: Subscribe, smtp: SmtpServer, answer: str
) -> None:
    subscribe_mails(subscribe, *"abcdef")
    smtp.answer = lambda verb, *_: answer if verb == "RCPT" else ""
    for _ in range(2):
        sender.run_mails()
    assert smtp.connections == sender.MAX_SERVER_FAULTS == MailServer.objects.get().failures
    for _ in range(5):  # the pauses of one mail allow at most six attempts in an hour
        MailServer.objects.update(retry_at=PAST_TIME)
        make_retries_due()
        sender.run_mails()
    assert {progress for _, progress, _ in list_states()} == {"waiting"}
    assert {row.standing for row in Subscription.objects.all()} == {"active"}
    MailServer.objects.update(retry_at=PAST_TIME)
    make_retries_due()
    smtp.answer = lambda *_: ""
    sender.run_mails()
    assert {progress for _, progress, _ in list_states()} == {"delivered"}
    assert MailServer.objects.get().failures == 0


def test_a_kill_between_acceptance_and_storing_repeats_at_most_that_mail(
    subscribe: Subscribe, smtp: SmtpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe_mails(subscribe, "a", "b", "c")
    store = sender.store_outcomes

    def dies_after_the_second(*arguments: Any) -> None:
        if len(smtp.accepted) == 2:
            raise KeyboardInterrupt
        store(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sender, "store_outcomes", dies_after_the_second)
        sender.run_mails()
    sender.run_mails()
    repeated = smtp.recipients[1]
    assert sorted(smtp.recipients) == sorted(["a@example.org", "b@example.org", "c@example.org", repeated])
    ids = [str(letter["Message-ID"]) for letter in smtp.accepted]
    assert ids[1] in ids[2:] and len(set(ids)) == 3, "the repetition has the same Message-ID"


def test_projects_take_turns_for_the_mails_of_a_round(subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribe_mails(subscribe, *(f"n{number}" for number in range(6)))
    other = subscribe("email", caller=replace(OLGA, project_id="p2"), name="other", target="other@example.org")
    other.deliveries.create(kind="request.bound", event=1)
    assert [due[0].target.partition("@")[0] for due in sender.fetch_due_mails(3)] == ["n0", "other", "n1"]
