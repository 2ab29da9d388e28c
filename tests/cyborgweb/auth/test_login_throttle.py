"""Test how many failed logins of a name are allowed, from where, and that the counts are bounded."""

from __future__ import annotations

import pytest
from django.test import RequestFactory

from cyborgweb.auth import login_throttle
from cyborgweb.auth.login_throttle import (
    BUSY_TEXT,
    FORGET_ALL_S,
    MAX_FAILURES,
    MAX_FAILURES_OF_NAME,
    MAX_FAILURES_OF_NETWORK,
    NETWORK_TEXT,
    THROTTLED_TEXT,
    LoginThrottle,
    LoginThrottledError,
)
from cyborgweb.settings.keys import Keys


def fail(throttle: LoginThrottle, name: str, address: str, times: int = 1) -> int:
    """Fail to log in `times` times; return the number of attempts that were allowed."""
    allowed = 0
    for _ in range(times):
        try:
            with throttle.attempt(name, address):
                allowed += 1
        except LoginThrottledError as refused:
            assert str(refused) in (THROTTLED_TEXT, NETWORK_TEXT)
    return allowed


def log_in(throttle: LoginThrottle, name: str, address: str, has_logged_in: bool = True) -> None:
    """Log in, or (has_logged_in=False) try to while the password cannot be checked."""
    with throttle.attempt(name, address) as take_back:
        take_back(has_logged_in)


def test_a_name_is_refused_from_one_address_and_each_minute_allows_one_attempt_more() -> None:
    now = [1000.0]
    throttle = LoginThrottle(lambda: now[0])
    assert fail(throttle, "root", "192.0.2.1", 20) == MAX_FAILURES
    assert fail(throttle, "ROOT", "192.0.2.1") == 0
    assert fail(throttle, "root", "192.0.2.2") == fail(throttle, "olga", "192.0.2.1") == 1
    now[0] += FORGET_ALL_S / MAX_FAILURES + 0.1
    assert fail(throttle, "root", "192.0.2.1", 5) == 1


def test_a_name_is_refused_from_all_addresses_after_many_failures() -> None:
    throttle = LoginThrottle(lambda: 1000.0)
    allowed = [fail(throttle, "root", f"198.51.100.{number}", 20) for number in range(20)]
    assert sum(allowed) == MAX_FAILURES_OF_NAME and allowed[0] == MAX_FAILURES and allowed[-1] == 0


@pytest.mark.slow
def test_two_addresses_that_never_stop_failing_do_not_lock_a_name_out_elsewhere() -> None:
    now = [1000.0]
    throttle = LoginThrottle(lambda: now[0])
    for minute in range(24 * 60):
        fail(throttle, "root", "198.51.100.1", 20)
        fail(throttle, "root", "198.51.100.2", 20)
        log_in(throttle, "root", f"192.0.2.{minute % 250}")
        now[0] += 60


def test_a_person_logs_in_from_where_they_did_before_while_others_fail_with_the_name_or_from_that_address() -> None:
    throttle = LoginThrottle(lambda: 1000.0)
    log_in(throttle, "Root", "192.0.2.1")
    for number in range(1, 100):
        fail(throttle, "root", f"198.51.100.{number}", 20)
        fail(throttle, f"name {number}", "192.0.2.1")
    assert fail(throttle, "root", "192.0.2.2") == fail(throttle, "olga", "192.0.2.1") == 0
    log_in(throttle, "root", "192.0.2.1")
    assert fail(throttle, "root", "192.0.2.1", 20) == MAX_FAILURES, "guessing from there is limited as before"


def test_an_address_where_the_password_could_not_be_checked_is_not_one_where_the_person_logged_in() -> None:
    throttle = LoginThrottle(lambda: 1000.0)
    log_in(throttle, "root", "192.0.2.1", has_logged_in=False)
    for number in range(20):
        fail(throttle, "root", f"198.51.100.{number}", 20)
    assert fail(throttle, "root", "192.0.2.1") == 0


def test_the_addresses_of_earlier_logins_are_kept_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_throttle, "MAX_ENTRIES", 20)
    throttle = LoginThrottle()
    for number in range(100):
        log_in(throttle, "root", f"198.51.100.{number}")
        log_in(throttle, "root", "192.0.2.1")
    assert len(throttle._logged_in) == 20 and ("root", "192.0.2.1") in throttle._logged_in


def test_refused_attempts_write_one_warning_a_minute_for_a_name_or_an_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [1000.0]
    throttle = LoginThrottle(lambda: now[0])
    for _ in range(10 * 60):
        fail(throttle, "root", "198.51.100.1", 10)
        now[0] += 1
    assert len(caplog.records) == 10
    caplog.clear()
    for number in range(1000):
        fail(throttle, f"name {number}", "198.51.100.2")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("address", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("", "unknown", True),
    ],
)
def test_addresses_that_one_machine_can_choose_from_count_as_one(address: str, other: str, is_same: bool) -> None:
    throttle = LoginThrottle()
    fail(throttle, "root", address, MAX_FAILURES)
    assert fail(throttle, "root", other) == (0 if is_same else 1)


def test_a_login_that_succeeds_or_cannot_be_checked_does_not_count() -> None:
    throttle = LoginThrottle()
    for _ in range(3 * MAX_FAILURES):
        with throttle.attempt("root", "192.0.2.1") as take_back:
            take_back(True)
    assert fail(throttle, "root", "192.0.2.1", 20) == MAX_FAILURES


def test_only_two_passwords_are_checked_at_the_same_time() -> None:
    throttle = LoginThrottle()
    with throttle.attempt("a", "192.0.2.1"), throttle.attempt("b", "192.0.2.2"):
        with pytest.raises(LoginThrottledError) as refused, throttle.attempt("c", "192.0.2.3"):
            pytest.fail("a third password was checked")
        assert str(refused.value) == BUSY_TEXT
    assert fail(throttle, "c", "192.0.2.3") == 1


def test_one_client_with_a_new_name_each_time_does_not_keep_others_from_logging_in() -> None:
    throttle = LoginThrottle(lambda: 1000.0)
    with throttle.attempt("random 1", "2001:db8::1"):
        with pytest.raises(LoginThrottledError) as refused, throttle.attempt("random 2", "2001:db8::2"):
            pytest.fail("two passwords of one network were checked at the same time")
        assert str(refused.value) == BUSY_TEXT
        assert fail(throttle, "root", "192.0.2.1") == 1
    assert fail(throttle, "random 2", "2001:db8::2") == 1


def test_one_password_cannot_be_tried_with_many_names_from_one_network() -> None:
    now = [1000.0]
    throttle = LoginThrottle(lambda: now[0])
    allowed = sum(fail(throttle, f"name {number}", "192.0.2.1") for number in range(3 * MAX_FAILURES_OF_NETWORK))
    assert allowed == MAX_FAILURES_OF_NETWORK
    with pytest.raises(LoginThrottledError) as refused, throttle.attempt("root", "192.0.2.1"):
        pytest.fail("a password was checked")
    assert str(refused.value) == NETWORK_TEXT
    assert fail(throttle, "root", "192.0.2.2") == 1
    now[0] += FORGET_ALL_S / MAX_FAILURES_OF_NETWORK + 0.1
    assert fail(throttle, "root", "192.0.2.1", 5) == 1


def test_the_memory_for_counts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_throttle, "MAX_ENTRIES", 20)
    throttle = LoginThrottle()
    allowed = 0
    for number in range(200):
        fail(throttle, f"name {number}", f"198.51.100.{number}")
        allowed += fail(throttle, "root", "192.0.2.1")
    kept = (throttle._by_name, throttle._by_network, throttle._by_name_and_address)
    assert [len(counts._counts) for counts in kept] == [20, 20, 20]
    assert allowed == MAX_FAILURES, "a name that is tried again and again is not dropped"


@pytest.mark.parametrize(
    ("public_url", "proxies", "forwarded", "address"),
    [
        ("", (), "192.0.2.9", "127.0.0.1"),
        ("https://console.example", (), "192.0.2.9", "192.0.2.9"),
        ("https://console.example", (), "203.0.113.5, 192.0.2.9", "192.0.2.9"),
        ("https://console.example", (), "", "127.0.0.1"),
        ("https://console.example", ("127.0.0.1",), "192.0.2.9", "192.0.2.9"),
        ("https://console.example", ("10.0.0.5",), "192.0.2.9", "127.0.0.1"),
    ],
)
def test_the_address_of_a_client_is_what_the_proxy_saw_and_never_what_the_client_says(
    monkeypatch: pytest.MonkeyPatch, public_url: str, proxies: tuple[str, ...], forwarded: str, address: str
) -> None:
    keys = Keys(public_url=public_url, proxy_addresses=proxies)
    monkeypatch.setattr(login_throttle, "get_keys", lambda: keys)
    request = RequestFactory().post("/admin/login/", headers={"x-forwarded-for": forwarded})
    assert login_throttle.get_client_address(request) == address
