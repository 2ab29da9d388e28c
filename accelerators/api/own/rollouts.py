"""Rollouts: install, change or uninstall a driver on one or many hosts, a limited number of hosts at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import django_filters as filters
from django.db.models import Count, Q
from rest_framework import serializers
from rest_framework.exceptions import ParseError
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.drivers import POLICY_RULE_BY_METHOD, DriverSerializer, DriverView
from accelerators.api.own.fields import (
    ClosedSerializer,
    GenerationField,
    ReasonField,
    RowSerializer,
    StrictBooleanField,
    StrictIntegerField,
    StrictTextField,
    UrlField,
)
from accelerators.api.own.filters import ListFilter, choice_filter
from accelerators.api.own.previews import (
    DraftConfirmationSerializer,
    DraftStorage,
    PreviewSerializer,
    respond_with_preview,
    storing_draft,
)
from accelerators.api.own.views import CollectionView
from accelerators.domain import setting_edits
from accelerators.domain.generations import GenerationError
from accelerators.domain.setting_edits import SettingEdits
from accelerators.domain.states import DeviceOutcome, RolloutOp, RolloutState, RolloutStepState
from accelerators.models import Rollout, RolloutStep
from accelerators.workflows import confirmations, driver_config, driver_rollouts
from accelerators.workflows.driver_config import DriverChange
from accelerators.workflows.driver_rollouts import StoredDraft
from drivers.inventory import WORD

MAX_PREVIEW_HOSTS = 20
"""Number of hosts that a preview lists; its counts include all."""


class RolloutFilter(ListFilter):
    """Filter by driver, operation or state."""

    driver = filters.CharFilter(help_text="Exactly this driver.")
    op = choice_filter(RolloutOp)
    state = choice_filter(RolloutState)


class SelectorSerializer(ClosedSerializer):
    """Selects hosts: `all`, hosts where a driver runs or is wanted, or hosts whose name matches a pattern. `driver` and
    `name` can be combined."""

    all = StrictBooleanField(required=False, help_text="Every host.")
    driver = StrictTextField(max_length=64, required=False, help_text="Hosts where this driver runs or is wanted.")
    name = StrictTextField(
        max_length=255,
        required=False,
        help_text="Hosts whose name matches; * stands for any text, ? for one character.",
    )

    field_conditions = {"properties": {"all": {"enum": [True]}}}


class SettingsField(serializers.JSONField):
    """The settings of a driver, as an object."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the settings unchanged; raise ValidationError if they are not an object."""
        if not isinstance(data, dict):
            raise serializers.ValidationError("Settings must be an object, like the driver's table in a TOML file.")
        return data


class SettingEditsSerializer(ClosedSerializer):
    """Changes of single settings; all others stay. A path joins the names of tables and of the setting by `/`."""

    set = SettingsField(required=False, help_text="Maps paths to values. Tables of a path are created if necessary.")
    unset = serializers.ListField(
        child=StrictTextField(max_length=1000),
        required=False,
        max_length=setting_edits.MAX_EDITS,
        help_text="Paths of settings that are deleted; those that do not exist are ignored.",
    )


class RolloutSerializer(DraftConfirmationSerializer, RowSerializer):
    """A change of a driver on a fixed list of hosts. Send `hosts` or `selector`; to change a single host, send a list
    of one. A rollout in the state `draft` is a preview that nobody has confirmed."""

    url = UrlField("rollouts", source="uuid")
    op = serializers.ChoiceField(RolloutOp.choices())
    driver = StrictTextField(max_length=64)
    hosts = serializers.ListField(
        child=StrictTextField(max_length=255),
        write_only=True,
        required=False,
        max_length=driver_rollouts.MAX_ROLLOUT_HOSTS,
        help_text="The names of the hosts.",
    )
    selector = SelectorSerializer(write_only=True, required=False)
    enabled = StrictBooleanField(
        required=False,
        allow_null=True,
        help_text="If left out, it stays as it is; a driver that is installed is enabled.",
    )
    settings = SettingsField(
        required=False,
        allow_null=True,
        help_text="They replace all settings; without them, all stay as they are. They must not contain secrets: they"
        " are shown.",
    )
    edits = SettingEditsSerializer(
        required=False, allow_null=True, help_text="Changes of single settings, in place of `settings`."
    )
    generation = GenerationField(
        write_only=True,
        help_text="Needed for a single host, unless a preview is asked for or confirmed: the generation that `drivers`"
        " shows there, 0 if it does not list the driver. If it has changed since, the answer is 409; without it, 428.",
    )
    max_parallel = StrictIntegerField(
        min_value=1,
        max_value=driver_rollouts.MAX_PARALLEL,
        required=False,
        help_text="How many hosts are changed at the same time; 5 if left out.",
    )
    stop_on_failure = StrictBooleanField(
        required=False, help_text="Whether to start no further host after one has failed; true if left out."
    )
    reason = ReasonField("Shown with it and in its events.")
    by = serializers.CharField(source="actor", read_only=True)
    counts = serializers.SerializerMethodField()

    field_conditions = {
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
                    {"required": ["edits"], "properties": {"edits": {"type": "object", "minProperties": 1}}},
                ],
            },
            {
                "properties": {
                    "op": {"enum": ["uninstall"]},
                    "enabled": {"type": "null"},
                    "settings": {"type": "null"},
                    "edits": {"type": "null"},
                }
            },
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
            "edits",
            "generation",
            "max_parallel",
            "stop_on_failure",
            "dry_run",
            "store_draft",
            "token",
            "by",
            "reason",
            "created_at",
            "ended_at",
        )

    def get_counts(self, rollout: Rollout) -> dict[str, int]:
        """The number of hosts in each state."""
        return {word.value: getattr(rollout, f"{word}_steps") for word in RolloutStepState}


class RolloutStepSerializer(serializers.Serializer[Any]):
    """One host of the rollout. `text` says how the step ended, or why it was not started."""

    host = serializers.CharField(source="host_name", read_only=True)
    state = serializers.ChoiceField(RolloutStepState.choices(), read_only=True)
    text = serializers.CharField(read_only=True)
    command = UrlField("commands", source="command.uuid", default=None)
    ended_at = serializers.DateTimeField(read_only=True, allow_null=True)


class RolloutWithStepsSerializer(RolloutSerializer):
    """A rollout with its hosts."""

    steps = serializers.SerializerMethodField()

    class Meta(RolloutSerializer.Meta):
        fields = (*RolloutSerializer.Meta.fields, "steps")

    def get_steps(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The hosts of the rollout, by name; with `step_state`, those in this state."""
        steps = RolloutStep.objects.filter(rollout=rollout).select_related("command").order_by("id")
        if step_state := self.context.get("step_state"):
            steps = steps.filter(state=step_state)
        serializer = RolloutStepSerializer(steps, many=True, context=self.context)
        return cast("list[dict[str, Any]]", serializer.data)  # The stub does not know what `many` changes.


class HostForecastSerializer(serializers.Serializer[Any]):
    """A host of a preview, with the predicted outcome. `moved` means that the driver is changed there."""

    host = serializers.CharField(read_only=True)
    outcome = serializers.ChoiceField(DeviceOutcome.choices(), read_only=True)
    text = serializers.CharField(read_only=True)
    generation = serializers.IntegerField(
        read_only=True, help_text="The generation of the desired state; the host fails if it has another one later."
    )
    devices = serializers.IntegerField(read_only=True, help_text="How many devices the driver has there.")
    held = serializers.IntegerField(read_only=True, help_text="How many of them are held.")


class RolloutPreviewSerializer(PreviewSerializer):
    """The forecast of a rollout, and its first hosts. A running driver is not changed where a device is held."""

    held = serializers.IntegerField(read_only=True, help_text="How many devices of the driver are held on these hosts.")
    counts = serializers.DictField(child=serializers.IntegerField(), read_only=True)
    steps = HostForecastSerializer(many=True, read_only=True)


class RetryRolloutSerializer(DraftConfirmationSerializer):
    """The body of a retry: an optional reason, and the generation or the confirmation."""

    generation = GenerationField(
        help_text="Needed for a single host, as for a new rollout, unless a preview is asked for or confirmed."
    )
    reason = ReasonField("Shown with it and in its events.")


class CancelRolloutSerializer(ClosedSerializer):
    """An empty body."""


class RolloutView(CollectionView):
    """Rollouts of drivers, newest first."""

    policy = "driver"
    policy_rules = POLICY_RULE_BY_METHOD
    default_ordering = "-created"
    filterset_class = RolloutFilter
    member_actions = {"cancel": CancelRolloutSerializer, "retry": RetryRolloutSerializer}
    detail_parameters = {
        "step_state": {
            "type": {"type": "string", "enum": [word.value for word in RolloutStepState]},
            "description": "Show only the hosts in this state; `counts` counts all of them. `fields=state,counts` shows"
            " the progress without any host.",
        }
    }
    response_serializers = dict.fromkeys(("create", "cancel", "retry"), (202, RolloutWithStepsSerializer))
    preview_serializers = dict.fromkeys(("create", "retry"), RolloutPreviewSerializer)
    queryset = Rollout.objects.annotate(
        **{f"{word}_steps": Count("steps", filter=Q(steps__state=word)) for word in RolloutStepState}
    )

    def get_serializer_context(self) -> dict[str, Any]:
        """Add the state of the hosts to show (`step_state`, '' for all) to the serializer context.

        Raises ParseError (400) for an unknown state.
        """
        step_state = self.request.query_params.get("step_state", "") if self.request and self.detail else ""
        if step_state and step_state not in [word.value for word in RolloutStepState]:
            raise ParseError(f"step_state: say one of {', '.join(RolloutStepState)}.")
        return super().get_serializer_context() | {"step_state": step_state}

    def get_serializer_class(self) -> type[RolloutSerializer]:
        """Return the serializer with the hosts for a single rollout and for POST, and the one without them for
        lists."""
        return RolloutWithStepsSerializer if self.detail or self.request.method == "POST" else RolloutSerializer

    def get_offered_actions(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Offer `cancel` while the rollout runs, and `retry` when it has ended."""
        if data.get("state") == RolloutState.RUNNING:
            return ("cancel",)
        return ("retry",) if data.get("ended_at") else ()

    def create(self, request: Request) -> Response:
        """Start a rollout: 202. If it has a single host, a refusal by that host or its devices is answered here. With
        `dry_run` answer with its preview: 200. Without a token, a rollout to several hosts is answered 409, with the
        preview."""
        values = self.validate_body()
        described = {"kind": "rollout"} | {
            name: sorted(value) if name == "hosts" else value
            for name, value in values.items()
            if name not in ("dry_run", "store_draft", "token", "reason", "generation")
        }
        if values.get("token"):
            return self._confirm(values, described)
        hosts = driver_rollouts.select_hosts(values.get("hosts") or (), values.get("selector"))
        edits = SettingEdits(**(values.get("edits") or {}))
        change = DriverChange(
            RolloutOp(values["op"]), values["driver"], values.get("enabled"), values.get("settings"), edits
        )
        pace_options = {name: values[name] for name in ("max_parallel", "stop_on_failure") if name in values}
        is_draft = len(hosts) > 1 or values.get("dry_run", False)
        if not is_draft:
            driver_config.check_driver_change(change)
            driver_rollouts.refuse_without_generation(change.driver, hosts[0], values.get("generation"))
        with storing_draft(values) as storage:
            options: driver_rollouts.RolloutOptions = {
                "pace": driver_rollouts.RolloutPace(**pace_options),
                "reason": values.get("reason", ""),
                "source": self.caller.event_source,
                "generation": values.get("generation"),
            }
            if is_draft:
                draft = driver_rollouts.store_draft(change, hosts, self.caller, **options)
                return self._respond_with_preview(draft, values, described, storage)
            rollout = driver_rollouts.start_rollout(change, hosts, self.caller, **options)
        return self.respond_with_stored_row(rollout.uuid, 202)

    def retry(self, request: Request, **kwargs: str) -> Response:
        """Start the same change again on the hosts that have failed or were not begun: a new rollout, 202. `dry_run`
        and `token` are used as for the first one."""
        values = self.validate_body()
        rollout = self.get_object()
        described = {"kind": "rollout retry", "rollout": str(rollout.uuid)}
        if values.get("token"):
            return self._confirm(values, described)
        generation = values.get("generation")
        if not values.get("dry_run") and (host := driver_rollouts.find_only_host_to_retry(rollout)):
            driver_rollouts.refuse_without_generation(rollout.driver, host, generation)
        with storing_draft(values) as storage:
            draft = driver_rollouts.create_retry_draft(rollout, self.caller, self.caller.event_source, generation)
            if draft.rollout.total > 1 or values.get("dry_run"):
                return self._respond_with_preview(draft, values, described, storage)
        if not driver_rollouts.confirm_rollout(draft.rollout, values.get("reason", "")):
            raise confirmations.lost_draft_error()
        return self.respond_with_stored_row(draft.rollout.uuid, 202)

    def _confirm(self, values: Mapping[str, Any], described: Mapping[str, Any]) -> Response:
        """Start the draft that the token confirms, and answer with it. Raises RefusedError STALE_PREVIEW."""
        uuid = confirmations.read_token(values["token"], self.caller, described)
        draft = Rollout.objects.filter(uuid=uuid).first()
        if draft is None or not driver_rollouts.confirm_rollout(draft, values.get("reason", "")):
            raise confirmations.stale_preview_error()
        return self.respond_with_stored_row(uuid, 202)

    def _respond_with_preview(
        self, draft: StoredDraft, values: Mapping[str, Any], described: Mapping[str, Any], storage: DraftStorage
    ) -> Response:
        """Answer with the preview of a draft. Raises NotConfirmedError unless the request asked for it."""
        preview = draft.preview
        body = {
            "total": len(preview.hosts),
            "hosts": len(preview.hosts),
            "held": preview.held_count,
            "counts": {outcome.value: preview.count_hosts(outcome) for outcome in DeviceOutcome},
            "forecast": [
                {"outcome": outcome.value, "number": number, "held": is_held, "text": text}
                for outcome, text, is_held, number in preview.group_forecasts()
            ],
            "steps": [
                {
                    "host": one.host,
                    "outcome": one.outcome.value,
                    "text": one.text,
                    "generation": one.generation,
                    "devices": one.device_count,
                    "held": one.held_count,
                }
                for one in preview.hosts[:MAX_PREVIEW_HOSTS]
            ],
            "confirm": preview.needs_confirmation,
        }
        token = storage.issue_token(preview.needs_confirmation, draft.rollout.uuid, self.caller, described)
        return respond_with_preview(body, token, values.get("dry_run", False))

    def build_current(self, error: GenerationError) -> Any:
        """Return the driver as it is now on the host where somebody else changed it."""
        body = cast("dict[str, Any]", self.request.data)  # It was validated before.
        driver = self.get_object().driver if self.detail else body["driver"]
        return show_changed_driver(driver, error, self.get_serializer_context())

    def cancel(self, request: Request, **kwargs: str) -> Response:
        """Start no further hosts. Hosts that have been started are finished."""
        self.validate_body()
        driver_rollouts.cancel_rollout(self.get_object(), self.caller)
        return Response(self.get_serializer(self.get_object()).data, 202)


def show_changed_driver(driver: str, error: GenerationError, context: Mapping[str, Any]) -> Any:
    """Return the driver as it is now on the host where somebody else changed it; None if there is none."""
    row = DriverView.queryset.filter(host__name__in=error.hosts, driver=driver).first()
    return row and DriverSerializer(row, context=context).data
