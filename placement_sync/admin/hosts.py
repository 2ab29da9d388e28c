"""Console pages about hosts in Placement: the state of each host's providers, and the discrepancies."""

from __future__ import annotations

from typing import Any, cast

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import CharField, Exists, OuterRef, Q, QuerySet, Subquery, UUIDField
from django.db.models.functions import Cast
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators import conductor
from accelerators.models import Host, Intent
from accelerators.outbox import STUCK_AFTER_FAILURES
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnlyModelAdmin, parse_uuid
from placement_sync.admin import describe, status
from placement_sync.cloud import get_cloud_session
from placement_sync.jobs import discrepancies, writer_election
from placement_sync.jobs import providers as tasks
from placement_sync.models import Discrepancy, DiscrepancyKind, Tree, WriterChoice

SYNC_STATES = ("in step", "problems", "behind")
MAX_WAITING_HOSTS = 20
"""Largest number of hosts that are named above the list because they were never written to Placement."""
PLACEMENT_OFF_TEXT = "No cloud is configured, or CYBORG_PLACEMENT_ENDPOINT is off: see docs/configuration.md."


class SyncStateFilter(admin.SimpleListFilter):
    """Filter hosts by their state: in step, with problems, or behind (an intent is waiting)."""

    title, parameter_name = "state", "is"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(word, word) for word in SYNC_STATES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Filter the rows of `TreeAdmin.get_queryset`, which annotates them with `waiting`."""
        if self.value() == "problems":
            return queryset.exclude(problems=[])
        if self.value() == "behind":
            return queryset.filter(waiting__isnull=False)
        return queryset.filter(problems=[], waiting__isnull=True) if self.value() == "in step" else queryset


@admin.register(Tree)
class TreeAdmin(ReadOnlyModelAdmin):
    """The hosts whose providers were synchronized with Placement, one row each.

    The actions of the list and the button `retry` raise intents, which the job `placement` processes within seconds.
    """

    actions = ("look_now",)
    list_before_template = "placement_sync/waiting.html"
    list_display = ("shown_host", "standing", "providers", "looked", "shown_root")
    list_display_links = ("standing",)
    list_filter = (SyncStateFilter,)
    list_select_related = ("host",)
    ordering = ("host__name",)
    search_fields = ("host__name__icontains", "root__startswith")
    search_help_text = "host, uuid of its compute provider"
    exports = {"standing": ("waiting", "problems"), "providers": ()}
    empty = "No host was written to Placement yet. Configure a cloud (docs/configuration.md) and enable a device."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tree]:
        """Annotate each row with `waiting`: the last error of the host's open intent, None if it has none."""
        open_intents = Intent.objects.filter(kind=tasks.KIND, key=Cast(OuterRef("host__uuid"), CharField()))
        rows: QuerySet[Tree] = super().get_queryset(request).prefetch_related("host__written_providers")
        return rows.annotate(waiting=Subquery(open_intents.values("last_error")[:1]))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Tree | None:
        """Return the Tree of a host by the host's id, uuid or name.

        It is an unsaved Tree if the host was never synchronized, None if there is no such host.
        """
        uuid = parse_uuid(object_id)
        condition = Q(uuid=uuid) if uuid else Q(name=object_id)
        condition |= Q(pk=int(object_id)) if object_id.isdecimal() and len(object_id) < 18 else Q()
        host = Host.objects.select_related("placement").filter(condition).first()
        if host is None:
            return None
        never = cast("Any", None)  # the column is never NULL, but this row is only shown and not saved
        return getattr(host, "placement", None) or Tree(host=host, looked_at=never)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, and above it the hosts that wait for their first synchronization."""
        synchronized = Tree.objects.filter(host__uuid=Cast(OuterRef("key"), UUIDField()))
        waiting = Intent.objects.filter(~Exists(synchronized), kind=tasks.KIND).order_by("id")[: MAX_WAITING_HOSTS + 1]
        waiting_hosts = [(_host_page_url(one.key), one.payload.get("host", one.key), one.last_error) for one in waiting]
        context = {"waiting": waiting_hosts[:MAX_WAITING_HOSTS], "more_waiting": len(waiting_hosts) > MAX_WAITING_HOSTS}
        return super().changelist_view(request, context | (extra_context or {}))

    def get_urls(self) -> list[Any]:
        button_view = self.admin_site.admin_view(self.handle_button)
        return [path("<path:object_id>/ask/", button_view, name="placement_sync_tree_ask"), *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one host's page: the desired providers beside the observed ones."""
        tree = self.get_object(request, object_id)
        if tree is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, tree):
            raise PermissionDenied
        return self._render_page(request, tree)

    def handle_button(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle the page's two buttons.

        `compare` reads from Placement now and writes nothing; `retry` has the job synchronize the host now.
        """
        tree = self.get_object(request, object_id)
        if request.method != "POST":
            raise PermissionDenied
        permissions.require_permission(request, permissions.RESCAN, "accelerators.change_host")
        if tree is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.POST.get("op") == "compare":
            return self._render_page(request, tree, comparison_lines=_compare_now(tree.host))
        _request_synchronization([tree.host])
        self.message_user(
            request, "The host is compared with Placement now, and differences are corrected. Reload in a few seconds."
        )
        return HttpResponseRedirect(_host_page_url(str(tree.host_id)))

    def _render_page(self, request: HttpRequest, tree: Tree, comparison_lines: list[str] | None = None) -> HttpResponse:
        """Render the host's page; `comparison_lines` describe a comparison that was just made."""
        host = tree.host
        providers, problems = status.load_comparisons(host)
        intent = Intent.objects.filter(kind=tasks.KIND, key=str(host.uuid)).first()
        context = self.admin_site.each_context(request) | {
            "title": f"{host.name} in Placement",
            "opts": self.opts,
            "host": host,
            "tree": tree,
            "standing": _sync_state_badge(tree, intent.last_error if intent else None),
            "looked": badges.render_relative_time(tree.looked_at),
            "providers": providers,
            "problems": tree.problems or problems,
            "intent": intent,
            "next": badges.render_relative_time(intent.next_at) if intent else "",
            "stuck": bool(intent and intent.attempts >= STUCK_AFTER_FAILURES),
            "writer": _describe_writer(host),
            "faults": [
                (badges.render_choice(one.kind), one) for one in discrepancies.list_discrepancies_of_host(host.pk)
            ],
            "asked": comparison_lines,
        }
        context |= permissions.build_permission_context(request, permissions.RESCAN, "accelerators.change_host")
        return TemplateResponse(request, "placement_sync/tree.html", context)

    @display(description="Host", ordering="host__name")
    def shown_host(self, tree: Tree) -> SafeString:
        return badges.render_page_link("host", tree.host_id, tree.host.name)

    @display(description="State")
    def standing(self, tree: Any) -> SafeString:
        return _sync_state_badge(tree, tree.waiting)

    @display(description="Providers")
    def providers(self, tree: Tree) -> int:
        return len(tree.host.written_providers.all())

    @display(description="Looked at", ordering="-looked_at")
    def looked(self, tree: Tree) -> SafeString:
        return badges.render_relative_time(tree.looked_at)

    @display(description="Compute provider")
    def shown_root(self, tree: Tree) -> SafeString:
        return badges.render_identifier(str(tree.root or ""))

    def has_look_permission(self, request: HttpRequest) -> bool:
        """Whether the user may change hosts."""
        return permissions.is_allowed(request, permissions.RESCAN, "accelerators.change_host")

    @admin.action(description="Compare with Placement now", permissions=["look"])
    def look_now(self, request: HttpRequest, trees: QuerySet[Tree]) -> None:
        """Have the job synchronize the selected hosts now."""
        hosts = list(Host.objects.filter(placement__in=trees))
        _request_synchronization(hosts)
        subject = "1 host is" if len(hosts) == 1 else f"{len(hosts)} hosts are"
        self.message_user(request, f"{subject} compared with Placement now, and differences are corrected.")


@admin.register(Discrepancy)
class DiscrepancyAdmin(ReadOnlyModelAdmin):
    """The contradictions between our bound requests and Placement, Nova or the hardware, as of the last look."""

    list_display = ("shown_kind", "shown_said", "shown_where", "shown_since")
    exports = {
        "shown_said": ("said", "instance", "provider", "provider_name"),
        "shown_where": ("host__name", "device__uuid"),
    }
    list_filter = ("kind",)
    list_select_related = ("host", "device")
    search_fields = (
        "instance__startswith",
        "provider__startswith",
        "provider_name__startswith",
        "host__name__icontains",
    )
    search_help_text = "instance, provider, host"
    fields = (
        "shown_kind",
        "shown_said",
        "shown_host",
        "shown_device",
        "shown_provider",
        "shown_instance",
        "shown_since",
        "seen",
    )
    readonly_fields = fields
    empty = (
        "Placement, Nova and the hardware agree with what is bound. Every look at a host adds discrepancies to this"
        " list: an instance whose device Placement considers free, a device that is claimed but used by nobody, an"
        " instance that runs without its device. A discrepancy leaves the list when it is resolved."
    )

    @display(description="What is wrong", ordering="kind")
    def shown_kind(self, row: Discrepancy) -> SafeString:
        return badges.render_choice(DiscrepancyKind(row.kind))

    @display(description="Why, and what to do")
    def shown_said(self, row: Discrepancy) -> SafeString:
        return format_html('<span class="reason">{}</span>', row.said)

    @display(description="Where", ordering="host__name")
    def shown_where(self, row: Discrepancy) -> SafeString:
        return format_html('<span class="lines">{}{}</span>', self.shown_host(row), self.shown_device(row))

    @display(description="Host", ordering="host__name")
    def shown_host(self, row: Discrepancy) -> SafeString:
        return badges.render_page_link("host", row.host_id, row.host.name)

    @display(description="Device")
    def shown_device(self, row: Discrepancy) -> SafeString:
        return badges.render_page_link("device", row.device_id, row.device) if row.device else badges.DASH

    @display(description="Provider")
    def shown_provider(self, row: Discrepancy) -> str:
        return f"{row.provider_name} ({row.provider})"

    @display(description="Instance")
    def shown_instance(self, row: Discrepancy) -> SafeString:
        return badges.render_identifier(row.instance)

    @display(description="Since", ordering="-since")
    def shown_since(self, row: Discrepancy) -> SafeString:
        return badges.render_relative_time(row.since)

    @display(description="Last seen", ordering="-seen_at")
    def seen(self, row: Discrepancy) -> SafeString:
        return badges.render_relative_time(row.seen_at)


def _host_page_url(host: str) -> str:
    return reverse("admin:placement_sync_tree_change", args=[host])


def _request_synchronization(hosts: list[Host]) -> None:
    """Raise an intent for these hosts, and have their allocations read again."""
    with conductor.writing():
        conductor.raise_provider_intents(hosts)
        discrepancies.invalidate_claims([host.pk for host in hosts])


def _compare_now(host: Host) -> list[str]:
    """Compare with Placement now and return the lines that `manage.py placement_sync --dry-run` would print."""
    cloud = get_cloud_session(settings.KEYS.placement_endpoint)
    return (
        [f"! {PLACEMENT_OFF_TEXT}"]
        if cloud is None
        else describe.describe_result(tasks.sync_hosts(cloud, [host], dry_run=True)[0])
    )


def _sync_state_badge(tree: Tree, waiting: str | None) -> SafeString:
    """Return the badge of a host's state. `waiting` is the last error of its open intent, None if it has none."""
    if waiting is not None:
        return badges.render_badge("behind", "warn", waiting or "is being written")
    if tree.problems:
        count = len(tree.problems)
        return badges.render_badge(f"{count} problem{'' if count == 1 else 's'}", "bad", "; ".join(tree.problems)[:500])
    return badges.render_badge("in step", "good") if tree.looked_at else badges.render_badge("not written yet", "calm")


def _describe_writer(host: Host) -> str:
    """Return who writes for this host; if agents write but its agent cannot, also return why."""
    if writer_election.get_writer().who == WriterChoice.CONDUCTOR:
        return "the conductor"
    unable = writer_election.list_hosts_without_writer([host])
    return f"the conductor, because its agent cannot write: {unable[0][1]}" if unable else "its agent"
