"""Fields and base serializers of our own API: explicit fields, references with addresses, and the `fields`
parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from rest_framework import serializers
from rest_framework.exceptions import ParseError

from accelerators.devices.lifecycle import MAX_REASON

MAX_GENERATION = 2**63 - 1


class UrlField(serializers.URLField):
    """The address of a row of `collection`; `source` is the path to the row's key."""

    def __init__(self, collection: str, **options: Any) -> None:
        self.collection = collection
        super().__init__(read_only=True, **options)

    def to_representation(self, value: Any) -> str:
        """Return the address, beginning with the scheme and host that the caller used."""
        return f"{self.context.get('base', '')}/api/{self.collection}/{value}/"


class HostReference(serializers.Serializer[Any]):
    """A reference to a host."""

    uuid = serializers.UUIDField(read_only=True)
    name = serializers.CharField(read_only=True)
    url = UrlField("hosts", source="uuid")


class DeviceReference(serializers.Serializer[Any]):
    """A reference to a device."""

    uuid = serializers.UUIDField(read_only=True)
    type = serializers.CharField(read_only=True)
    model = serializers.CharField(read_only=True)
    name = serializers.CharField(
        source="hardware_name.full", read_only=True, help_text="What people call the hardware: NVIDIA A100 PCIe 80GB."
    )
    address = serializers.CharField(read_only=True, allow_null=True)
    url = UrlField("devices", source="uuid")


class DeployableReference(serializers.Serializer[Any]):
    """A reference to a deployable."""

    uuid = serializers.UUIDField(read_only=True)
    name = serializers.CharField(read_only=True)
    url = UrlField("deployables", source="uuid")


class ProfileReference(serializers.Serializer[Any]):
    """A reference to a device profile."""

    uuid = serializers.UUIDField(read_only=True)
    name = serializers.CharField(read_only=True)
    url = UrlField("profiles", source="uuid")


class HandleReference(serializers.Serializer[Any]):
    """A reference to an attach handle, with the information that passes it to an instance."""

    uuid = serializers.UUIDField(read_only=True)
    type = serializers.CharField(source="attach_type", read_only=True)
    info = serializers.SerializerMethodField()
    url = UrlField("attach_handles", source="uuid")

    def get_info(self, handle: Any) -> dict[str, str]:
        """The attach information as the driver wrote it, parsed."""
        return parse_attach_info(handle.attach_info)


def parse_attach_info(text: str) -> dict[str, str]:
    """Parse the attach information of a handle, which is a JSON object. Other text is returned as `{"value": text}`."""
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"value": text}


class StrictTextField(serializers.CharField):
    """A string field that refuses numbers instead of converting them."""

    def to_internal_value(self, data: Any) -> str:
        """Return the string without surrounding blanks; raise ValidationError for any other type."""
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class ReasonField(StrictTextField):
    """The optional reason of a change, of at most MAX_REASON characters."""

    def __init__(self, help_text: str) -> None:
        super().__init__(max_length=MAX_REASON, allow_blank=True, required=False, help_text=help_text)


class StrictUuidField(serializers.UUIDField):
    """A uuid field that accepts only text, not numbers."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the UUID; raise ValidationError for a value that is not text or not a uuid."""
        return super().to_internal_value(data) if isinstance(data, str) else self.fail("invalid", value=data)


class StrictBooleanField(serializers.BooleanField):
    """A boolean field that accepts only true and false, not words such as "yes"."""

    def to_internal_value(self, data: Any) -> bool:
        """Return the boolean; raise ValidationError for any other type."""
        return data if isinstance(data, bool) else self.fail("invalid", input=data)


class StrictIntegerField(serializers.IntegerField):
    """An integer field that refuses text. It accepts 5.0, because JSON and JSON Schema do not distinguish it from 5."""

    def to_internal_value(self, data: Any) -> int:
        """Return the value as an int; raise ValidationError (400) for text, booleans and fractions."""
        if isinstance(data, float) and data.is_integer():
            return int(data)
        return data if isinstance(data, int) and not isinstance(data, bool) else self.fail("invalid")


class ClosedSerializer(serializers.Serializer[Any]):
    """A serializer that refuses unknown and read-only fields."""

    field_conditions: ClassVar[Mapping[str, Any]] = {}
    """JSON Schema of conditions on the whole body, for example "exactly one of two fields". The OpenAPI document shows
    it; the serializer or the view checks the same conditions."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the validated values; raise ValidationError (400) if a field does not exist or cannot be written."""
        writable = [name for name, field in self.fields.items() if not field.read_only]
        if isinstance(data, Mapping) and (unknown := sorted(set(data) - set(writable))):
            message = f"{', '.join(unknown)[:200]}: cannot be written; writable fields: {', '.join(writable)}."
            raise serializers.ValidationError({"non_field_errors": [message]})
        return super().to_internal_value(data)


class GenerationField(StrictIntegerField):
    """The generation on which a change is based. If the row has another one, the change is refused.

    The serializer accepts a body without it, because the view answers such a body with 428, not with 400.
    """

    HELP = "Needed: the generation as you read it. If it has changed since, the answer is 409; without it, 428."

    def __init__(self, help_text: str = HELP, **options: Any) -> None:
        super().__init__(min_value=0, max_value=MAX_GENERATION, required=False, help_text=help_text, **options)


NEEDS_GENERATION: Mapping[str, Any] = {"required": ["generation"]}
"""The condition of bodies that change settings: they name the generation on which the change is based."""


class ChangeSerializer(ClosedSerializer):
    """Adds `generation` to the body of a change; to be combined with the serializer of the row."""

    generation = GenerationField()

    field_conditions: ClassVar[Mapping[str, Any]] = NEEDS_GENERATION


class ChosenFieldsSerializer(serializers.Serializer[Any]):
    """A serializer that shows only the fields in `context["fields"]` (from `?fields=a,b`), or all if there are none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in set(self.fields) - set(self.context.get("fields") or self.fields):
            self.fields.pop(name)


class RowSerializer(ChosenFieldsSerializer, ClosedSerializer, serializers.ModelSerializer[Any]):
    """A serializer of a row. The row's columns are read-only, except for those that the serializer declares."""

    def get_extra_kwargs(self) -> dict[str, Any]:
        """Make the fields read-only that are made from columns; fields that the serializer declares are not
        affected."""
        return {name: {"read_only": True} for name in self.Meta.fields}


class ReasonSerializer(ClosedSerializer):
    """The body of an action: an optional reason."""

    reason = ReasonField("Shown with the result and in its event.")


def parse_field_names(text: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the field names in `?fields=`; raise ParseError (400) for a field that does not exist."""
    names = tuple(name for name in text.split(",") if name)
    if unknown := sorted(set(names) - set(fields)):
        raise ParseError(f"fields: there is no field {', '.join(unknown)[:200]}; known are {', '.join(fields)}.")
    return names
