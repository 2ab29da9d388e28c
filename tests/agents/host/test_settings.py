"""Tests of the agent's settings: defaults, unusable values, join tokens, host names and the tables of drivers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agents import credentials
from agents.host.settings import (
    AgentSettings,
    determine_host_names,
    read_driver_settings,
    read_join_token,
    read_settings,
)
from drivers.configuration import ConfigurationError, list_keys

TOKEN = credentials.encode_join_string("http://127.0.0.1:8000", "", "cmp1.example", "s3cret")


def test_the_settings_have_defaults_for_an_empty_environment() -> None:
    settings = read_settings({})
    assert settings.enabled_drivers == ("fake_driver",)
    assert (settings.state_dir, settings.rescan_s) == ("./var/agent", 60.0)
    assert (settings.uevent_debounce_ms, settings.driver_deadline_s) == (100, 20.0)
    assert read_join_token(settings) is None
    assert determine_host_names(settings, None) == (socket.getfqdn(), socket.gethostname())


def test_every_key_is_documented() -> None:
    for one in list_keys(AgentSettings):
        assert one.name.startswith("CYBORG_")
        assert one.effect.endswith(".")
        assert one.default_text


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"CYBORG_RESCAN_S": "soon"}, "CYBORG_RESCAN_S='soon' is not usable"),
        ({"CYBORG_RESCAN_S": "0"}, "CYBORG_RESCAN_S=0.0 is not usable: give 1 or more"),
        ({"CYBORG_UEVENT_DEBOUNCE_MS": "-1"}, "CYBORG_UEVENT_DEBOUNCE_MS=-1 is not usable"),
        ({"CYBORG_ENABLED_DRIVERS": ","}, "must name 1 to 64 drivers"),
        ({"CYBORG_ENABLED_DRIVERS": "pci_driver,pci_driver"}, "none of them twice"),
        ({"CYBORG_ENABLED_DRIVERS": "pci driver"}, "cannot be a driver's name"),
    ],
)
def test_unusable_values_are_refused_with_key_and_value(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_settings(environ)
    assert sentence in str(caught.value)


def test_the_join_token_comes_from_the_variable_or_the_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    for environ in ({"CYBORG_JOIN_TOKEN": TOKEN}, {"CYBORG_JOIN_TOKEN_FILE": str(file)}):
        join = read_join_token(read_settings(environ))
        assert join is not None
        assert (join.address, join.host, join.secret) == ("http://127.0.0.1:8000", "cmp1.example", "s3cret")
    file.unlink()
    assert read_join_token(read_settings({"CYBORG_JOIN_TOKEN_FILE": str(file)})) is None


@pytest.mark.parametrize("padding", ["", "=", "=="])
@pytest.mark.parametrize("host", ["c", "cm", "cmp"])
def test_a_join_token_of_any_length_is_read_with_and_without_padding(host: str, padding: str) -> None:
    token = credentials.encode_join_string("http://127.0.0.1:8000", "", host, "s3cret")
    join = read_join_token(read_settings({"CYBORG_JOIN_TOKEN": token + padding}))
    assert join is not None and join.host == host


@pytest.mark.parametrize(
    ("token", "sentence"),
    [
        ("rubbish", "the join token is not readable"),
        (credentials.encode_join_string("ftp://x", "", "h", "s"), "is not http://HOST:PORT"),
        (credentials.encode_join_string("http://x:99999", "", "h", "s"), "is not http://HOST:PORT"),
        (credentials.encode_join_string("http://x:1", "ab", "h", "s"), "pins a certificate, but its address"),
    ],
)
def test_an_unusable_join_token_is_refused_with_the_reason(token: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_join_token(read_settings({"CYBORG_JOIN_TOKEN": token}))


def test_the_host_name_is_taken_from_settings_then_token_then_journal_then_system() -> None:
    join = credentials.parse_join_string(TOKEN)
    assert determine_host_names(read_settings({}), join, "old")[0] == "cmp1.example"
    assert determine_host_names(read_settings({}), None, "old")[0] == "old"
    assert determine_host_names(read_settings({"CYBORG_HOST_NAME": "n", "CYBORG_HOST_NODE": "m"}), None) == ("n", "m")
    with pytest.raises(ConfigurationError, match=r"CYBORG_HOST_NAME=n, but the join token is for cmp1\.example"):
        determine_host_names(read_settings({"CYBORG_HOST_NAME": "n"}), join)


def test_driver_settings_have_one_table_per_driver_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "drivers.toml"
    environ = {"CYBORG_DRIVER_SETTINGS": str(file)}
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_driver_settings(read_settings(environ))
    file.write_text("[pci_driver")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        read_driver_settings(read_settings(environ))
    file.write_text("rules = []")
    with pytest.raises(ConfigurationError, match="'rules' is outside of a"):
        read_driver_settings(read_settings(environ))
    file.write_text("[pci_driver]\nrules = [{vendor = '1af4'}]")
    assert read_driver_settings(read_settings(environ)) == {"pci_driver": {"rules": [{"vendor": "1af4"}]}}
