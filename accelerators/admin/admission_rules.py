"""Console list and form of admission rules, and the button that applies them to devices found before.

All changes are written by `accelerators.devices.admission_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.devices import admission_rules
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import AdmissionRule
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ConsoleModelAdmin
from accelerators.ui.conflicts import ConflictPage, read_generation
from accelerators.ui.explained_admin import Rights
from accelerators.ui.permissions import Right
from accelerators.workflows import bulk_actions, rule_previews
from accelerators.workflows.rule_previews import MAX_PREVIEW_HOSTS, RulePreview


class RuleNotConfirmedError(RefusedError):
    """A rule was not stored, because nobody has confirmed the preview of the devices that it would move."""

    def __init__(self, preview: RulePreview) -> None:
        super().__init__(RefusalReason.NOT_CONFIRMED, "The rule was not saved: confirm its preview first.")
        self.preview = preview


def _refuse_unless_confirmed(request: HttpRequest, preview: RulePreview) -> None:
    """Raise RuleNotConfirmedError if the rule would move devices, and the form has no token of this preview."""
    caller = device_actions.get_caller(request)
    if preview.reach.needs_confirmation and not preview.is_confirmed(request.POST.get("token", ""), caller):
        raise RuleNotConfirmedError(preview)


@admin.register(AdmissionRule)
class AdmissionRuleAdmin(ConflictPage, ConsoleModelAdmin):
    """List of admission rules in the order in which they are tried, the form of one, and the button to apply them."""

    list_display = ("order", "name", "shown_enabled", "shown_action", "shown_fits", "updated")
    list_display_links = ("name",)
    list_filter = ("action", "enabled")
    ordering = ("order", "id")
    search_fields = ("name__icontains", "host__icontains", "driver__icontains", "vendor__icontains")
    search_help_text = "name, host, driver, vendor"
    list_before_template = "accelerators/admin/admission_rules_header.html"
    fields = ("name", "order", "action", "host", "driver", "vendor", "model", "type", "enabled")
    exports = {"shown_fits": ("host", "driver", "vendor", "model", "type")}
    empty = (
        "No admission rules yet: new devices are inactive until somebody enables them. A rule can make the devices that"
        " match it ready, or quarantined, as soon as they are found."
    )
    rights: ClassVar[Rights] = {
        "add": (permissions.CREATE_RULE,),
        "change": (permissions.UPDATE_RULE,),
        "delete": (permissions.DELETE_RULE,),
    }
    list_buttons: ClassVar[Mapping[str, tuple[Right, ...]]] = {"Apply the rules to devices": permissions.APPLY_RULES}

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the user may view the rules: with Django's view permission, or if they may change them."""
        return super().has_view_permission(request, obj) or self.has_change_permission(request, obj)

    @display(description="In force", ordering="enabled")
    def shown_enabled(self, rule: AdmissionRule) -> SafeString:
        """Render whether the rule is in force as a badge: on or off."""
        return badges.render_badge("on", "good") if rule.enabled else badges.render_badge("off", "calm")

    @display(description="Found devices become", ordering="action")
    def shown_action(self, rule: AdmissionRule) -> SafeString:
        """Render the state that the rule gives to the devices that it matches, as a badge."""
        return badges.render_device_state(rule.action)

    @display(description="If they match")
    def shown_fits(self, rule: AdmissionRule) -> str:
        """Return the conditions of the rule as text, such as "host cmp1, vendor 10de"; "always" if it has none."""
        conditions = {name: getattr(rule, name) for name in ("host", "driver", "vendor", "model", "type")}
        return ", ".join(f"{name} {value}" for name, value in conditions.items() if value) or "always"

    @display(description="Changed", ordering="-updated_at")
    def updated(self, rule: AdmissionRule) -> SafeString:
        """Render when the rule was last changed or, if it never was, when it was created."""
        return badges.render_relative_time(rule.updated_at or rule.created_at)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, with a link to `apply_view` for a user who may apply the rules."""
        context = {"may_apply": permissions.is_allowed(request, *permissions.APPLY_RULES)}
        return super().changelist_view(request, context | (extra_context or {}))

    def save_model(
        self, request: HttpRequest, obj: AdmissionRule, form: ModelForm[AdmissionRule], change: bool
    ) -> None:
        """Create or change the rule, with an event, by `accelerators.devices.admission_rules`.

        Raises RefusedError: CONFLICT for a name that is in use or too many rules, NOT_FOUND if the rule was deleted
        meanwhile; ChangedMeanwhileError if it was changed since the form was shown; RuleNotConfirmedError if it would
        move inactive devices, and the form has no token of the preview that shows them.
        Devices that the rule admitted before keep their state.
        """
        values, caller = {name: form.cleaned_data[name] for name in self.fields}, device_actions.get_caller(request)
        if change:
            generation = read_generation(request)
            stored = AdmissionRule.objects.filter(pk=obj.pk, generation=generation).first()
            if stored:  # otherwise the change is refused below
                _refuse_unless_confirmed(request, rule_previews.preview_rule(values, stored))
            admission_rules.edit_rule(obj.uuid, values, caller, EventSource.PERSON, generation=generation)
        else:
            _refuse_unless_confirmed(request, rule_previews.preview_rule(values))
            obj.pk = admission_rules.create_rule(values | {"uuid": obj.uuid}, caller, EventSource.PERSON).pk

    def answer_refusal(self, request: HttpRequest, object_id: str | None, refused: RefusedError) -> HttpResponse:
        """Show the preview of a rule that is not confirmed yet; answer any other refusal as the base class."""
        if not isinstance(refused, RuleNotConfirmedError):
            return super().answer_refusal(request, object_id, refused)
        reach = refused.preview.reach
        context = self.admin_site.each_context(request) | {
            "title": f"Save the rule {request.POST.get('name', '')}?",
            "preview": refused.preview,
            "action": badges.render_device_state(refused.preview.action),
            "hosts": reach.by_host.most_common(MAX_PREVIEW_HOSTS),
            "left": max(0, len(reach.by_host) - MAX_PREVIEW_HOSTS),
            "was_confirmed": "token" in request.POST,
            "token": refused.preview.issue_token(device_actions.get_caller(request)).text,
            "fields": [
                (name, value)
                for name in request.POST
                if name not in ("csrfmiddlewaretoken", "token")
                for value in request.POST.getlist(name)
            ],
        }
        return TemplateResponse(request, "accelerators/admin/rule_preview.html", context)

    def delete_model(self, request: HttpRequest, obj: AdmissionRule) -> None:
        """Delete the rule, with an event; devices that it admitted keep their state.

        Raises RefusedError NOT_FOUND; ChangedMeanwhileError if it was changed since the confirmation was shown.
        """
        caller, generation = device_actions.get_caller(request), read_generation(request)
        admission_rules.delete_rule(obj.uuid, caller, EventSource.PERSON, generation=generation)

    def get_urls(self) -> list[Any]:
        """Add the URL of `apply_view`."""
        apply_view = self.admin_site.admin_view(self.apply_view)
        return [path("apply/", apply_view, name="accelerators_admissionrule_apply"), *super().get_urls()]

    def apply_view(self, request: HttpRequest) -> HttpResponse:
        """Store the devices that the rules would move now as a draft bulk action; redirect to its page.

        That page predicts the result and asks for confirmation; until then no device is changed. Redirects to the list
        with a message if there are no such devices, or too many. Answers 405 to other methods than POST. Raises
        PermissionDenied for a user who may not view rules, or lacks one of the rights `permissions.APPLY_RULES`.
        """
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        permissions.require_permission(request, *permissions.APPLY_RULES)
        if not self.has_view_permission(request):
            raise PermissionDenied
        choice, devices = device_actions.ADMISSION_CHOICE, admission_rules.query_devices_to_move()
        target_url = reverse("admin:accelerators_admissionrule_changelist")
        try:
            caller = device_actions.get_caller(request)
            bulk = bulk_actions.create_draft(choice.action, choice.then, devices, caller, "state=inactive")
            target_url = badges.page_url("bulk", bulk.uuid)
        except RefusedError as refused:
            none_text = "The enabled rules would change no device that is inactive now."
            messages.error(request, refused.text if devices.exists() else none_text)
        return HttpResponseRedirect(target_url)
