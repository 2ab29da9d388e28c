"""Filters of the device list that are not plain fields of a device."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import BooleanField, CharField, F, Func, Q, QuerySet, Value
from django.http import HttpRequest

from accelerators.models import Device, Host
from accelerators.models.devices import build_driver_error_expression


class DeviceFreshnessListFilter(admin.SimpleListFilter):
    """Filter by whether a device's data is live or stale.

    It is stale if the host's agent has not been heard from, or if the device's driver or backend failed.
    """

    title, parameter_name = "freshness", "stale"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the two choices: stale and live."""
        return [("yes", "stale"), ("no", "live")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Device]) -> QuerySet[Device]:
        """Return the stale devices, the live ones or, if nothing is chosen, all."""
        if self.value() not in ("yes", "no"):
            return queryset
        stale = Q(host__stale_since__isnull=False) | (Q(_error__isnull=False) & ~Q(_error=""))
        devices_with_error = queryset.alias(_error=build_driver_error_expression())
        if self.value() == "no":
            return devices_with_error.exclude(stale)
        return devices_with_error.filter(
            stale, host__in=_select_hosts_with_stale_devices()
        )  # hosts are few; devices of other hosts are not read


def _select_hosts_with_stale_devices() -> QuerySet[Host]:
    """Query the hosts whose agent has not been heard from, or one of whose drivers or backends has an error."""
    has_error = Func(
        F("drivers"),
        Value('$.* ? (@.error <> "" || @.backends.*.error <> "")'),
        function="jsonb_path_exists",
        template="%(function)s(%(expressions)s::jsonpath)",
        output_field=BooleanField(),
    )
    return Host.objects.order_by().filter(Q(stale_since__isnull=False) | Q(has_error))


class DrainingListFilter(admin.SimpleListFilter):
    """Filter by whether a device is draining: it waits for its last request to end."""

    title, parameter_name = "drain", "draining"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the two choices: draining and not draining."""
        return [("yes", "draining"), ("no", "not draining")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Device]) -> QuerySet[Device]:
        """Return the draining devices, the others or, if nothing is chosen, all."""
        return queryset.filter(drain_to__isnull=self.value() == "no") if self.value() else queryset


class DriverListFilter(admin.SimpleListFilter):
    """Filter by driver. The choices come from the hosts, which are few, so that no query has to read every device."""

    title, parameter_name = "driver", "driver"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the names of all drivers in `Host.drivers` as choices, sorted. Costs one statement."""
        driver_names = Func(F("drivers"), function="jsonb_object_keys", output_field=CharField())
        known = Host.objects.order_by().annotate(known=driver_names).values_list("known", flat=True).distinct()
        return [(name, name) for name in sorted(known)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Device]) -> QuerySet[Device]:
        """Return the devices of the chosen driver; all if none is chosen."""
        return queryset.filter(driver=self.value()) if self.value() else queryset
