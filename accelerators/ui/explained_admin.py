"""Base class of the console's pages that knows which rights each verb needs, and explains to a user what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from django.contrib.admin.utils import model_format_dict
from django.contrib.auth import get_permission_codename
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from unfold.admin import ModelAdmin

from accelerators.ui import permissions
from accelerators.ui.permissions import Right

Rights = Mapping[str, tuple[Right, ...] | None]


class ExplainedModelAdmin(ModelAdmin):
    """Pages of a model that tell users who may not do something which role or permission would be sufficient."""

    rights: ClassVar[Rights] = {}
    """Rights that each verb needs: `view`, `add`, `change`, `delete` and the permissions of list actions. None for a
    verb that nobody can use in the console. A verb that no class names needs Django's permission. `get_rights` reads
    them."""
    list_buttons: ClassVar[Mapping[str, tuple[Right, ...]]] = {}
    """Labels of further buttons and links of the list, each with the rights that it needs."""

    def get_rights(self, verb: str) -> tuple[Right, ...] | None:
        """Return the rights that a verb needs, as the first class names it in `rights`, else Django's permission.

        Returns None if nobody can use the verb in the console.
        """
        named = next((vars(one)["rights"] for one in type(self).__mro__ if verb in vars(one).get("rights", {})), None)
        if named is not None:
            return cast("tuple[Right, ...] | None", named[verb])
        return (Right("", f"{self.opts.app_label}.{get_permission_codename(verb, self.opts)}"),)

    def explain_refusal(self, request: HttpRequest, verb: str) -> str:
        """Return why the user may not view, add, change or delete rows of this list; '' if the user may."""
        if getattr(self, f"has_{verb}_permission")(request):
            return ""
        rights = self.get_rights(verb)
        if rights is None or not (denial := permissions.explain_denial(request, *rights)):
            return f"Nobody can {verb} {self.opts.verbose_name_plural} in the console."
        return denial

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may add rows, as `rights` says."""
        return self._has_named_rights(request, "add", super().has_add_permission(request))

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the user may change rows, as `rights` says."""
        return self._has_named_rights(request, "change", super().has_change_permission(request, obj))

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the user may delete rows, as `rights` says."""
        return self._has_named_rights(request, "delete", super().has_delete_permission(request, obj))

    def _has_named_rights(self, request: HttpRequest, verb: str, has_django_permission: bool) -> bool:
        """Return whether the user has the rights that a class names for the verb, else `has_django_permission`."""
        rights = self.get_rights(verb)
        if rights is None:
            return False
        return permissions.is_allowed(request, *rights) if any(one.rule for one in rights) else has_django_permission

    def list_refused_actions(self, request: HttpRequest) -> list[tuple[str, str]]:
        """Return what this user may not do in the list, each with the reason: adding rows, `list_buttons`, and the
        list's actions.

        Actions with the same reason are one entry. What nobody can do in the console is left out.
        """
        labels_by_reason: dict[str, list[str]] = {}
        if self.get_rights("add") and (reason := self.explain_refusal(request, "add")):
            labels_by_reason[reason] = [f"Add {self.opts.verbose_name_plural}"]
        for label, needed in self.list_buttons.items():
            if reason := permissions.explain_denial(request, *needed):
                labels_by_reason.setdefault(reason, []).append(label)
        offered = self.get_actions(request)
        for function, name, description in self._get_base_actions() if self.actions is not None else ():  # type: ignore[attr-defined]  # the stubs lack it
            verb = next(iter(getattr(function, "allowed_permissions", ())), "")
            if name in offered or not verb or not self.get_rights(verb):
                continue
            label = str(description) % model_format_dict(self.opts)
            labels_by_reason.setdefault(self.explain_refusal(request, verb), []).append(label)
        return [(", ".join(labels), reason) for reason, labels in labels_by_reason.items()]

    def list_refused_verbs(self, request: HttpRequest, obj: Any) -> dict[str, str]:
        """Return those of the verbs change, delete and add that others may use on the page of a row and this user may
        not, each with the reason."""
        verbs = [verb for verb in ("change", "delete", "add") if self.get_rights(verb)]
        return {verb: reason for verb in verbs if (reason := self.explain_refusal(request, verb))}

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        """Add to the page of a row why the user may not change it, delete it or add another one, if others may."""
        if change:
            refused = self.list_refused_verbs(request, obj)
            context["read_only_reason"] = refused.pop("change", "")
            context["refused_actions"] = [
                (f"{verb.capitalize()} {self.opts.verbose_name_plural}", reason)
                for verb, reason in refused.items()
                if reason != context["read_only_reason"]
            ]
        return super().render_change_form(request, context, add, change, form_url, obj)
