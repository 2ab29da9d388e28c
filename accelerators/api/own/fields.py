"""How rows look in our own API: explicit fields, references with addresses, and only the fields a caller asked for.

Called by the resources of `own` and by `agents.api`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from rest_framework import serializers
from rest_framework.exceptions import ParseError

from accelerators.devices.lifecycle import MAX_REASON


class Url(serializers.URLField):
    """The address of a row of `collection`; `source` is the path to its key."""

    def __init__(self, collection: str, **options: Any) -> None:
        self.collection = collection
        super().__init__(read_only=True, **options)

    def to_representation(self, value: Any) -> str:
        """Below the address under which the caller reached us."""
        return f"{self.context.get('base', '')}/api/{self.collection}/{value}/"


class HostReference(serializers.Serializer):
    """Which host."""

    uuid = serializers.UUIDField(read_only=True)
    name = serializers.CharField(read_only=True)
    url = Url("hosts", source="uuid")


class DeviceReference(serializers.Serializer):
    """Which device."""

    uuid = serializers.UUIDField(read_only=True)
    type = serializers.CharField(read_only=True)
    model = serializers.CharField(read_only=True)
    address = serializers.CharField(read_only=True, allow_null=True)
    url = Url("devices", source="uuid")


class DeployableReference(serializers.Serializer):
    """Which deployable."""

    uuid = serializers.UUIDField(read_only=True)
    name = serializers.CharField(read_only=True)
    url = Url("deployables", source="uuid")


class ProfileReference(serializers.Serializer):
    """Which device profile."""

    uuid = serializers.UUIDField(read_only=True)
    name = serializers.CharField(read_only=True)
    url = Url("profiles", source="uuid")


class HandleReference(serializers.Serializer):
    """Which attach handle, and how it reaches an instance."""

    uuid = serializers.UUIDField(read_only=True)
    type = serializers.CharField(source="attach_type", read_only=True)
    info = serializers.SerializerMethodField()
    url = Url("attach_handles", source="uuid")

    def get_info(self, handle: Any) -> dict[str, str]:
        """Parsed; as the driver wrote it."""
        return attach_info(handle.attach_info)


def attach_info(text: str) -> dict[str, str]:
    """A handle's JSON as an object."""
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"value": text}


class Text(serializers.CharField):
    """A string; a number is none."""

    def to_internal_value(self, data: Any) -> str:
        """As it came, without blanks around it."""
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class Uuid(serializers.UUIDField):
    """A uuid as text; a number is none."""

    def to_internal_value(self, data: Any) -> Any:
        """As it came."""
        return super().to_internal_value(data) if isinstance(data, str) else self.fail("invalid", value=data)


class Flag(serializers.BooleanField):
    """True or false; no word for it."""

    def to_internal_value(self, data: Any) -> bool:
        """As it came."""
        return data if isinstance(data, bool) else self.fail("invalid", input=data)


class Number(serializers.IntegerField):
    """A whole number; no text of it. 5.0 is one: JSON and its schemas know no other kind of number."""

    def to_internal_value(self, data: Any) -> int:
        """Return it as an int; 400 for everything else."""
        if isinstance(data, float) and data.is_integer():
            return int(data)
        return data if isinstance(data, int) and not isinstance(data, bool) else self.fail("invalid")


class Closed(serializers.Serializer):
    """What is written may name only what can be written."""

    combinations: ClassVar[Mapping[str, Any]] = {}
    """JSON Schema of what a body must fulfil beside its single fields; the OpenAPI document shows it. Such as: one of
    two fields. The serializer or the view checks the same."""

    def to_internal_value(self, data: Any) -> Any:
        """The values; 400 for a field that there is not."""
        writable = [name for name, field in self.fields.items() if not field.read_only]
        if isinstance(data, Mapping) and (unknown := sorted(set(data) - set(writable))):
            sentence = f"{', '.join(unknown)[:200]}: cannot be written; {', '.join(writable)} can."
            raise serializers.ValidationError({"non_field_errors": [sentence]})
        return super().to_internal_value(data)


class Chosen(Closed, serializers.ModelSerializer):
    """A row with `?fields=a,b` applied (`context["fields"]`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in set(self.fields) - set(self.context.get("fields") or self.fields):
            self.fields.pop(name)


class Why(Closed):
    """What may be said with an action."""

    reason = Text(
        max_length=MAX_REASON, allow_blank=True, required=False, help_text="Shown with it, and with its event."
    )


def chosen(text: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that `?fields=` names; 400 for one there is not."""
    names = tuple(name for name in text.split(",") if name)
    if unknown := sorted(set(names) - set(fields)):
        raise ParseError(f"fields: there is no {', '.join(unknown)[:200]}; there are {', '.join(fields)}.")
    return names
