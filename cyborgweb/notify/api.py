"""The API resources subscriptions, deliveries and inbox, for projects and for operators.

A project sees its own subscriptions and the personal ones of the caller; its managers also see the ended ones of its
members, but neither their whole URLs nor their deliveries. Subscriptions to the whole cloud are only for
callers that the rule `cyborg:subscription:elevated` allows. An inbox can be read by its owner alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.fields import (
    NEEDS_GENERATION,
    ChangeSerializer,
    ClosedSerializer,
    RowSerializer,
    StrictBooleanField,
    StrictTextField,
    UrlField,
)
from accelerators.api.own.filters import SavedViewFilter, single_choice_filter
from accelerators.api.own.views import CollectionView
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceType
from cyborgweb.auth import policy
from cyborgweb.models.event_types import (
    DeliveryProgress,
    DeliveryWay,
    NotificationKind,
    SubscriptionScope,
    SubscriptionStanding,
    describe_event,
)
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import subscriptions


class SubscriptionReference(serializers.Serializer[Any]):
    """Reference to a subscription."""

    uuid = serializers.UUIDField(read_only=True)
    name = serializers.CharField(read_only=True)
    url = UrlField("subscriptions", source="uuid")


class SubscriptionFilter(SavedViewFilter):
    """Filter by way, standing and project. The project matters only to callers that see more than one."""

    way = single_choice_filter(DeliveryWay)
    standing = single_choice_filter(SubscriptionStanding)
    project = filters.CharFilter(field_name="project_id")


class SubscriptionSerializer(RowSerializer):
    """A subscription: the messages that it selects, and the way in which they are delivered."""

    url = UrlField("subscriptions", source="uuid")
    name = StrictTextField(max_length=64, help_text="Your own name for it.")
    project = serializers.CharField(source="project_id", read_only=True)
    personal = StrictBooleanField(required=False, help_text="Whether it belongs to you alone. An inbox always does.")
    scope = serializers.ChoiceField(
        SubscriptionScope.choices(),
        required=False,
        help_text="It covers the project's own requests and the devices that they hold, or the whole cloud.",
    )
    kinds = serializers.ListField(
        child=serializers.ChoiceField([kind.value for kind in NotificationKind]),
        allow_empty=False,
        min_length=1,
        max_length=len(NotificationKind),
        help_text="The kinds of messages that you want to get.",
    )
    host = StrictTextField(
        max_length=255,
        allow_blank=True,
        required=False,
        help_text="Only messages about this host; needs the scope cloud.",
    )
    type = serializers.ChoiceField(["", *DeviceType.choices()], required=False)
    # Any, because `Field.label` is a text: the metaclass takes declared fields off the class, so nothing is hidden.
    label: Any = StrictTextField(
        max_length=255, allow_blank=True, required=False, help_text="Only messages about requests with this label."
    )
    way = serializers.ChoiceField(DeliveryWay.choices(), help_text="How messages reach you.")
    target = StrictTextField(
        max_length=2000,
        allow_blank=True,
        required=False,
        help_text="The webhook's URL, or the e-mail address. Callers who may not change it see only where it leads.",
    )
    standing = serializers.ChoiceField(
        SubscriptionStanding.choices(),
        required=False,
        help_text="You can set active or off. It is paused after failing for days, gone after an answer 410, ended if"
        " its owner may not have it any more.",
    )

    field_conditions = {"properties": {"standing": {"enum": [word.value for word in subscriptions.SETTABLE_STANDINGS]}}}

    class Meta:
        model = Subscription
        fields: tuple[str, ...] = (
            "uuid",
            "url",
            "name",
            "project",
            "personal",
            "scope",
            "kinds",
            "host",
            "type",
            "label",
            "way",
            "target",
            "standing",
            "confirmed_at",
            "owner",
            "owner_confirmed_at",
            "owner_doubt",
            "last_error",
            "failing_since",
            "generation",
            "created_at",
            "updated_at",
        )

    def validate_standing(self, standing: str) -> str:
        """Return a subscription's standing unchanged. Raises ValidationError unless it is `active` or `off`, which are
        the only ones that a person may set.
        """
        if standing not in subscriptions.SETTABLE_STANDINGS:
            raise serializers.ValidationError(
                f"Set it to {' or '.join(subscriptions.SETTABLE_STANDINGS)}; the others are set by the service."
            )
        return standing

    def to_representation(self, instance: Subscription) -> dict[str, Any]:
        """Return the subscription's fields for an answer. `target` is complete only if the context has `whole`;
        otherwise it is `Subscription.destination`, because a webhook's URL may hold a token. For a personal one it is
        complete only for the person it belongs to.
        """
        shown: dict[str, Any] = super().to_representation(instance)
        is_of_other = instance.person not in ("", self.context.get("person", ""))
        if "target" in shown and (is_of_other or not self.context.get("whole")):
            shown["target"] = instance.destination if instance.target else ""
        return shown


class SubscriptionChangeSerializer(ChangeSerializer, SubscriptionSerializer):
    """A change of a subscription."""

    field_conditions = {**SubscriptionSerializer.field_conditions, **NEEDS_GENERATION}


class SecretSerializer(SubscriptionSerializer):
    """A subscription with the secret of its webhook, which is shown only this once."""

    secret = serializers.CharField(
        read_only=True, help_text="Signs your messages. Store it now; it is not shown again."
    )

    class Meta(SubscriptionSerializer.Meta):
        fields = (*SubscriptionSerializer.Meta.fields, "secret")


class EmptySerializer(ClosedSerializer):
    """An empty request body."""


class RotateSerializer(ChangeSerializer):
    """The generation on which the new secret of a webhook is based."""


class HandOverSerializer(ChangeSerializer):
    """The new owner of a subscription."""

    owner = StrictTextField(
        max_length=255, help_text="The new owner's id, or without Keystone also the user's name. May be your own."
    )
    reason = StrictTextField(max_length=1000, allow_blank=True, required=False, help_text="Why; the event has it.")
    target = StrictTextField(
        max_length=2000,
        allow_blank=True,
        required=False,
        help_text="The webhook's new URL. A personal webhook needs it; other ways take none.",
    )


class DeliveryFilter(SavedViewFilter):
    """Filter by subscription, kind and progress."""

    subscription = filters.UUIDFilter(field_name="subscription__uuid")
    kind = filters.CharFilter(help_text="For example request.bound.")
    progress = single_choice_filter(DeliveryProgress)


class DeliverySerializer(RowSerializer):
    """One message for one subscription, with the progress of its delivery."""

    uuid = serializers.UUIDField(source="message", read_only=True, help_text="The header webhook-id has it after msg_.")
    url = UrlField("deliveries", source="message")
    subscription = SubscriptionReference(read_only=True)
    data: Any = serializers.JSONField(source="named_data", read_only=True)  # Any for the same reason as `label` above.

    class Meta:
        model = Delivery
        fields = (
            "uuid",
            "url",
            "subscription",
            "event",
            "kind",
            "at",
            "data",
            "progress",
            "attempts",
            "next_at",
            "last_error",
            "delivered_at",
        )


class MessageSerializer(RowSerializer):
    """One message in the inbox."""

    uuid = serializers.UUIDField(source="message", read_only=True)
    url = UrlField("inbox", source="message")
    subscription = SubscriptionReference(read_only=True)
    text = serializers.SerializerMethodField()
    data: Any = serializers.JSONField(source="named_data", read_only=True)  # Any for the same reason as `label` above.

    class Meta:
        model = Delivery
        fields = ("uuid", "url", "subscription", "kind", "at", "text", "data", "read_at")

    def get_text(self, row: Delivery) -> str:
        """The message as one readable sentence."""
        return describe_event(row.kind, row.named_data)


class ReadSerializer(serializers.Serializer[Any]):
    """The number of messages that were marked as read."""

    read = serializers.IntegerField(read_only=True, help_text="How many messages were unread before.")


class SubscriptionView(CollectionView):
    """Subscriptions: the messages that you get, and the way in which you get them. A webhook's secret is shown only
    once, when it is created and after `rotate`.
    """

    policy = "subscription"
    serializer_class = SubscriptionSerializer
    filterset_class = SubscriptionFilter
    member_actions = {
        "test": EmptySerializer,
        "rotate": RotateSerializer,
        "resend": EmptySerializer,
        "hand_over": HandOverSerializer,
    }
    actions_to_confirm = ("rotate",)
    body_serializers = {"partial_update": SubscriptionChangeSerializer}
    delete_parameters = ("generation",)
    response_serializers = {
        "create": (201, SecretSerializer),
        "partial_update": (200, SubscriptionSerializer),
        "test": (202, DeliverySerializer),
        "rotate": (200, SecretSerializer),
        "resend": (202, SubscriptionSerializer),
        "hand_over": (200, SubscriptionSerializer),
    }
    queryset = Subscription.objects.all()

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map each HTTP method to its policy rule: handing over has a rule of its own."""
        rules = super().policy_rules
        return rules | {"POST": "cyborg:subscription:hand_over"} if self.action == "hand_over" else rules

    def get_queryset(self) -> QuerySet[Subscription]:
        """Return the subscriptions that the caller may see; see `filter_visible`."""
        return filter_visible(self, super().get_queryset())

    def get_serializer_context(self) -> dict[str, Any]:
        """Add `whole` to the context: True if the rule `cyborg:subscription:update` allows the caller, who then sees
        webhook URLs in full; and `person`, the caller's id, because those of other people's are never shown in full.
        """
        whole = bool(self.request) and self.is_rule_satisfied("cyborg:subscription:update")
        return super().get_serializer_context() | {
            "whole": whole,
            "person": self.caller.user_id if self.request else "",
        }

    def get_offered_actions(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Return the actions that are possible: of another person's subscription only `hand_over`."""
        is_of_other = data.get("personal") and data.get("owner") != self.caller.user_id
        return ("hand_over",) if is_of_other else super().get_offered_actions(data)

    def _get_changeable(self) -> Subscription:
        """Return the subscription of this URL. Raises PermissionDenied if it is another person's."""
        row: Subscription = self.get_object()
        if subscriptions.belongs_to_other_person(row, self.caller):
            raise PermissionDenied(subscriptions.OTHER_PERSONS)
        return row

    def create(self, request: Request) -> Response:
        """Create a subscription. 409: you already have the largest number allowed, fifty."""
        values = self.validate_body()
        personal = values.pop("personal", False)
        if values.get("scope") == SubscriptionScope.CLOUD:
            self.require_rule("cyborg:subscription:elevated")
        subscription, secret = subscriptions.create(values, self.caller, personal=personal)
        representation = self._serialize_with_secret(subscription, secret)
        return Response(representation, 201, headers={"Location": representation["url"]})

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Change a subscription. A paused one resumes when its standing is set to active.

        409: `way` and `personal` cannot change, or it has another generation.
        """
        subscription = self._get_changeable()
        values, generation = self.validate_change(subscription)
        if values.pop("personal", subscription.personal) != subscription.personal:
            raise RefusedError(
                RefusalReason.CONFLICT, "A subscription cannot change its owner: create another subscription."
            )
        if values.get("scope") == SubscriptionScope.CLOUD:
            self.require_rule("cyborg:subscription:elevated")
        edited = subscriptions.edit(subscription.pk, values, self.caller, generation=generation)
        return Response(self.get_serializer(edited).data)

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Delete a subscription and its deliveries."""
        subscription = self.get_object()
        generation = self.get_generation_to_delete(subscription)
        subscriptions.delete(subscription.pk, self.caller, generation=generation)
        return Response(status=204)

    def test(self, request: Request, **kwargs: str) -> Response:
        """Send a test message to the subscription's destination. The returned delivery shows the outcome.

        409: the subscription is not active, or a test of it is already waiting.
        """
        self.validate_body()
        delivery = subscriptions.queue_test_message(self._get_changeable().pk, self.caller)
        representation = DeliverySerializer(delivery, context=super().get_serializer_context() | {"fields": ()}).data
        return Response(representation, 202, headers={"Location": representation["url"]})

    def resend(self, request: Request, **kwargs: str) -> Response:
        """Send the request to confirm the mail address again.

        409: the subscription is not active, it waits for no confirmation, or too many requests were sent.
        """
        self.validate_body()
        row = subscriptions.resend_confirmation(self._get_changeable().pk, self.caller)
        return Response(self.get_serializer(row).data, 202)

    def hand_over(self, request: Request, **kwargs: str) -> Response:
        """Give the subscription another owner, who must be allowed to create it. An ended one is active again. A mail
        address that the new owner has not proven is confirmed anew.

        400: the new owner may not have it, or a personal webhook gets no new target. 409: this person owns
        it already, or has fifty in the project, or the subscription has another generation.
        """
        subscription: Subscription = self.get_object()
        values, generation = self.validate_change(subscription, is_partial=False)
        row = subscriptions.hand_over(
            subscription.pk,
            values["owner"],
            values.get("reason", ""),
            self.caller,
            target=values.get("target", ""),
            generation=generation,
        )
        return Response(self.get_serializer(row).data)

    def rotate(self, request: Request, **kwargs: str) -> Response:
        """Replace the webhook's secret. The new one is used from the next attempt on and is shown only this once. 409:
        the subscription is not a webhook, or has another generation.
        """
        subscription = self._get_changeable()
        _, generation = self.validate_change(subscription, is_partial=False)
        row, secret = subscriptions.rotate_secret(subscription.pk, self.caller, generation=generation)
        return Response(self._serialize_with_secret(row, secret))

    def _serialize_with_secret(self, row: Subscription, secret: str) -> dict[str, Any]:
        """Return the representation of the subscription with its secret in plain text; '' for ways without one."""
        return {**self.get_serializer(row).data, "secret": secret}


class DeliveryView(CollectionView):
    """Deliveries to subscriptions, newest first, kept for 30 days. `replay` sends a message again with the same id."""

    policy = "delivery"
    default_ordering = "-created"
    lookup_field = "message"
    lookup_url_kwarg = "uuid"
    serializer_class = DeliverySerializer
    filterset_class = DeliveryFilter
    member_actions = {"replay": EmptySerializer}
    response_serializers = {"replay": (202, DeliverySerializer)}
    queryset = Delivery.objects.select_related("subscription")

    def get_queryset(self) -> QuerySet[Delivery]:
        """Return all deliveries for a caller who sees all projects, otherwise those of the subscriptions that the
        caller may see (`filter_visible`), without those of other people.
        """
        rows = super().get_queryset()
        if self.can_see_all_projects():
            return rows
        visible = filter_visible(self, Subscription.objects.all())
        return rows.filter(subscriptions.filter_deliveries_for_caller(self.caller), subscription__in=visible)

    def replay(self, request: Request, **kwargs: str) -> Response:
        """Deliver the message again with the same id. A delivery that is still waiting is left as it is.

        409: its subscription is not active.
        """
        self.validate_body()
        subscriptions.replay_deliveries(Delivery.objects.filter(pk=self.get_object().pk), self.caller)
        return Response(self.get_serializer(self.get_object()).data, 202)

    def get_offered_actions(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the verbs that are possible: `replay`, except while the delivery is waiting."""
        return () if data.get("progress") == DeliveryProgress.WAITING else ("replay",)


class InboxView(CollectionView):
    """Your own inbox messages, newest first."""

    policy = "inbox"
    only_reads = True
    """Marking messages as read is allowed in read-only mode, because it changes only the reader's own notes."""
    default_ordering = "-created"
    lookup_field = "message"
    lookup_url_kwarg = "uuid"
    serializer_class = MessageSerializer
    member_actions = {"read": EmptySerializer}
    collection_actions = {"read_all": "read_all"}
    body_serializers = {"read_all": EmptySerializer}
    response_serializers = {
        "read": (200, MessageSerializer),
        "read_all": (200, ReadSerializer),
    }
    queryset = Delivery.objects.select_related("subscription")

    def get_queryset(self) -> QuerySet[Delivery]:
        """Return the caller's inbox messages in the caller's project; those of subscriptions to the whole cloud only if
        the rule `cyborg:subscription:elevated` allows the caller.
        """
        elevated = policy.is_allowed(self.caller, "cyborg:subscription:elevated")
        return subscriptions.inbox_in_project(self.caller, elevated).select_related("subscription")

    def can_see_all_projects(self) -> bool:
        """Return False: nobody sees the inboxes of others."""
        return False

    def read(self, request: Request, **kwargs: str) -> Response:
        """Mark the message as read."""
        self.validate_body()
        subscriptions.mark_as_read(self.get_queryset(), [self.get_object().message])
        return Response(self.get_serializer(self.get_object()).data)

    def read_all(self, request: Request) -> Response:
        """Mark all messages in your inbox as read, and return how many were unread."""
        self.validate_body()
        return Response({"read": subscriptions.mark_as_read(self.get_queryset())})


def filter_visible(view: CollectionView, rows: QuerySet[Subscription]) -> QuerySet[Subscription]:
    """Return those of these subscriptions that the view's caller may see: all for administrators; otherwise those that
    `subscriptions.filter_for_caller` finds, without the scope cloud unless the rule `cyborg:subscription:elevated`
    allows it.
    """
    if view.can_see_all_projects():
        return rows
    rows = rows.filter(subscriptions.filter_for_caller(view.caller))
    return (
        rows if view.is_rule_satisfied("cyborg:subscription:elevated") else rows.filter(scope=SubscriptionScope.PROJECT)
    )
