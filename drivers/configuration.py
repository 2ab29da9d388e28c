"""Read typed configuration: each program has a frozen dataclass, filled from `CYBORG_…` variables and a TOML file.

The environment overrides the file that `CYBORG_CONFIG` names. The agent's keys are declared in `agents.host.settings`,
the conductor's in `cyborgweb.settings.keys`; `docs/configuration.md` is generated from the same fields.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from drivers.errors import DriversBaseError

ConfigurationT = TypeVar("ConfigurationT")


class ConfigurationError(DriversBaseError, ValueError):
    """A configuration value or file is unusable; the message names the key or file and the reason."""


@dataclass(frozen=True)
class ConfigurationKey:
    """One documented key: its default (`default_text`) and one sentence about its `effect`, both for the manual."""

    name: str
    default_text: str
    effect: str


def declare_key(name: str, default: Any, effect: str, default_text: str | None = None) -> Any:
    """Return a dataclass field with the default `default` for one configuration key.

    `name` is the key's `CYBORG_…` name, and `effect` is one sentence for the manual. The manual prints `default_text`
    in place of the default if it is given.
    """
    text = default_text if default_text is not None else f"`{default}`"
    return field(default=default, metadata={"key": ConfigurationKey(name, text, effect)})


def list_keys(cls: type) -> list[ConfigurationKey]:
    """Return the documented keys of a configuration class, in the order of its fields.

    Raises KeyError for a field that was not created by `declare_key`.
    """
    return [cast(ConfigurationKey, f.metadata["key"]) for f in fields(cls)]


def load_configuration(cls: type[ConfigurationT], environ: Mapping[str, str]) -> ConfigurationT:
    """Create a `cls` from the environment and the TOML file; keys that are in neither keep their defaults.

    An empty environment variable counts as not set. Raises ConfigurationError if a value or the file is unusable.
    Unknown keys of the file are ignored.
    """
    file_values = _read_file(environ.get("CYBORG_CONFIG"))
    values = {
        f.name: _read_value(f, environ, file_values) for f in fields(cast(Any, cls)) if _is_set(f, environ, file_values)
    }
    return cls(**values)


def _is_set(dataclass_field: Field[Any], environ: Mapping[str, str], file_values: Mapping[str, Any]) -> bool:
    """Return whether the environment has a non-empty value for the field's key, or the file has the key."""
    name = dataclass_field.metadata["key"].name
    return bool(environ.get(name)) or name in file_values


def _read_value(dataclass_field: Field[Any], environ: Mapping[str, str], file_values: Mapping[str, Any]) -> Any:
    """Return the value of the field's key, converted to the field's type; the environment overrides the file.

    A text for a tuple is split at its commas, and a text for a bool may be 1, 0, on, off, yes or no. Raises
    ConfigurationError if the value cannot be converted, and KeyError if neither source has the key.
    """
    name = dataclass_field.metadata["key"].name
    raw: Any = environ.get(name) or file_values[name]
    value_type: Any = {"int": int, "float": float, "bool": bool, "tuple[str, ...]": tuple[str, ...]}.get(
        str(dataclass_field.type), str
    )
    if value_type == tuple[str, ...] and isinstance(raw, str):
        raw = [word.strip() for word in raw.split(",") if word.strip()]
    if value_type is bool and isinstance(raw, str):
        raw = {"1": True, "0": False, "on": True, "off": False, "yes": True, "no": False}.get(raw.lower(), raw)
    try:
        return msgspec.convert(raw, value_type, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{name}={raw!r} is not usable: {error}") from None


def _read_file(path: str | None) -> dict[str, Any]:
    """Return the content of the TOML file; empty without a path.

    Raises ConfigurationError if it is unreadable or not TOML.
    """
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"CYBORG_CONFIG={path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"CYBORG_CONFIG={path} is not TOML: {error}") from None
