"""Rollouts: install, change or uninstall a driver on one or many hosts, a limited number of hosts at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import django_filters as filters
from django.db.models import Count, Q
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.drivers import READING
from accelerators.api.own.fields import Chosen, Closed, Flag, Number, Text, Url
from accelerators.api.own.views import Collection
from accelerators.commands.placing import MAX_REASON
from accelerators.domain.states import RolloutOp, RolloutState, Source, StepState
from accelerators.models import Rollout, RolloutStep
from accelerators.workflows import driver_rollouts
from accelerators.workflows.driver_config import WORD, Change


class RolloutFilter(filters.FilterSet):
    """Filter by driver, operation or state."""

    driver = filters.CharFilter(help_text="Exactly this driver.")
    op = filters.MultipleChoiceFilter(choices=[(word, word) for word in RolloutOp], distinct=False)
    state = filters.MultipleChoiceFilter(choices=[(word, word) for word in RolloutState], distinct=False)


class SelectorSerializer(Closed):
    """Selects hosts: `all`, hosts where a driver runs or is wanted, or hosts whose name matches a pattern. `driver` and
    `name` can be combined."""

    all = Flag(required=False, help_text="Every host.")
    driver = Text(max_length=64, required=False, help_text="Hosts where this driver runs or is wanted.")
    name = Text(
        max_length=255,
        required=False,
        help_text="Hosts whose name matches; * stands for any text, ? for one character.",
    )

    combinations: ClassVar[Mapping[str, Any]] = {"properties": {"all": {"enum": [True]}}}


class SettingsField(serializers.JSONField):
    """The settings of a driver, as an object."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the settings unchanged; raise ValidationError if they are not an object."""
        if not isinstance(data, dict):
            raise serializers.ValidationError("Settings must be an object, like the driver's table in a TOML file.")
        return data


class RolloutSerializer(Chosen):
    """A change of a driver on a fixed list of hosts. Send `hosts` or `selector`; to change a single host, send a list
    of one."""

    url = Url("rollouts", source="uuid")
    op = serializers.ChoiceField([word.value for word in RolloutOp])
    driver = Text(max_length=64)
    hosts = serializers.ListField(
        child=Text(max_length=255),
        write_only=True,
        required=False,
        max_length=driver_rollouts.MOST,
        help_text="The names of the hosts.",
    )
    selector = SelectorSerializer(write_only=True, required=False)
    enabled = Flag(
        required=False,
        allow_null=True,
        help_text="If left out, it stays as it is; a driver that is installed is enabled.",
    )
    settings = SettingsField(
        required=False,
        allow_null=True,
        help_text="If left out, they stay as they are. They must not contain secrets: they are shown.",
    )
    max_parallel = Number(
        min_value=1,
        max_value=driver_rollouts.MAX_PARALLEL,
        required=False,
        help_text="How many hosts are changed at the same time; 5 if left out.",
    )
    stop_on_failure = Flag(
        required=False, help_text="Whether to start no further host after one has failed; true if left out."
    )
    reason = Text(max_length=MAX_REASON, allow_blank=True, required=False, help_text="Shown with it and in its events.")
    by = serializers.CharField(source="actor", read_only=True)
    counts = serializers.SerializerMethodField()

    combinations: ClassVar[Mapping[str, Any]] = {
        "oneOf": [
            {"required": ["hosts"], "properties": {"hosts": {"minItems": 1}, "selector": {"maxProperties": 0}}},
            {"required": ["selector"], "properties": {"selector": {"minProperties": 1}, "hosts": {"maxItems": 0}}},
        ],
        "properties": {"driver": {"pattern": WORD}},
        "anyOf": [
            {"properties": {"op": {"enum": ["install"]}}},
            {
                "properties": {"op": {"enum": ["update"]}},
                "anyOf": [
                    {"required": ["enabled"], "properties": {"enabled": {"type": "boolean"}}},
                    {"required": ["settings"], "properties": {"settings": {"type": "object"}}},
                ],
            },
            {"properties": {"op": {"enum": ["uninstall"]}, "enabled": {"type": "null"}, "settings": {"type": "null"}}},
        ],
    }

    class Meta:
        model = Rollout
        fields: tuple[str, ...] = (
            "uuid",
            "url",
            "op",
            "driver",
            "state",
            "total",
            "counts",
            "hosts",
            "selector",
            "enabled",
            "settings",
            "max_parallel",
            "stop_on_failure",
            "by",
            "reason",
            "created_at",
            "ended_at",
        )
        read_only_fields = ("uuid", "url", "state", "total", "counts", "by", "created_at", "ended_at")

    def get_counts(self, rollout: Rollout) -> dict[str, int]:
        """The number of hosts in each state."""
        return {word.value: getattr(rollout, f"{word}_steps") for word in StepState}


class RolloutStepSerializer(serializers.Serializer):
    """One host of the rollout. `text` says how the step ended, or why it was not started."""

    host = serializers.CharField(source="host_name", read_only=True)
    state = serializers.ChoiceField([word.value for word in StepState], read_only=True)
    text = serializers.CharField(read_only=True)
    command = Url("commands", source="command.uuid", default=None)
    ended_at = serializers.DateTimeField(read_only=True, allow_null=True)


class RolloutWithStepsSerializer(RolloutSerializer):
    """A rollout with its hosts."""

    steps = serializers.SerializerMethodField()

    class Meta(RolloutSerializer.Meta):
        fields = (*RolloutSerializer.Meta.fields, "steps")
        read_only_fields = (*RolloutSerializer.Meta.read_only_fields, "steps")

    def get_steps(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The hosts of the rollout, by name."""
        steps = RolloutStep.objects.filter(rollout=rollout).select_related("command").order_by("id")
        return RolloutStepSerializer(steps, many=True, context=self.context).data


class Nothing(Closed):
    """An empty body."""


class RolloutView(Collection):
    """Rollouts of drivers, newest first."""

    policy = "driver"
    policy_rules = READING
    default_order = "-created"
    filterset_class = RolloutFilter
    verbs = {"cancel": Nothing}
    answers = dict.fromkeys(("create", "cancel"), (202, RolloutWithStepsSerializer))
    queryset = Rollout.objects.annotate(
        **{f"{word}_steps": Count("steps", filter=Q(steps__state=word)) for word in StepState}
    )

    def get_serializer_class(self) -> type[RolloutSerializer]:
        """Return the serializer with the hosts for a single rollout and for POST, and the one without them for
        lists."""
        return RolloutWithStepsSerializer if self.detail or self.request.method == "POST" else RolloutSerializer

    def offered(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Offer `cancel` while the rollout runs."""
        return ("cancel",) if data.get("state") == RolloutState.RUNNING else ()

    def create(self, request: Request) -> Response:
        """Start a rollout: 202. If it has a single host, a refusal by that host or its devices is answered here."""
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        said = dict(serializer.validated_data)
        hosts = driver_rollouts.choose(said.get("hosts") or (), said.get("selector"))
        change = Change(RolloutOp(said["op"]), said["driver"], said.get("enabled"), said.get("settings"))
        careful = {name: said[name] for name in ("max_parallel", "stop_on_failure") if name in said}
        made = driver_rollouts.start(
            change,
            hosts,
            self.caller,
            pace=driver_rollouts.Pace(**careful),
            reason=said.get("reason", ""),
            source=Source.API,
        )
        shown = self.get_serializer(self.get_queryset().get(pk=made.pk)).data
        return Response(shown, 202, headers={"Location": shown["url"]})

    def cancel(self, request: Request, **kwargs: str) -> Response:
        """Start no further hosts. Hosts that have been started are finished."""
        self.said(request)
        driver_rollouts.cancel(self.get_object(), self.caller)
        return Response(self.get_serializer(self.get_object()).data, 202)
