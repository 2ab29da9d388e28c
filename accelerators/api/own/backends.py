"""The backends of drivers on hosts, as the last reports describe them or as they are configured, and their services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import django_filters as filters
from django.db.models import QuerySet
from rest_framework import serializers
from rest_framework.generics import get_object_or_404
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own.drivers import POLICY_RULE_BY_METHOD
from accelerators.api.own.fields import (
    NEEDS_GENERATION,
    ClosedSerializer,
    GenerationField,
    ReasonField,
    RowSerializer,
    StrictBooleanField,
    StrictTextField,
    UrlField,
)
from accelerators.api.own.filters import SavedViewFilter, choice_filter, host_filter
from accelerators.api.own.rollouts import RolloutView, RolloutWithStepsSerializer, SettingsField, show_changed_driver
from accelerators.api.own.views import CollectionView
from accelerators.domain.generations import GenerationError
from accelerators.domain.setting_edits import SettingEdits
from accelerators.domain.states import BackendState
from accelerators.models import Backend, Host, Rollout, Service
from accelerators.workflows import backend_sections, driver_rollouts
from accelerators.workflows.backend_sections import BackendPlace, ChangeContext
from drivers.inventory import BackendKind, ServiceName

BACKEND_KEY_PATTERN = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}:[A-Za-z0-9_.:-]{1,64}:[A-Za-z0-9_.-]{1,64}"
"""The form of a backend's key, HOST:DRIVER:NAME, with the host's uuid."""


class BackendFilter(SavedViewFilter):
    """Filter by host, driver, name, kind, state, or whether the backend fails."""

    host = host_filter()
    driver = filters.CharFilter()
    name = filters.CharFilter()
    kind = choice_filter(get_args(BackendKind))
    state = choice_filter(BackendState)
    failing = filters.BooleanFilter(method="filter_by_error", help_text="Whether it has an error.")

    def filter_by_error(self, backends: QuerySet[Backend], name: str, wanted: bool) -> QuerySet[Backend]:
        """Keep the backends that have an error if `wanted`, else those that have none."""
        return backends.exclude(error="") if wanted else backends.filter(error="")


class BackendServiceSerializer(serializers.Serializer[Any]):
    """A service of a backend: `ready`, or unavailable with the reason."""

    name = serializers.CharField(read_only=True)
    version = serializers.CharField(read_only=True)
    state = serializers.CharField(read_only=True, help_text="ready or unavailable.")
    reason = serializers.CharField(read_only=True)
    limits = serializers.DictField(child=serializers.CharField(), read_only=True)


class BackendSerializer(RowSerializer):
    """A part of a driver that reports by itself. While it has an error, its devices are shown as they were last
    reported. Backends that are configured and not reported are `waiting` or `disabled`, with the reason."""

    id = serializers.CharField(source="key", read_only=True)
    url = UrlField("backends", source="key")
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)
    since = serializers.DateTimeField(read_only=True, help_text="Since when it answers, or since when it does not.")
    services = BackendServiceSerializer(many=True, read_only=True)
    devices = serializers.IntegerField(read_only=True, help_text="How many devices it has.")
    state = serializers.ChoiceField(BackendState.choices(), read_only=True)
    settings = SettingsField(
        read_only=True, allow_null=True, help_text="Its section of the wanted settings; null if it has none."
    )
    generation = serializers.IntegerField(
        read_only=True, help_text="The generation of the wanted configuration of its driver. Send it with a change."
    )

    class Meta:
        model = Backend
        fields = (
            "id",
            "url",
            "host",
            "driver",
            "name",
            "kind",
            "state",
            "reason",
            "labels",
            "error",
            "since",
            "services",
            "devices",
            "settings",
            "generation",
        )


class ReadOnlyCollectionView(CollectionView):
    """A collection that can only be read. Its lists and its members need the same policy rule."""

    sort_fields = {"host": "place"}
    default_ordering = "host"
    http_method_names = ["get", "head"]
    lookup_field = "key"
    lookup_url_kwarg = "id"

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map reading to the rule `cyborg:<policy>:get`."""
        return dict.fromkeys(("GET", "HEAD"), f"cyborg:{self.policy}:get")


class NewBackendSerializer(ClosedSerializer):
    """A new backend: a named section of a driver's settings on one host."""

    host = StrictTextField(max_length=255, help_text="The name of the host.")
    driver = StrictTextField(
        max_length=64, required=False, help_text=f"The driver; {backend_sections.DEFAULT_DRIVER} if left out."
    )
    name = StrictTextField(max_length=64, help_text="Letters, digits and the characters _ . -")
    settings = SettingsField(help_text="Its settings, with `kind`. They must not contain secrets: they are shown.")
    generation = GenerationField()
    reason = ReasonField("Shown with the rollout and in its events.")

    field_conditions = NEEDS_GENERATION


class BackendChangeSerializer(ClosedSerializer):
    """A change of a backend; what is left out stays as it is. Paths begin in the backend's section."""

    enabled = StrictBooleanField(required=False, help_text="Whether the driver uses it.")
    set = SettingsField(required=False, help_text="Maps paths to values.")
    unset = serializers.ListField(
        child=StrictTextField(max_length=1000), required=False, help_text="Paths of settings that are deleted."
    )
    generation = GenerationField()
    reason = ReasonField("Shown with the rollout and in its events.")

    field_conditions = NEEDS_GENERATION


class BackendView(ReadOnlyCollectionView):
    """Backends of drivers, by host. To make a host's driver look for its services again, order the command `rescan`.

    Backends can be added, changed, disabled and removed one at a time. The generation is that of the driver.
    """

    policy = "backend"
    http_method_names = ["get", "head", "post", "patch", "delete"]
    body_serializers = {"create": NewBackendSerializer, "partial_update": BackendChangeSerializer}
    response_serializers = dict.fromkeys(("create", "partial_update", "destroy"), (202, RolloutWithStepsSerializer))
    delete_parameters = ("generation", "reason")
    lookup_value_regex = BACKEND_KEY_PATTERN
    serializer_class = BackendSerializer
    filterset_class = BackendFilter
    queryset = Backend.objects.all()

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map reading to the rule `cyborg:backend:get`, and every change to that of rollouts."""
        return super().policy_rules | dict.fromkeys(("POST", "PATCH", "DELETE"), POLICY_RULE_BY_METHOD["POST"])

    def create(self, request: Request) -> Response:
        """Add a backend to a driver of one host: 202, with the rollout that does it. 409: there is one of this name,
        the driver has another generation, or one of its devices is held."""
        values = self.validate_body()
        (host,) = driver_rollouts.select_hosts([values["host"]])
        driver = values.get("driver") or backend_sections.DEFAULT_DRIVER
        place = BackendPlace(host, driver, values["name"])
        return self._respond_with_rollout(
            backend_sections.add_backend(place, values["settings"], self._build_context(values))
        )

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Change, enable or disable a backend: 202, with the rollout that does it. 409: the driver has another
        generation, or one of its devices is held."""
        values = self.validate_body()
        to_set = values.get("set", {}) | ({"enabled": values["enabled"]} if "enabled" in values else {})
        edits = SettingEdits(to_set, values.get("unset", ()))
        return self._respond_with_rollout(
            backend_sections.change_backend(self._find_place(), edits, self._build_context(values))
        )

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Remove a backend: 202, with the rollout that does it. 409: the driver has another generation, or one of its
        devices is held."""
        reason = self.request.query_params.get("reason", "")
        context = self._build_context({"generation": self.read_generation_parameter(), "reason": reason})
        return self._respond_with_rollout(backend_sections.remove_backend(self._find_place(), context))

    def build_current(self, error: GenerationError) -> Any:
        """Return the driver as it is now on the host where somebody else changed it."""
        driver = self.kwargs["id"].split(":", 1)[1].rpartition(":")[0] if self.detail else self._get_new_driver()
        return show_changed_driver(driver, error, self.get_serializer_context())

    def _get_new_driver(self) -> str:
        """Return the driver that the body of a creation names."""
        body = cast("dict[str, Any]", self.request.data)  # It was validated before.
        return str(body.get("driver") or backend_sections.DEFAULT_DRIVER)

    def _find_place(self) -> BackendPlace:
        """Return the place of the backend that the URL names; raise Http404 if the host does not exist."""
        host_uuid, _, rest = self.kwargs["id"].partition(":")
        driver, _, name = rest.rpartition(":")
        return BackendPlace(get_object_or_404(Host.objects.all(), uuid=host_uuid), driver, name)

    def _build_context(self, values: Mapping[str, Any]) -> ChangeContext:
        """Return the caller, the reason and the generation of a change."""
        reason, generation = values.get("reason", ""), values.get("generation")
        return ChangeContext(self.caller, self.caller.event_source, reason, generation)

    def _respond_with_rollout(self, rollout: Rollout) -> Response:
        """Return the answer 202 with the rollout and its address."""
        row = RolloutView.queryset.get(pk=rollout.pk)
        data = RolloutWithStepsSerializer(row, context=self.get_serializer_context()).data
        return Response(data, 202, headers={"Location": data["url"]})


class ServiceFilter(SavedViewFilter):
    """Filter by host, driver, backend, name or state."""

    host = host_filter()
    driver = filters.CharFilter()
    backend = filters.CharFilter()
    name = choice_filter(get_args(ServiceName))
    state = choice_filter(("ready", "unavailable"))


class ServiceSerializer(RowSerializer):
    """A service of a backend: ready, or unavailable with the reason."""

    id = serializers.CharField(source="key", read_only=True)
    url = UrlField("services", source="key")
    limits = serializers.DictField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = Service
        fields = ("id", "url", "host", "driver", "backend", "name", "version", "state", "reason", "limits")


class ServiceView(ReadOnlyCollectionView):
    """The services of drivers' backends, as found at run time, by host."""

    policy = "service"
    etag_collections = ("hosts", "devices")
    lookup_value_regex = f"{BACKEND_KEY_PATTERN}:[a-z]{{1,16}}"
    serializer_class = ServiceSerializer
    filterset_class = ServiceFilter
    queryset = Service.objects.all()
