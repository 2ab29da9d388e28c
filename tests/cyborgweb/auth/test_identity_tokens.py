"""Test the cache of Keystone's answers about tokens: how long it keeps them, its size, and outages of Keystone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from accelerators.domain.caller import Caller
from cyborgweb.auth.token_cache import (
    PROBE_TIMEOUT_S,
    UNKNOWN_CACHE_S,
    UNKNOWN_TOKEN,
    UNREACHABLE_PAUSE_S,
    VALID_CACHE_S,
    TokenCache,
    TokenCheckUnavailableError,
    TokenResult,
)
from tests.support.webserver import until

START_TIME, TOKEN_LIFETIME_S = 1_000_000.0, 3600.0
ALICE = Caller("alice", "u1", frozenset({"member"}), "p1")


@dataclass
class FakeKeystone:
    """A clock and a Keystone, in the form that `TokenCache` uses."""

    now: float = START_TIME
    valid_tokens: dict[str, TokenResult] = field(
        default_factory=lambda: {"good": TokenResult(ALICE, START_TIME + TOKEN_LIFETIME_S)}
    )
    validations: list[tuple[str, bool]] = field(default_factory=list)
    failure: TokenCheckUnavailableError | None = None

    def validate(self, token: str, allow_expired: bool) -> TokenResult:
        self.validations.append((token, allow_expired))
        if self.failure:
            raise self.failure
        judged = self.valid_tokens.get(token, UNKNOWN_TOKEN)
        return judged if allow_expired or judged.expires_at > self.now else UNKNOWN_TOKEN

    def make_cache(self, entries: int = 100) -> TokenCache:
        return TokenCache(self.validate, clock=lambda: self.now, monotonic=lambda: self.now, max_entries=entries)


AWAY = TokenCheckUnavailableError("nobody answers", unreachable=True)
REFUSES_US = TokenCheckUnavailableError("our password is wrong", unreachable=False)


def test_a_validated_token_is_cached_for_a_time_and_then_validated_again() -> None:
    world = FakeKeystone()
    tokens = world.make_cache()
    assert tokens.find_caller("good") == tokens.find_caller("good") == ALICE
    world.valid_tokens.clear()  # revoked
    world.now += VALID_CACHE_S - 1
    assert tokens.find_caller("good") == ALICE and len(world.validations) == 1
    world.now += 1
    assert tokens.find_caller("good") is None and len(world.validations) == 2


def test_a_refused_token_is_cached_for_a_while() -> None:
    world = FakeKeystone()
    tokens = world.make_cache()
    assert tokens.find_caller("bad") is None and tokens.find_caller("bad") is None
    assert len(world.validations) == 1
    world.valid_tokens["bad"] = world.valid_tokens["good"]
    world.now += UNKNOWN_CACHE_S
    assert tokens.find_caller("bad") == ALICE


def test_a_cached_token_is_refused_after_its_expiry_without_asking_keystone() -> None:
    world = FakeKeystone(valid_tokens={"good": TokenResult(ALICE, START_TIME + 10)})
    tokens = world.make_cache()
    world.now += 9.999
    assert tokens.find_caller("good") == ALICE
    world.now = START_TIME + 10
    assert tokens.find_caller("good") is None and tokens.find_caller("good") is None
    assert len(world.validations) == 1


def test_an_expired_token_with_a_service_token_is_accepted_if_keystone_accepts_it() -> None:
    world = FakeKeystone(valid_tokens={"good": TokenResult(ALICE, START_TIME - 10)})
    tokens = world.make_cache()
    assert tokens.find_caller("good") is None
    assert tokens.find_caller("good", allow_expired=True) == ALICE == tokens.find_caller("good", allow_expired=True)
    assert tokens.find_caller("good") is None
    assert world.validations == [("good", False), ("good", True)]


def test_while_keystone_is_away_cached_tokens_work_until_they_expire_and_others_fail() -> None:
    world = FakeKeystone()
    tokens = world.make_cache()
    assert tokens.find_caller("good") == ALICE
    world.failure = AWAY
    for _ in range(int((TOKEN_LIFETIME_S - 1) // 60)):
        world.now += 60
        assert tokens.find_caller("good") == ALICE
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("other")
    world.now = START_TIME + TOKEN_LIFETIME_S
    assert tokens.find_caller("good") is None


def test_a_token_refused_by_keystone_is_never_accepted_from_the_cache() -> None:
    world = FakeKeystone()
    tokens = world.make_cache()
    assert tokens.find_caller("good") == ALICE
    world.valid_tokens.clear()
    world.now += VALID_CACHE_S
    assert tokens.find_caller("good") is None
    world.failure, world.now = AWAY, world.now + UNKNOWN_CACHE_S
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("good")


def test_cached_tokens_are_not_prolonged_when_keystone_refuses_the_service_user() -> None:
    world = FakeKeystone()
    tokens = world.make_cache()
    assert tokens.find_caller("good") == ALICE
    world.failure, world.now = REFUSES_US, START_TIME + VALID_CACHE_S
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("good")


def test_after_a_failure_one_request_per_pause_asks_keystone_and_the_others_fail_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = FakeKeystone(failure=AWAY)
    tokens = world.make_cache()
    for token in ("a", "b", "c"):
        with pytest.raises(TokenCheckUnavailableError):
            tokens.find_caller(token)
    assert len(world.validations) == 1
    world.now += UNREACHABLE_PAUSE_S
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("d")
    assert len(world.validations) == 2
    world.failure, world.now = None, world.now + UNREACHABLE_PAUSE_S
    assert tokens.find_caller("good") == ALICE and tokens.find_caller("b") is None
    assert [record.message.split()[0] for record in caplog.records] == ["Tokens", "Keystone"]


def test_after_a_refusal_of_the_service_user_every_request_asks_keystone_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = FakeKeystone(failure=REFUSES_US)
    tokens = world.make_cache()
    for token in ("a", "b"):
        with pytest.raises(TokenCheckUnavailableError):
            tokens.find_caller(token)
    world.failure = None
    assert tokens.find_caller("good") == ALICE
    assert (len(world.validations), len(caplog.records)) == (3, 2)


def test_only_one_request_waits_for_a_hanging_keystone() -> None:
    world = FakeKeystone(failure=AWAY)
    tokens = world.make_cache()
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("a")
    go, inside = threading.Event(), threading.Event()

    def hang(token: str, allow_expired: bool) -> TokenResult:
        inside.set()
        go.wait(20)
        return world.valid_tokens["good"]

    tokens._validate = hang
    world.now += UNREACHABLE_PAUSE_S
    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(tokens.find_caller, "good")
        assert inside.wait(20)
        world.now += PROBE_TIMEOUT_S - 1
        with pytest.raises(TokenCheckUnavailableError):
            tokens.find_caller("b")
        go.set()
        assert trying.result(20) == ALICE


def test_concurrent_threads_with_one_token_validate_it_once() -> None:
    world, waiting, go = FakeKeystone(), threading.Barrier(9), threading.Event()

    def slow(token: str, allow_expired: bool) -> TokenResult:
        go.wait(20)
        return world.validate(token, allow_expired)

    tokens = TokenCache(slow, clock=lambda: world.now, monotonic=lambda: world.now)

    def asking() -> Caller | None:
        waiting.wait(20)
        return tokens.find_caller("good")

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(asking) for _ in range(8)]
        waiting.wait(20)
        until(lambda: tokens._pending)
        go.set()
        assert {answer.result(20) for answer in answers} == {ALICE}
    assert len(world.validations) == 1 and not tokens._pending


def test_the_cache_is_bounded_and_invalid_tokens_do_not_evict_valid_ones() -> None:
    world = FakeKeystone(
        valid_tokens={f"good{n}": TokenResult(ALICE, START_TIME + TOKEN_LIFETIME_S) for n in range(20)}
    )
    tokens = world.make_cache(entries=5)
    for n in range(20):
        tokens.find_caller(f"good{n}")
    for n in range(50):
        tokens.find_caller(f"bad{n}")
    assert (len(tokens._valid), len(tokens._unknown)) == (5, 5)
    asked = len(world.validations)
    assert tokens.find_caller("good19") == ALICE and len(world.validations) == asked
    assert not any(b"good" in key for key, _ in tokens._valid)
