"""Test that the agent's key is on disk before its public key is sent, and that only its owner can read it."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from agents import credentials, wire
from agents.host.connection.identity import KEY_FILE, NEXT_KEY_FILE, load_or_create_keys
from drivers.configuration import ConfigurationError


def test_the_key_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    first = load_or_create_keys(tmp_path, "cmp1.example", "cmp1")
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert (
        load_or_create_keys(tmp_path, "cmp1.example", "cmp1").current_identity.public_key
        == first.current_identity.public_key
    )
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_a_half_written_key_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).with_suffix(".new").write_bytes(b"half")
    load_or_create_keys(tmp_path, "h", "h")
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    load_or_create_keys(tmp_path, "h", "h")
    (tmp_path / KEY_FILE).chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"open to other users \(mode 0644\): run chmod 600"):
        load_or_create_keys(tmp_path, "h", "h")


@pytest.mark.parametrize("content", [b"", b"not a key", b"AAAA\n"])
def test_a_key_file_with_other_content_is_refused_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / KEY_FILE).write_bytes(content)
    (tmp_path / KEY_FILE).chmod(0o600)
    with pytest.raises(ConfigurationError, match="is not an agent's key: move it away"):
        load_or_create_keys(tmp_path, "h", "h")


def test_the_credential_proves_the_key_for_this_host_epoch_nonce_and_server(tmp_path: Path) -> None:
    identity = load_or_create_keys(tmp_path, "cmp1.example", "cmp1").current_identity
    challenge = credentials.Challenge(nonce="n" * 24, seconds=30, versions=wire.VERSIONS)
    credential = credentials.parse_authorization(
        credentials.encode_authorization(identity.create_credential(challenge, 7, "ab12", "secret"))
    )
    signed = credentials.build_connect_bytes("cmp1.example", "cmp1", 7, challenge.nonce, "ab12")
    key = Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(credential.public_key))
    key.verify(base64.urlsafe_b64decode(credential.signature), signed)
    assert (credential.token, credential.epoch) == ("secret", 7)


def test_the_next_key_is_stored_beside_the_current_one_until_it_is_adopted(tmp_path: Path) -> None:
    keys = load_or_create_keys(tmp_path, "h", "h")
    coming = keys.prepare_next_key()
    assert keys.prepare_next_key() is coming
    assert stat.S_IMODE((tmp_path / NEXT_KEY_FILE).stat().st_mode) == 0o600
    again = load_or_create_keys(tmp_path, "h", "h")
    assert (
        again.next_identity and again.next_identity.public_key == coming.public_key != again.current_identity.public_key
    )
    again.adopt_next_key()
    assert (again.current_identity.public_key, again.next_identity) == (coming.public_key, None)
    last = load_or_create_keys(tmp_path, "h", "h")
    assert (last.current_identity.public_key, last.next_identity) == (coming.public_key, None)
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_a_key_in_use_is_not_overwritten_when_the_adopted_one_could_not_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    keys = load_or_create_keys(tmp_path, "h", "h")
    first = keys.current_identity
    second = keys.prepare_next_key()
    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", full)
        keys.adopt_next_key()
        assert keys.current_identity is second
        with pytest.raises(ConfigurationError, match="No space left"):
            keys.prepare_next_key()
    stored = load_or_create_keys(tmp_path, "h", "h")
    assert stored.next_identity and (stored.current_identity.public_key, stored.next_identity.public_key) == (
        first.public_key,
        second.public_key,
    )
    third = keys.prepare_next_key()
    stored = load_or_create_keys(tmp_path, "h", "h")
    assert stored.next_identity and (stored.current_identity.public_key, stored.next_identity.public_key) == (
        second.public_key,
        third.public_key,
    )
