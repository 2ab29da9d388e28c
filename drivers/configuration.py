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

T = TypeVar("T")


class ConfigurationError(ValueError):
    """A configuration value or file is unusable; the message names the key or file and the reason."""


@dataclass(frozen=True)
class Key:
    """One documented key: its default (`shown`) and one sentence about its `effect`, both for the manual."""

    name: str
    shown: str
    effect: str


def key(name: str, default: Any, effect: str, shown: str | None = None) -> Any:
    """Return a dataclass field for one configuration key.

    `name` is its `CYBORG_…` name and `effect` one sentence for the manual, which prints `shown` in place of the
    default if it is given.
    """
    text = shown if shown is not None else f"`{default}`"
    return field(default=default, metadata={"key": Key(name, text, effect)})


def keys_of(cls: type) -> list[Key]:
    """Return the documented keys of a configuration class, in the order of its fields."""
    return [cast(Key, f.metadata["key"]) for f in fields(cls)]


def load(cls: type[T], environ: Mapping[str, str]) -> T:
    """Create a `cls` from the environment and the TOML file; keys that are in neither keep their defaults.

    Raises ConfigurationError if a value or the file is unusable. Unknown keys of the file are ignored.
    """
    stored = _file(environ.get("CYBORG_CONFIG"))
    values = {f.name: _value(f, environ, stored) for f in fields(cast(Any, cls)) if _given(f, environ, stored)}
    return cls(**values)


def _given(f: Field[Any], environ: Mapping[str, str], stored: Mapping[str, Any]) -> bool:
    name = f.metadata["key"].name
    return bool(environ.get(name)) or name in stored


def _value(f: Field[Any], environ: Mapping[str, str], stored: Mapping[str, Any]) -> Any:
    name = f.metadata["key"].name
    raw: Any = environ.get(name) or stored[name]
    wanted: Any = {"int": int, "float": float, "bool": bool, "tuple[str, ...]": tuple[str, ...]}.get(str(f.type), str)
    if wanted == tuple[str, ...] and isinstance(raw, str):
        raw = [word.strip() for word in raw.split(",") if word.strip()]
    if wanted is bool and isinstance(raw, str):
        raw = {"1": True, "0": False, "on": True, "off": False, "yes": True, "no": False}.get(raw.lower(), raw)
    try:
        return msgspec.convert(raw, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{name}={raw!r} is not usable: {error}") from None


def _file(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"CYBORG_CONFIG={path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"CYBORG_CONFIG={path} is not TOML: {error}") from None
