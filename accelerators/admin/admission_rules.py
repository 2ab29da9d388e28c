"""Console list and form of admission rules, and the page that applies them to devices found before.

All changes are written by `accelerators.devices.admission_rules`.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.devices import admission_rules
from accelerators.domain.states import Source
from accelerators.models import AdmissionRule
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import Listing
from accelerators.ui.refusals import RefusalAsMessage


@admin.register(AdmissionRule)
class AdmissionRuleAdmin(RefusalAsMessage, Listing):
    """List of admission rules in the order in which they are tried, the form of one, and the page that applies them."""

    list_display = ("order", "name", "shown_enabled", "shown_action", "shown_fits", "updated")
    list_display_links = ("name",)
    list_filter = ("action", "enabled")
    ordering = ("order", "id")
    search_fields = ("name__icontains", "host__icontains", "driver__icontains", "vendor__icontains")
    search_help_text = "name, host, driver, vendor"
    list_before_template = "accelerators/rules_before.html"
    fields = ("name", "order", "action", "host", "driver", "vendor", "model", "type", "enabled")
    exports = {"shown_fits": ("host", "driver", "vendor", "model", "type")}
    empty = (
        "No admission rules yet: new devices are inactive until somebody enables them. A rule can make the devices that"
        " match it ready, or quarantined, as soon as they are found."
    )

    @display(description="In force", ordering="enabled")
    def shown_enabled(self, rule: AdmissionRule) -> SafeString:
        return badges.mark("on", "good") if rule.enabled else badges.mark("off", "calm")

    @display(description="Found devices become", ordering="action")
    def shown_action(self, rule: AdmissionRule) -> SafeString:
        return badges.state(rule.action)

    @display(description="If they match")
    def shown_fits(self, rule: AdmissionRule) -> str:
        said = {name: getattr(rule, name) for name in ("host", "driver", "vendor", "model", "type")}
        return ", ".join(f"{name} {value}" for name, value in said.items() if value) or "always"

    @display(description="Changed", ordering="-updated_at")
    def updated(self, rule: AdmissionRule) -> SafeString:
        return badges.ago(rule.updated_at or rule.created_at)

    def save_model(self, request: HttpRequest, obj: AdmissionRule, form: ModelForm, change: bool) -> None:
        values, who = {name: form.cleaned_data[name] for name in self.fields}, device_actions.person(request)
        if change:
            admission_rules.edit(obj.uuid, values, who, Source.PERSON)
        else:
            obj.pk = admission_rules.create(values | {"uuid": obj.uuid}, who, Source.PERSON).pk

    def delete_model(self, request: HttpRequest, obj: AdmissionRule) -> None:
        admission_rules.delete(obj.uuid, device_actions.person(request), Source.PERSON)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[AdmissionRule]) -> None:
        for rule in queryset:
            self.delete_model(request, rule)

    def get_urls(self) -> list[Any]:
        apply = self.admin_site.admin_view(self.apply_view)
        return [path("apply/", apply, name="accelerators_admissionrule_apply"), *super().get_urls()]

    def apply_view(self, request: HttpRequest) -> HttpResponse:
        """GET: show how many inactive devices each rule would move. POST: move them."""
        permissions.require(request, permissions.RULES)
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            moved = sum(admission_rules.apply(device_actions.person(request)))
            messages.success(request, f"The rules moved {moved} device{'' if moved == 1 else 's'}.")
            return HttpResponseRedirect(reverse("admin:accelerators_admissionrule_changelist"))
        counts = admission_rules.preview()
        context = self.admin_site.each_context(request) | {
            "title": "Apply the rules",
            "opts": self.opts,
            "rows": [(rule, badges.state(rule.action), counts[rule.name]) for rule in self._counted(counts)],
            "total": counts.total(),
        }
        return TemplateResponse(request, "accelerators/rules_apply.html", context)

    def _counted(self, counts: dict[str, int]) -> QuerySet[AdmissionRule]:
        return AdmissionRule.objects.filter(name__in=counts)
