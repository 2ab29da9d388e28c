"""The console's pages for subscriptions and deliveries.

Every console user has their own subscriptions. The API's policy rules decide what each may do here.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponseNotAllowed, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import Source
from accelerators.ui import badges
from accelerators.ui.changelist import Listing, ReadOnly
from accelerators.ui.refusals import RefusalAsMessage
from cyborgweb.auth import policy
from cyborgweb.auth.roles import caller_of
from cyborgweb.models.event_types import MEANINGS, Kind, Progress, Scope, Standing, Way, sentence
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import subscriptions

STANDINGS = {"active": "good", "off": "calm", "paused": "bad", "gone": "bad"}
PROGRESS = {"waiting": "busy", "delivered": "good", "given up": "bad"}
VERBS = ("test", "rotate")
HIDDEN = ("target", "secret")
"""Fields by which no list can be filtered."""
LATELY = 10
"""Number of recent deliveries that a subscription's page shows."""


def may(request: HttpRequest, rule: str) -> bool:
    """Return whether the policy rule allows this user."""
    caller = caller_of(request)
    return caller is not None and policy.allows(caller, f"cyborg:{rule}")


def visible(request: HttpRequest, rows: QuerySet[Subscription]) -> QuerySet[Subscription]:
    """Return those of these subscriptions that this user may see; administrators see all."""
    caller = caller_of(request)
    if caller is None:
        return rows.none()
    if caller.is_admin:
        return rows
    rows = rows.filter(subscriptions.of(caller))
    return rows if may(request, "subscription:elevated") else rows.filter(scope=Scope.PROJECT)


class SubscriptionForm(forms.ModelForm):
    """Form of a subscription. Values that do not fit together give one error above the form, worded as in the API."""

    kinds = forms.MultipleChoiceField(
        choices=[(kind.value, f"{kind.value}: {MEANINGS[kind]}") for kind in Kind],
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text="The kinds of messages that you want to get.",
    )

    class Meta:
        model = Subscription
        fields = ("name", "kinds", "way", "target", "scope", "host", "type", "label", "standing")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        words = [*subscriptions.BY_HAND, *([self.instance.standing] if self.instance.pk else [])]
        if "standing" in self.fields:
            self.fields["standing"].choices = [(word, word) for word in dict.fromkeys(map(str, words))]

    def clean(self) -> dict[str, Any]:
        data: dict[str, Any] = super().clean()
        if not self.errors:
            try:
                known = {name: getattr(self.instance, name) for name in ("way", "scope")}
                subscriptions.check(Subscription(**known | data))
            except RefusedError as refused:
                raise forms.ValidationError(refused.text) from None
        return data


class SubscriptionAdmin(RefusalAsMessage, Listing):
    """List and page of subscriptions. A subscription created here belongs to its user personally."""

    form = SubscriptionForm
    list_display = ("name", "shown_standing", "shown_way", "shown_kinds", "shown_scope", "shown_owner", "since")
    list_filter = ("way", "standing", "scope")
    list_select_related = ("user",)
    ordering = ("-id",)
    search_fields = ("uuid__startswith", "name__icontains", "project_id__startswith")
    search_help_text = "name, project, uuid"
    change_form_outer_before_template = "notify/subscription_before.html"
    exports = {
        "shown_standing": ("standing", "last_error"),
        "shown_way": ("way",),
        "shown_kinds": ("kinds",),
        "shown_scope": ("scope", "host", "type", "label"),
        "shown_owner": ("user__username", "project_id"),
        "since": ("created_at",),
    }
    empty = (
        "There are no subscriptions, so nobody gets messages when accelerators are bound or devices fail. Add one for"
        " your inbox, an e-mail address or a webhook."
    )

    @display(description="Standing", ordering="standing")
    def shown_standing(self, row: Subscription) -> SafeString:
        if row.failures and row.standing == Standing.ACTIVE:
            return badges.mark("failing", "warn", row.last_error)
        return badges.mark(row.standing, STANDINGS[row.standing], row.last_error)

    @display(description="Delivered by", ordering="way")
    def shown_way(self, row: Subscription) -> SafeString | str:
        where = "" if row.way == Way.INBOX else row.destination
        return format_html('{} <span class="faint">{}</span>', row.way, where)

    @display(description="Messages")
    def shown_kinds(self, row: Subscription) -> str:
        return "everything" if len(row.kinds) == len(Kind) else ", ".join(row.kinds)

    @display(description="Covers", ordering="scope")
    def shown_scope(self, row: Subscription) -> str:
        whose = "the whole cloud" if row.scope == Scope.CLOUD else f"project {row.project_id}"
        only = {name: getattr(row, name) for name in ("host", "type", "label")}
        return ", ".join([whose, *(f"{name} {value}" for name, value in only.items() if value)])

    @display(description="Belongs to", ordering="person")
    def shown_owner(self, row: Subscription) -> str:
        if not row.person:
            return f"project {row.project_id}"
        return row.user.get_username() if row.user else row.person

    @display(description="Created", ordering="-created_at")
    def since(self, row: Subscription) -> SafeString:
        return badges.ago(row.created_at)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Subscription]:
        return visible(request, super().get_queryset(request))

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return False, to keep this model out of Django's own list of all apps, which no page shows."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return may(request, "subscription:get_all")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return may(request, "subscription:create")

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return may(request, "subscription:update")

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return may(request, "subscription:delete")

    def get_readonly_fields(self, request: HttpRequest, obj: Subscription | None = None) -> tuple[str, ...]:
        scope = () if may(request, "subscription:elevated") else ("scope", "host")
        return (*(("way", "destination") if obj else ()), *scope)

    def get_fields(self, request: HttpRequest, obj: Subscription | None = None) -> tuple[str, ...]:
        every = SubscriptionForm.Meta.fields
        if obj and not self.has_change_permission(request, obj):
            return tuple("destination" if name == "target" else name for name in every)
        return every if obj else tuple(name for name in every if name != "standing")

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Refuse filters on `HIDDEN` fields: a URL may hold a token, which a filter would let people guess letter by
        letter.
        """
        return lookup.partition("__")[0] not in HIDDEN and super().lookup_allowed(lookup, value, request)

    def save_model(self, request: HttpRequest, obj: Subscription, form: forms.ModelForm, change: bool) -> None:
        caller = caller_of(request)
        if caller is None:
            raise PermissionDenied
        values = {name: form.cleaned_data[name] for name in form.cleaned_data}
        if change:
            if values.get("standing") not in subscriptions.BY_HAND:
                values.pop("standing", None)
            subscriptions.edit(obj.pk, values, caller, Source.PERSON)
            return
        made, secret = subscriptions.create(values, caller, Source.PERSON, personal=True)
        obj.pk = made.pk
        if secret:
            messages.warning(request, f"The webhook's secret is {secret} – store it now: it is not shown again.")

    def delete_model(self, request: HttpRequest, obj: Subscription) -> None:
        caller = caller_of(request)
        if caller is None:
            raise PermissionDenied
        subscriptions.delete(obj.pk, caller, Source.PERSON)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Subscription]) -> None:
        for row in queryset:
            self.delete_model(request, row)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], **options: Any) -> Any:
        row = options.get("obj")
        if row is not None:
            lately = row.deliveries.order_by("-id")[:LATELY]
            context["row"], context["standing"] = row, self.shown_standing(row)
            context["failing"] = badges.ago(row.failing_since) if row.failing_since else ""
            context["lately"] = [(progress(one), one.kind, badges.ago(one.at), one.last_error) for one in lately]
            context["may_change"] = self.has_change_permission(request, row)
        return super().render_change_form(request, context, **options)

    def get_urls(self) -> list[Any]:
        act = self.admin_site.admin_view(self.act_view)
        return [path("<int:pk>/do/<str:verb>/", act, name="cyborgweb_subscription_do"), *super().get_urls()]

    def act_view(self, request: HttpRequest, pk: int, verb: str) -> HttpResponseBase:
        """On POST, send a test or rotate the secret; then redirect to the subscription's page with a message."""
        row, caller = self.get_queryset(request).filter(pk=pk).first(), caller_of(request)
        if row is None or verb not in VERBS:
            return self._get_obj_does_not_exist_redirect(request, self.opts, str(pk))
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if caller is None or not self.has_change_permission(request, row):
            raise PermissionDenied
        try:
            if verb == "test":
                subscriptions.test(row.pk, caller, Source.PERSON)
                messages.success(request, "A test message is being sent. Its outcome is shown below in a moment.")
            else:
                _, secret = subscriptions.rotate(row.pk, caller, Source.PERSON)
                messages.warning(
                    request, f"The webhook's new secret is {secret} – store it now: it is not shown again."
                )
        except RefusedError as refused:
            messages.error(request, refused.text)
        return HttpResponseRedirect(reverse("admin:cyborgweb_subscription_change", args=[row.pk]))


class DeliveryAdmin(ReadOnly):
    """List and page of deliveries, successful or not. They are kept for 30 days."""

    list_display = ("when", "told", "shown_subscription", "shown_progress", "attempts", "next", "last_error")
    list_display_links = ("told",)
    list_filter = ("progress", "kind")
    list_select_related = ("subscription",)
    ordering = ("-id",)
    search_fields = ("message__startswith", "subscription__name__icontains", "kind__startswith")
    search_help_text = "message id, subscription, kind"
    actions = ("replay",)
    fields = ("message", "subscription", "kind", "event", "at", "data", "progress", "attempts", "next_at")
    fields += ("last_error", "delivered_at", "read_at", "created_at")
    readonly_fields = fields
    exports = {
        "when": ("at",),
        "told": ("kind", "data"),
        "shown_subscription": ("subscription__name",),
        "shown_progress": ("progress",),
        "next": ("next_at",),
    }
    empty = "No message was delivered yet. Each event is delivered to the subscriptions that match it."

    @display(description="When", ordering="-at")
    def when(self, row: Delivery) -> SafeString:
        return badges.ago(row.at)

    @display(description="Message", ordering="kind")
    def told(self, row: Delivery) -> str:
        return sentence(row.kind, row.data)

    @display(description="Subscription", ordering="subscription__name")
    def shown_subscription(self, row: Delivery) -> SafeString:
        url = reverse("admin:cyborgweb_subscription_change", args=[row.subscription_id])
        return format_html('<a href="{}">{}</a>', url, row.subscription.name)

    @display(description="Progress", ordering="progress")
    def shown_progress(self, row: Delivery) -> SafeString:
        return progress(row)

    @display(description="Next attempt", ordering="next_at")
    def next(self, row: Delivery) -> SafeString:
        return badges.ago(row.next_at) if row.progress == Progress.WAITING else badges.NOTHING

    @admin.action(description="Deliver again", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> None:
        """Deliver the selected messages again with the same ids; inbox messages are left out."""
        caller = caller_of(request)
        if caller is None:
            raise PermissionDenied
        try:
            count = subscriptions.replay(queryset, caller, Source.PERSON)
            messages.success(request, f"{count} message{' is' if count == 1 else 's are'} delivered again.")
        except RefusedError as refused:
            messages.error(request, refused.text)

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return may(request, "delivery:update")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return False, to keep this model out of Django's own list of all apps, which no page shows."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return may(request, "delivery:get_all")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Delivery]:
        rows: QuerySet[Delivery] = super().get_queryset(request)
        return rows.filter(subscription__in=visible(request, Subscription.objects.all()))


def progress(row: Delivery) -> SafeString:
    """Return the delivery's progress as a coloured word."""
    return badges.mark(row.progress, PROGRESS[row.progress], row.last_error)
