"""What is remembered of Keystone's answers: how long, of whom, and what happens while it is away."""

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

START, LIFE = 1_000_000.0, 3600.0
ALICE = Caller("alice", "u1", frozenset({"member"}), "p1")


@dataclass
class World:
    """A clock and a Keystone, as `TokenCache` sees them."""

    now: float = START
    known: dict[str, TokenResult] = field(default_factory=lambda: {"good": TokenResult(ALICE, START + LIFE)})
    asked: list[tuple[str, bool]] = field(default_factory=list)
    failure: TokenCheckUnavailableError | None = None

    def ask(self, token: str, allow_expired: bool) -> TokenResult:
        self.asked.append((token, allow_expired))
        if self.failure:
            raise self.failure
        judged = self.known.get(token, UNKNOWN_TOKEN)
        return judged if allow_expired or judged.expires_at > self.now else UNKNOWN_TOKEN

    def tokens(self, entries: int = 100) -> TokenCache:
        return TokenCache(self.ask, clock=lambda: self.now, monotonic=lambda: self.now, max_entries=entries)


AWAY = TokenCheckUnavailableError("nobody answers", unreachable=True)
REFUSES_US = TokenCheckUnavailableError("our password is wrong", unreachable=False)


def test_an_answer_is_good_for_its_time_and_a_revocation_is_seen_after_it() -> None:
    world = World()
    tokens = world.tokens()
    assert tokens.find_caller("good") == tokens.find_caller("good") == ALICE
    world.known.clear()  # revoked
    world.now += VALID_CACHE_S - 1
    assert tokens.find_caller("good") == ALICE and len(world.asked) == 1
    world.now += 1
    assert tokens.find_caller("good") is None and len(world.asked) == 2


def test_a_refusal_is_remembered_for_a_while() -> None:
    world = World()
    tokens = world.tokens()
    assert tokens.find_caller("bad") is None and tokens.find_caller("bad") is None
    assert len(world.asked) == 1
    world.known["bad"] = world.known["good"]
    world.now += UNKNOWN_CACHE_S
    assert tokens.find_caller("bad") == ALICE


def test_a_token_ends_when_it_ends_and_costs_no_question_afterwards() -> None:
    world = World(known={"good": TokenResult(ALICE, START + 10)})
    tokens = world.tokens()
    world.now += 9.999
    assert tokens.find_caller("good") == ALICE
    world.now = START + 10
    assert tokens.find_caller("good") is None and tokens.find_caller("good") is None
    assert len(world.asked) == 1


def test_with_a_service_token_an_ended_token_lives_as_long_as_keystone_says() -> None:
    world = World(known={"good": TokenResult(ALICE, START - 10)})
    tokens = world.tokens()
    assert tokens.find_caller("good") is None
    assert tokens.find_caller("good", allow_expired=True) == ALICE == tokens.find_caller("good", allow_expired=True)
    assert tokens.find_caller("good") is None
    assert world.asked == [("good", False), ("good", True)]


def test_while_keystone_is_away_known_tokens_go_on_until_they_end_and_unknown_ones_are_unavailable() -> None:
    world = World()
    tokens = world.tokens()
    assert tokens.find_caller("good") == ALICE
    world.failure = AWAY
    for _ in range(int((LIFE - 1) // 60)):
        world.now += 60
        assert tokens.find_caller("good") == ALICE
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("other")
    world.now = START + LIFE
    assert tokens.find_caller("good") is None


def test_keystone_saying_no_is_never_overruled_by_memory() -> None:
    world = World()
    tokens = world.tokens()
    assert tokens.find_caller("good") == ALICE
    world.known.clear()
    world.now += VALID_CACHE_S
    assert tokens.find_caller("good") is None
    world.failure, world.now = AWAY, world.now + UNKNOWN_CACHE_S
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("good")


def test_memory_does_not_stretch_when_keystone_is_there_but_refuses_the_service_user() -> None:
    world = World()
    tokens = world.tokens()
    assert tokens.find_caller("good") == ALICE
    world.failure, world.now = REFUSES_US, START + VALID_CACHE_S
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("good")


def test_after_a_failure_one_request_in_a_while_tries_and_the_others_do_not_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(failure=AWAY)
    tokens = world.tokens()
    for token in ("a", "b", "c"):
        with pytest.raises(TokenCheckUnavailableError):
            tokens.find_caller(token)
    assert len(world.asked) == 1
    world.now += UNREACHABLE_PAUSE_S
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("d")
    assert len(world.asked) == 2
    world.failure, world.now = None, world.now + UNREACHABLE_PAUSE_S
    assert tokens.find_caller("good") == ALICE and tokens.find_caller("b") is None
    assert [record.message.split()[0] for record in caplog.records] == ["Tokens", "Keystone"]


def test_a_refused_service_user_makes_nobody_wait(caplog: pytest.LogCaptureFixture) -> None:
    world = World(failure=REFUSES_US)
    tokens = world.tokens()
    for token in ("a", "b"):
        with pytest.raises(TokenCheckUnavailableError):
            tokens.find_caller(token)
    world.failure = None
    assert tokens.find_caller("good") == ALICE
    assert (len(world.asked), len(caplog.records)) == (3, 2)


def test_only_one_request_hangs_with_a_hanging_keystone() -> None:
    world = World(failure=AWAY)
    tokens = world.tokens()
    with pytest.raises(TokenCheckUnavailableError):
        tokens.find_caller("a")
    go, inside = threading.Event(), threading.Event()

    def hang(token: str, allow_expired: bool) -> TokenResult:
        inside.set()
        go.wait(20)
        return world.known["good"]

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


def test_many_threads_with_one_token_ask_once() -> None:
    world, waiting, go = World(), threading.Barrier(9), threading.Event()

    def slow(token: str, allow_expired: bool) -> TokenResult:
        go.wait(20)
        return world.ask(token, allow_expired)

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
    assert len(world.asked) == 1 and not tokens._pending


def test_memory_is_bounded_and_made_up_tokens_push_no_good_one_out() -> None:
    world = World(known={f"good{n}": TokenResult(ALICE, START + LIFE) for n in range(20)})
    tokens = world.tokens(entries=5)
    for n in range(20):
        tokens.find_caller(f"good{n}")
    for n in range(50):
        tokens.find_caller(f"bad{n}")
    assert (len(tokens._valid), len(tokens._unknown)) == (5, 5)
    asked = len(world.asked)
    assert tokens.find_caller("good19") == ALICE and len(world.asked) == asked
    assert not any(b"good" in key for key, _ in tokens._valid)
