"""The parts of requests that reach many objects: `dry_run` and `token` in the body, and the answer with a preview."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from django.db import transaction
from rest_framework import serializers
from rest_framework.response import Response

from accelerators.api.own.errors import ApiError
from accelerators.api.own.fields import ClosedSerializer, StrictBooleanField, StrictTextField
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason
from accelerators.workflows import confirmations
from accelerators.workflows.bulk_targets import BulkForecast
from accelerators.workflows.confirmations import MAX_TOKEN_LENGTH, PreviewToken

TOKEN_EXCLUDES_DRY_RUN: Mapping[str, Any] = {
    "not": {"properties": {"dry_run": {"enum": [True]}}, "required": ["dry_run", "token"]}
}
"""The condition of bodies with a confirmation, for the OpenAPI document; `ConfirmationSerializer` checks it."""

ALWAYS, WHEN_NEEDED, NEVER = DRAFT_STORAGES = ("always", "when_needed", "never")
"""When the draft of a preview is stored."""


class ConfirmationSerializer(ClosedSerializer):
    """The fields with which a request asks for its preview, and is confirmed."""

    dry_run = StrictBooleanField(
        required=False, write_only=True, help_text="Answer with the preview, and change nothing."
    )
    token = StrictTextField(
        max_length=MAX_TOKEN_LENGTH,
        required=False,
        write_only=True,
        help_text="The token of the preview. It is valid for 15 minutes, for the same caller and the same request.",
    )

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values. Raises ValidationError (400) if both `dry_run` and `token` are given."""
        values = super().validate(values)
        if values.get("dry_run") and values.get("token"):
            raise serializers.ValidationError({"token": "leave it out to get a preview."})
        return values


class DraftConfirmationSerializer(ConfirmationSerializer):
    """The fields of a request whose preview is a draft that the server stores until it is confirmed or too old."""

    store_draft = serializers.ChoiceField(
        DRAFT_STORAGES,
        required=False,
        write_only=True,
        help_text="Only with `dry_run`: whether the server stores the draft that the token confirms; by default "
        "`always`. With `when_needed` it is stored only if the request is refused without a token. If no draft is "
        "stored, the preview has no token.",
    )

    def validate(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values. Raises ValidationError (400) also if `store_draft` is given without `dry_run`."""
        values = super().validate(values)
        if "store_draft" in values and not values.get("dry_run"):
            raise serializers.ValidationError({"store_draft": "give it only with dry_run."})
        return values


class DraftStorage:
    """Whether the draft of a preview is stored, as the body asks for it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.wanted: str = values.get("store_draft", ALWAYS)
        self.is_stored = True

    def issue_token(
        self, needs_confirmation: bool, draft: UUID, caller: Caller, request: Mapping[str, Any]
    ) -> PreviewToken | None:
        """Return the token that confirms this draft of a request; None if the draft is not stored, which is decided
        here, because it may depend on whether the request needs a confirmation."""
        self.is_stored = self.wanted == ALWAYS or (self.wanted == WHEN_NEEDED and needs_confirmation)
        return confirmations.issue_token(draft, caller, request) if self.is_stored else None


@contextmanager
def storing_draft(values: Mapping[str, Any]) -> Iterator[DraftStorage]:
    """Roll back the draft that is stored in the `with` block if the block decides that it is not to be stored."""
    storage = DraftStorage(values)
    if storage.wanted == ALWAYS:
        yield storage
        return
    with transaction.atomic():
        yield storage
        transaction.set_rollback(not storage.is_stored)


class ForecastSerializer(serializers.Serializer[Any]):
    """A predicted outcome, and how many objects have it."""

    outcome = serializers.CharField(read_only=True)
    number = serializers.IntegerField(read_only=True)
    held = serializers.BooleanField(read_only=True, help_text="Whether requests hold these devices.")
    text = serializers.CharField(read_only=True)


class PreviewSerializer(serializers.Serializer[Any]):
    """The forecast of a request. If `confirm` is true, it is done only with the token."""

    total = serializers.IntegerField(read_only=True)
    hosts = serializers.IntegerField(read_only=True, help_text="How many hosts it reaches.")
    held = serializers.IntegerField(read_only=True, help_text="How many held devices it would change.")
    forecast = ForecastSerializer(many=True, read_only=True)
    confirm = serializers.BooleanField(read_only=True, help_text="Whether the request is refused without the token.")
    token = serializers.CharField(read_only=True, allow_null=True, help_text="null if no draft was stored.")
    expires_at = serializers.DateTimeField(read_only=True, allow_null=True)


def describe_forecast(forecast: BulkForecast) -> dict[str, Any]:
    """Return a forecast as `ForecastSerializer` shows it."""
    return {
        "outcome": forecast.outcome.value,
        "number": forecast.number,
        "held": forecast.held,
        "text": forecast.text,
    }


class NotConfirmedError(ApiError):
    """The error 409 for a request that has no token and needs one. Its answer has the preview."""

    def __init__(self, preview: Mapping[str, Any]) -> None:
        held_text = f" and {_count(preview['held'], 'held device')}" if preview["held"] else ""
        text = f"This reaches {_count(preview['hosts'], 'host')}{held_text}. Nothing was done."
        text += " Read the preview, and send the request again with its token."
        super().__init__(409, text, RefusalReason.NOT_CONFIRMED)
        self.preview = preview


def respond_with_preview(preview: dict[str, Any], token: PreviewToken | None, is_dry_run: bool) -> Response:
    """Return the answer with a preview, if the request asked for it. Raises NotConfirmedError (409) otherwise.

    Without a `token` nothing can be confirmed.
    """
    preview |= {"token": token.text if token else None, "expires_at": token.expires_at if token else None}
    if not is_dry_run:
        raise NotConfirmedError(preview)
    return Response(preview)


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "2 hosts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
