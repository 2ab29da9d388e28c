"""What the list of devices is narrowed by, beside its columns. Called by `admin.devices`."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import BooleanField, CharField, F, Func, Q, QuerySet, Value
from django.http import HttpRequest

from accelerators.models import Device, Host
from accelerators.models.devices import driver_error


class Freshness(admin.SimpleListFilter):
    """Live, or stale because of the agent or the driver."""

    title, parameter_name = "freshness", "stale"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "stale"), ("no", "live")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Device]) -> QuerySet[Device]:
        if self.value() not in ("yes", "no"):
            return queryset
        stale = Q(host__stale_since__isnull=False) | (Q(_error__isnull=False) & ~Q(_error=""))
        matching = queryset.alias(_error=driver_error())
        if self.value() == "no":
            return matching.exclude(stale)
        return matching.filter(stale, host__in=_troubled())  # hosts are few: no other device is looked at


def _troubled() -> QuerySet[Host]:
    """Hosts with stale devices: nothing is heard of them, or one of their drivers failed."""
    failing = Func(
        F("drivers"),
        Value('$.*.error ? (@ <> "")'),
        function="jsonb_path_exists",
        template="%(function)s(%(expressions)s::jsonpath)",
        output_field=BooleanField(),
    )
    return Host.objects.order_by().filter(Q(stale_since__isnull=False) | Q(failing))


class Draining(admin.SimpleListFilter):
    """Devices that wait for their last request."""

    title, parameter_name = "drain", "draining"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "draining"), ("no", "not draining")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Device]) -> QuerySet[Device]:
        return queryset.filter(drain_to__isnull=self.value() == "no") if self.value() else queryset


class Driver(admin.SimpleListFilter):
    """Whose it is: of the drivers that hosts have, which are few, instead of asking every device."""

    title, parameter_name = "driver", "driver"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        named = Func(F("drivers"), function="jsonb_object_keys", output_field=CharField())
        known = Host.objects.order_by().annotate(known=named).values_list("known", flat=True).distinct()
        return [(name, name) for name in sorted(known)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Device]) -> QuerySet[Device]:
        return queryset.filter(driver=self.value()) if self.value() else queryset
