"""Short links to devices: `/d/3f1c7e9a` leads to the page of the device whose uuid begins with these digits."""

from __future__ import annotations

from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse

from accelerators.domain.uuids import MIN_HEX_DIGITS, uuid_bounds
from accelerators.models import Device


def redirect_to_device(request: HttpRequest, prefix: str) -> HttpResponse:
    """Redirect to the page of the device whose uuid begins with `prefix`; if several do, to the list of these devices.

    Raises PermissionDenied for users who may not view devices, and Http404 if there is no such device, or if `prefix`
    is no beginning of a uuid. Costs one statement.
    """
    listing = admin.site._registry[Device]
    if not listing.has_view_permission(request):
        raise PermissionDenied
    if (bounds := uuid_bounds(prefix)) is None:
        raise Http404(f"{prefix[:64]!r} is not the beginning of a uuid, of at least {MIN_HEX_DIGITS} digits.")
    keys = list(listing.get_queryset(request).filter(uuid__range=bounds).order_by().values_list("pk", flat=True)[:2])
    if not keys:
        raise Http404(f"There is no device whose uuid begins with {prefix!r}; perhaps it was removed.")
    if len(keys) > 1:
        return HttpResponseRedirect(f"{reverse('admin:accelerators_device_changelist')}?{urlencode({'q': prefix})}")
    return HttpResponseRedirect(reverse("admin:accelerators_device_change", args=keys))
