"""The console's pages for subscriptions and deliveries.

Every console user has their own subscriptions. The API's policy rules decide what each may do here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.ui import badges
from accelerators.ui.changelist import ConsoleModelAdmin, ReadOnlyModelAdmin
from accelerators.ui.conflicts import ConflictPage, read_generation
from accelerators.ui.empty_lists import Source
from accelerators.ui.explained_admin import Rights
from accelerators.ui.permissions import Right
from accelerators.ui.refusals import describe_refusal
from cyborgweb.auth import policy
from cyborgweb.auth.roles import get_caller
from cyborgweb.models.event_types import (
    DeliveryProgress,
    DeliveryWay,
    NotificationKind,
    SubscriptionScope,
    SubscriptionStanding,
    describe_event,
)
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import subscriptions

if TYPE_CHECKING:
    SubscriptionModelForm = forms.ModelForm[Subscription]
else:  # at run time Django's class takes no type parameter
    SubscriptionModelForm = forms.ModelForm

SUBSCRIPTION_ACTIONS = ("test", "rotate", "resend", "hand_over")
HIDDEN_FIELDS = ("target", "secret")
"""Fields by which no list can be filtered."""
MAX_RECENT_DELIVERIES = 10
"""Number of recent deliveries that a subscription's page shows."""


def is_allowed(request: HttpRequest, rule: str) -> bool:
    """Return whether the policy rule `cyborg:<rule>` allows this user; False if the session has no caller."""
    caller = get_caller(request)
    return caller is not None and policy.is_allowed(caller, f"cyborg:{rule}")


def filter_visible(request: HttpRequest, rows: QuerySet[Subscription]) -> QuerySet[Subscription]:
    """Return those of these subscriptions that this user may see: all for administrators; otherwise those of the user's
    project that belong to the project or to the user, without the scope cloud unless the rule
    `cyborg:subscription:elevated` allows it. Without a caller in the session there are none.
    """
    caller = get_caller(request)
    if caller is None:
        return rows.none()
    if caller.is_admin:
        return rows
    rows = rows.filter(subscriptions.filter_for_caller(caller))
    return rows if is_allowed(request, "subscription:elevated") else rows.filter(scope=SubscriptionScope.PROJECT)


def is_of_other_person(request: HttpRequest, row: Model | None) -> bool:
    """Return whether this is a personal subscription of somebody else than this user."""
    caller = get_caller(request)
    return isinstance(row, Subscription) and caller is not None and subscriptions.belongs_to_other_person(row, caller)


def filter_deliveries(request: HttpRequest, rows: QuerySet[Delivery]) -> QuerySet[Delivery]:
    """Return those of these deliveries that this user may see: all for administrators, otherwise those that are not of
    other people. Without a caller in the session there are none.
    """
    caller = get_caller(request)
    if caller is None:
        return rows.none()
    return rows if caller.is_admin else rows.filter(subscriptions.filter_deliveries_for_caller(caller))


class SubscriptionForm(SubscriptionModelForm):
    """Form of a subscription. Values that do not fit together give one error above the form, worded as in the API."""

    kinds = forms.MultipleChoiceField(
        choices=[(kind.value, f"{kind.value}: {kind.meaning}") for kind in NotificationKind],
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text="The kinds of messages that you want to get.",
    )

    class Meta:
        model = Subscription
        fields = ("name", "kinds", "way", "target", "scope", "host", "type", "label", "standing")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        standings = [*subscriptions.SETTABLE_STANDINGS, *([self.instance.standing] if self.instance.pk else [])]
        if "standing" in self.fields:
            standing_field = cast("forms.ChoiceField", self.fields["standing"])  # the model's field has choices
            standing_field.choices = [(word, word) for word in dict.fromkeys(map(str, standings))]

    def clean(self) -> dict[str, Any]:
        """Return the values of a subscription's form. Raises ValidationError if they do not fit together.

        Fields that the form does not have (`way`, `scope`) are checked with their stored values.
        """
        data = cast("dict[str, Any]", super().clean())  # only `clean` of a subclass may return None
        if not self.errors:
            try:
                current_values = {name: getattr(self.instance, name) for name in ("way", "scope")}
                stored_target = self.instance.target if self.instance.pk else None
                subscriptions.validate_subscription(Subscription(**current_values | data), stored_target)
            except RefusedError as refused:
                raise forms.ValidationError(refused.text) from None
        return data


class SubscriptionAdmin(ConflictPage, ConsoleModelAdmin):
    """List and page of subscriptions. A subscription created here belongs to its user personally."""

    form = SubscriptionForm
    list_display = ("name", "shown_standing", "shown_way", "shown_kinds", "shown_scope", "shown_owner", "since")
    list_filter = ("way", "standing", "scope")
    list_select_related = ("user",)
    ordering = ("-id",)
    search_fields = ("uuid__startswith", "name__icontains", "project_id__startswith")
    search_help_text = "name, project, uuid"
    change_form_outer_before_template = "cyborgweb/notify/subscription_state.html"
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
    rights: ClassVar[Rights] = {
        "view": (Right("cyborg:subscription:get_all", ""),),
        "add": (Right("cyborg:subscription:create", ""),),
        "change": (Right("cyborg:subscription:update", ""),),
        "delete": (Right("cyborg:subscription:delete", ""),),
        "hand_over": (Right("cyborg:subscription:hand_over", ""),),
    }

    @display(description="Standing", ordering="standing")
    def shown_standing(self, row: Subscription) -> SafeString:
        """Return the subscription's standing as a badge with the last error. It is `failing` for an active subscription
        whose last attempts failed, and `waiting for confirmation` until the recipient of its mails has confirmed.
        """
        if row.is_unconfirmed and row.standing == SubscriptionStanding.ACTIVE:
            return badges.render_badge("waiting for confirmation", "warn", row.last_error)
        if row.failures and row.standing == SubscriptionStanding.ACTIVE:
            return badges.render_badge("failing", "warn", row.last_error)
        return badges.render_choice(SubscriptionStanding(row.standing), row.last_error)

    @display(description="Delivered by", ordering="way")
    def shown_way(self, row: Subscription) -> SafeString | str:
        """Return how the subscription's messages are delivered, and where to: `Subscription.destination`, never the
        whole URL, which may hold a token.
        """
        destination = "" if row.way == DeliveryWay.INBOX else row.destination
        return format_html('{} <span class="faint">{}</span>', row.way, destination)

    @display(description="Messages")
    def shown_kinds(self, row: Subscription) -> str:
        """Return the subscription's kinds of messages, separated by commas; `everything` if all kinds are chosen."""
        return "everything" if len(row.kinds) == len(NotificationKind) else ", ".join(row.kinds)

    @display(description="Covers", ordering="scope")
    def shown_scope(self, row: Subscription) -> str:
        """Return what the subscription covers: its project or `the whole cloud`, then its filters on host,
        type, label.
        """
        scope_text = "the whole cloud" if row.scope == SubscriptionScope.CLOUD else f"project {row.project_id}"
        filters = {name: getattr(row, name) for name in ("host", "type", "label")}
        return ", ".join([scope_text, *(f"{name} {value}" for name, value in filters.items() if value)])

    @display(description="Belongs to", ordering="person")
    def shown_owner(self, row: Subscription) -> str:
        """Return whom the subscription belongs to: the user's name, or the project if it belongs to no person. A person
        without a Django user is shown by id.
        """
        if not row.person:
            return f"project {row.project_id}"
        return row.user.get_username() if row.user else row.person

    def describe_owner(self, row: Subscription) -> str:
        """Return the name of the owner, the id of one who has no user here, or `unknown`."""
        return row.user.get_username() if row.user else row.owner or "unknown"

    @display(description="Created", ordering="-created_at")
    def since(self, row: Subscription) -> SafeString:
        """Return when the subscription was created, relative to now."""
        return badges.render_relative_time(row.created_at)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Subscription]:
        """Return the subscriptions that this user may see; administrators see all."""
        return filter_visible(request, super().get_queryset(request))

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return False, to keep this model out of Django's own list of all apps, which no page shows."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the rule `cyborg:subscription:get_all` allows this user; `get_queryset` limits the rows."""
        return is_allowed(request, "subscription:get_all")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return whether the rule `cyborg:subscription:create` allows this user."""
        return is_allowed(request, "subscription:create")

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the rule `cyborg:subscription:update` allows this user, and the subscription is not another
        person's; `get_queryset` limits the rows.
        """
        return is_allowed(request, "subscription:update") and not is_of_other_person(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the rule `cyborg:subscription:delete` allows this user; `get_queryset` limits the rows."""
        return is_allowed(request, "subscription:delete")

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[Any, Any, set[str], Any]:
        """Return what is deleted with these subscriptions. Their deliveries need no right of their own, because nobody
        can delete a delivery in the console."""
        deleted, counts, needed, protected = super().get_deleted_objects(objs, request)
        return deleted, counts, needed - {Delivery._meta.verbose_name}, protected

    def has_hand_over_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the rule `cyborg:subscription:hand_over` allows this user; `get_queryset` limits the rows."""
        return is_allowed(request, "subscription:hand_over")

    def list_refused_verbs(self, request: HttpRequest, obj: Any) -> dict[str, str]:
        """Return what the base class returns, and `change` for a subscription of another person."""
        refused = super().list_refused_verbs(request, obj)
        return ({"change": subscriptions.OTHER_PERSONS} if is_of_other_person(request, obj) else {}) | refused

    def get_readonly_fields(self, request: HttpRequest, obj: Subscription | None = None) -> tuple[str, ...]:
        """Return `way` and `destination` for an existing subscription, and `scope` and `host` unless the rule
        `cyborg:subscription:elevated` allows this user.
        """
        scope = () if is_allowed(request, "subscription:elevated") else ("scope", "host")
        return (*(("way", "destination") if obj else ()), *scope)

    def get_fields(self, request: HttpRequest, obj: Subscription | None = None) -> tuple[str, ...]:
        """Return the form's fields: without `standing` for a new subscription, and with `destination` in place of
        `target` for users who may not change it, because a URL may hold a token.
        """
        field_names = SubscriptionForm.Meta.fields
        if obj and not self.has_change_permission(request, obj):
            return tuple("destination" if name == "target" else name for name in field_names)
        return field_names if obj else tuple(name for name in field_names if name != "standing")

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Return whether a list may be filtered by this lookup: never by a field of HIDDEN_FIELDS, because a URL may
        hold a token, which a filter would let people guess letter by letter.
        """
        return lookup.partition("__")[0] not in HIDDEN_FIELDS and super().lookup_allowed(lookup, value, request)

    def save_model(
        self, request: HttpRequest, obj: Subscription, form: forms.ModelForm[Subscription], change: bool
    ) -> None:
        """Create or change the subscription with `cyborgweb.notify.subscriptions`, which records an event.

        A new subscription belongs to its user personally; a new webhook's secret is shown once, as a message. A
        standing that no person may set is ignored. Raises PermissionDenied if the session has no caller, RefusedError
        as `create` and `edit` do.
        """
        caller = get_caller(request)
        if caller is None:
            raise PermissionDenied
        values = {name: form.cleaned_data[name] for name in form.cleaned_data}
        if change:
            if values.get("standing") not in subscriptions.SETTABLE_STANDINGS:
                values.pop("standing", None)
            generation = read_generation(request)
            subscriptions.edit(obj.pk, values, caller, EventSource.PERSON, generation=generation)
            return
        subscription, secret = subscriptions.create(values, caller, EventSource.PERSON, personal=True)
        obj.pk = subscription.pk
        if secret:
            messages.warning(request, f"The webhook's secret is {secret} – store it now: it is not shown again.")

    def delete_model(self, request: HttpRequest, obj: Subscription) -> None:
        """Delete the subscription with its deliveries and record an event. Raises PermissionDenied if the session has
        no caller, RefusedError NOT_FOUND if the subscription is gone, ChangedMeanwhileError if it was changed since
        the confirmation was shown.
        """
        caller = get_caller(request)
        if caller is None:
            raise PermissionDenied
        subscriptions.delete(obj.pk, caller, EventSource.PERSON, generation=read_generation(request))

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Subscription | None = None,
    ) -> HttpResponse:
        """Add to an existing subscription's page its standing, its newest `MAX_RECENT_DELIVERIES` deliveries, and
        whether the user may change it.
        """
        if (row := obj) is not None:
            recent_deliveries = filter_deliveries(request, row.deliveries.order_by("-id"))[:MAX_RECENT_DELIVERIES]
            context["row"], context["standing"] = row, self.shown_standing(row)
            context["failing"] = badges.render_relative_time(row.failing_since) if row.failing_since else ""
            context["recent_messages"] = [
                (render_progress(one), one.kind, badges.render_relative_time(one.at), one.last_error)
                for one in recent_deliveries
            ]
            context["may_change"] = self.has_change_permission(request, row)
            context["may_hand_over"] = self.has_hand_over_permission(request, row)
            context["needs_target"] = row.personal and row.way == DeliveryWay.WEBHOOK
            context["owner"] = self.describe_owner(row)
            context["confirmed"] = badges.render_relative_time(row.owner_confirmed_at)
        return super().render_change_form(request, context, add, change, form_url, obj)

    def get_urls(self) -> list[Any]:
        """Return the URL patterns of the subscriptions' pages, with that of `perform_action` added."""
        action_view = self.admin_site.admin_view(self.perform_action)
        return [path("<int:pk>/do/<str:verb>/", action_view, name="cyborgweb_subscription_do"), *super().get_urls()]

    def perform_action(self, request: HttpRequest, pk: int, verb: str) -> HttpResponseBase:
        """On POST, send a test message (`verb` is `test`), rotate the secret (`rotate`), send the request to confirm
        the address again (`resend`) or hand the subscription over to `owner` of the form (`hand_over`), then redirect
        to the subscription's page.

        A message there has the new secret, or the reason of a refusal. For another verb, or a subscription that the
        user may not see, redirects with a message, too. Answers 405 to other methods. Raises PermissionDenied if the
        user may not do this.
        """
        row, caller = self.get_queryset(request).filter(pk=pk).first(), get_caller(request)
        if row is None or verb not in SUBSCRIPTION_ACTIONS:
            return self._get_obj_does_not_exist_redirect(request, self.opts, str(pk))
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        needed = "hand_over" if verb == "hand_over" else "change"
        if denial := self.explain_refusal(request, needed):
            raise PermissionDenied(denial)
        if caller is None or not getattr(self, f"has_{needed}_permission")(request, row):
            raise PermissionDenied(subscriptions.OTHER_PERSONS)
        try:
            if verb == "test":
                subscriptions.queue_test_message(row.pk, caller, EventSource.PERSON)
                messages.success(request, "A test message is being sent. Its outcome is shown below in a moment.")
            elif verb == "resend":
                subscriptions.resend_confirmation(row.pk, caller, EventSource.PERSON)
                messages.success(request, "The request to confirm the address is being sent again.")
            elif verb == "hand_over":
                owner, reason, target = (request.POST.get(name, "").strip() for name in ("owner", "reason", "target"))
                subscriptions.hand_over(
                    *(row.pk, owner, reason, caller, EventSource.PERSON),
                    target=target,
                    generation=read_generation(request),
                )
                messages.success(request, f"The subscription is handed over to {owner}.")
            else:
                _, secret = subscriptions.rotate_secret(
                    row.pk, caller, EventSource.PERSON, generation=read_generation(request)
                )
                messages.warning(
                    request, f"The webhook's new secret is {secret} – store it now: it is not shown again."
                )
        except RefusedError as refused:
            messages.error(request, describe_refusal(refused))
        return HttpResponseRedirect(reverse("admin:cyborgweb_subscription_change", args=[row.pk]))


class DeliveryAdmin(ReadOnlyModelAdmin):
    """List and page of deliveries, successful or not. They are kept for 30 days."""

    list_display = ("when", "told", "shown_subscription", "shown_progress", "attempts", "next", "last_error")
    list_display_links = ("told",)
    list_filter = ("progress", "kind")
    list_select_related = ("subscription",)
    ordering = ("-id",)
    search_fields = ("message__startswith", "subscription__name__icontains", "kind__startswith")
    search_help_text = "message id, subscription, kind"
    actions = ("replay",)
    fields = (
        "message",
        "subscription",
        "kind",
        "event",
        "at",
        "data",
        "progress",
        "attempts",
        "next_at",
        "last_error",
        "delivered_at",
        "read_at",
        "created_at",
    )
    readonly_fields = fields
    exports = {
        "when": ("at",),
        "told": ("kind", "data"),
        "shown_subscription": ("subscription__name",),
        "shown_progress": ("progress",),
        "next": ("next_at",),
    }
    empty = "No message was delivered yet. Each event is delivered to the subscriptions that match it."
    sources = (Source("Subscriptions", "cyborgweb.subscription"),)
    rights: ClassVar[Rights] = {
        "view": (Right("cyborg:delivery:get_all", ""),),
        "replay": (Right("cyborg:delivery:update", ""),),
    }

    @display(description="When", ordering="-at")
    def when(self, row: Delivery) -> SafeString:
        """Return when the event of the delivery happened, relative to now."""
        return badges.render_relative_time(row.at)

    @display(description="Message", ordering="kind")
    def told(self, row: Delivery) -> str:
        """Return the delivery's message as one readable sentence."""
        return describe_event(row.kind, row.named_data)

    @display(description="Subscription", ordering="subscription__name")
    def shown_subscription(self, row: Delivery) -> SafeString:
        """Return the subscription's name as a link to its page."""
        url = reverse("admin:cyborgweb_subscription_change", args=[row.subscription_id])
        return format_html('<a href="{}">{}</a>', url, row.subscription.name)

    @display(description="Progress", ordering="progress")
    def shown_progress(self, row: Delivery) -> SafeString:
        """Return the delivery's progress as a coloured word with the last error."""
        return render_progress(row)

    @display(description="Next attempt", ordering="next_at")
    def next(self, row: Delivery) -> SafeString:
        """Return when the next attempt is due, relative to now; a dash unless the delivery is waiting."""
        return badges.render_relative_time(row.next_at) if row.progress == DeliveryProgress.WAITING else badges.DASH

    @admin.action(description="Deliver again", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> None:
        """Deliver the selected messages again with the same ids. Inbox messages and deliveries that are still waiting
        are left out. If one of the subscriptions is not active, nothing is sent and the reason is shown.

        Raises PermissionDenied if the session has no caller.
        """
        caller = get_caller(request)
        if caller is None:
            raise PermissionDenied
        try:
            count = subscriptions.replay_deliveries(queryset, caller, EventSource.PERSON)
            messages.success(request, f"{count} message{' is' if count == 1 else 's are'} delivered again.")
        except RefusedError as refused:
            messages.error(request, refused.text)

    def has_replay_permission(self, request: HttpRequest) -> bool:
        """Return whether the rule `cyborg:delivery:update` allows this user."""
        return is_allowed(request, "delivery:update")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return False, to keep this model out of Django's own list of all apps, which no page shows."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the rule `cyborg:delivery:get_all` allows this user; `get_queryset` limits the rows."""
        return is_allowed(request, "delivery:get_all")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Delivery]:
        """Return the deliveries of the subscriptions that this user may see, without those of other people; all for
        administrators.
        """
        rows: QuerySet[Delivery] = filter_deliveries(request, super().get_queryset(request))
        return rows.filter(subscription__in=filter_visible(request, Subscription.objects.all()))


def render_progress(row: Delivery) -> SafeString:
    """Return the delivery's progress as a coloured word with the last error."""
    return badges.render_choice(DeliveryProgress(row.progress), row.last_error)
