"""Console pages about hosts in Placement: the state of each host's providers, and the discrepancies."""

from __future__ import annotations

from typing import Any, ClassVar, cast

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
from accelerators.ui.empty_lists import CLOUD_IN_MANUAL, Source
from accelerators.ui.explained_admin import Rights
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
        """Return the states of SYNC_STATES as choices."""
        return [(word, word) for word in SYNC_STATES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the hosts in the chosen state; all if none is chosen.

        A host that has problems and an open intent is found by both. `queryset` must come from
        `TreeAdmin.get_queryset`, which annotates the rows with `waiting`.
        """
        if self.value() == "problems":
            return queryset.exclude(problems=[])
        if self.value() == "behind":
            return queryset.filter(waiting__isnull=False)
        return queryset.filter(problems=[], waiting__isnull=True) if self.value() == "in step" else queryset


@admin.register(Tree)
class TreeAdmin(ReadOnlyModelAdmin):
    """The hosts whose providers were synchronized with Placement, one row each.

    The action of the list and the button `retry` raise intents, which the job `placement` processes within seconds.
    """

    actions = ("look_now",)
    list_before_template = "placement_sync/admin/hosts_not_written.html"
    list_display = ("shown_host", "standing", "providers", "looked", "shown_root")
    list_display_links = ("standing",)
    list_filter = (SyncStateFilter,)
    list_select_related = ("host",)
    ordering = ("host__name",)
    search_fields = ("host__name__icontains", "root__startswith")
    search_help_text = "host, uuid of its compute provider"
    exports = {"standing": ("waiting", "problems"), "providers": ()}
    empty = "No host was written to Placement yet. That needs a cloud and an enabled device."
    rights: ClassVar[Rights] = {"look": (permissions.RESCAN,)}
    sources = (CLOUD_IN_MANUAL, Source("Devices", "accelerators.device", rights=(permissions.UPDATE_DEVICE,)))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tree]:
        """Return the rows with their written providers loaded, each annotated with `waiting`.

        `waiting` is the last error of the host's open intent ('' if it has not failed), None if the host has no open
        intent.
        """
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
        """Show the list, and above it at most MAX_WAITING_HOSTS hosts that wait for their first synchronization."""
        synchronized = Tree.objects.filter(host__uuid=Cast(OuterRef("key"), UUIDField()))
        waiting = Intent.objects.filter(~Exists(synchronized), kind=tasks.KIND).order_by("id")[: MAX_WAITING_HOSTS + 1]
        waiting_hosts = [(_host_page_url(one.key), one.payload.get("host", one.key), one.last_error) for one in waiting]
        context = {"waiting": waiting_hosts[:MAX_WAITING_HOSTS], "more_waiting": len(waiting_hosts) > MAX_WAITING_HOSTS}
        return super().changelist_view(request, context | (extra_context or {}))

    def get_urls(self) -> list[Any]:
        """Add the URL of `handle_button`."""
        button_view = self.admin_site.admin_view(self.handle_button)
        return [path("<path:object_id>/ask/", button_view, name="placement_sync_tree_ask"), *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show one host's page: the desired providers beside those observed at the last look. Placement is not asked.

        Raises Http404 if there is no such host; PermissionDenied for a user who may not view it, and for methods other
        than GET and HEAD.
        """
        tree = self.get_object(request, object_id)
        if tree is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, tree):
            raise PermissionDenied
        return self._render_page(request, tree)

    def handle_button(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle the POST of the page's two buttons; `op` in the form names the button.

        `compare` reads from Placement now, writes nothing and shows the differences. Anything else is `retry`: it
        raises an intent, so that the job synchronizes the host within seconds, and redirects to the page. Raises
        PermissionDenied for other methods than POST and for a user who may not do this, and Http404 if there is no such
        host.
        """
        tree = self.get_object(request, object_id)
        if request.method != "POST":
            raise PermissionDenied
        permissions.require_permission(request, permissions.RESCAN)
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
        """Render the host's page from the database; `comparison_lines` describe a comparison that was just made.

        They are None if none was made.
        """
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
            "comparison_lines": comparison_lines,
        }
        context |= permissions.build_permission_context(request, permissions.RESCAN)
        return TemplateResponse(request, "placement_sync/admin/host_providers.html", context)

    @display(description="Host", ordering="host__name")
    def shown_host(self, tree: Tree) -> SafeString:
        """Render the host as a link to its page."""
        return badges.render_page_link("host", tree.host_id, tree.host.name)

    @display(description="State")
    def standing(self, tree: Any) -> SafeString:
        """Render the host's state in Placement (`_sync_state_badge`). The row must come from `get_queryset`."""
        return _sync_state_badge(tree, tree.waiting)

    @display(description="Providers")
    def providers(self, tree: Tree) -> int:
        """Return the number of the host's providers to which something was written."""
        return len(tree.host.written_providers.all())

    @display(description="Looked at", ordering="-looked_at")
    def looked(self, tree: Tree) -> SafeString:
        """Render when the host's providers were last compared with Placement."""
        return badges.render_relative_time(tree.looked_at)

    @display(description="Compute provider")
    def shown_root(self, tree: Tree) -> SafeString:
        """Render the uuid of the host's compute provider; a dash if it is not known."""
        return badges.render_identifier(str(tree.root or ""))

    def has_look_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may order that hosts are compared with Placement and corrected.

        Django calls this for admin actions with the permission `look`.
        The rule `cyborg:service:discover` or Django's permission `accelerators.change_host` allows it, but not while
        everything is read only.
        """
        return permissions.is_allowed(request, permissions.RESCAN)

    @admin.action(description="Compare with Placement now", permissions=["look"])
    def look_now(self, request: HttpRequest, trees: QuerySet[Tree]) -> None:
        """Raise an intent for each selected host, so that the job synchronizes it with Placement within seconds.

        Stored allocations of the hosts are marked as outdated, and a message says how many hosts there are.
        """
        hosts = list(Host.objects.filter(placement__in=trees))
        _request_synchronization(hosts)
        subject = "1 host is" if len(hosts) == 1 else f"{len(hosts)} hosts are"
        self.message_user(request, f"{subject} compared with Placement now, and differences are corrected.")


@admin.register(Discrepancy)
class DiscrepancyAdmin(ReadOnlyModelAdmin):
    """List and pages of the contradictions between our bound requests and Placement, Nova or the hardware.

    They are those of the last look at each host; the job `faults` stores and deletes them.
    """

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
        " instance that runs without its device, a provider of somebody else that Placement can choose for an instance."
        " A discrepancy leaves the list when it is resolved."
    )
    sources = (Source("Placement", "placement_sync.tree", rights=(permissions.RESCAN,)),)

    @display(description="What is wrong", ordering="kind")
    def shown_kind(self, row: Discrepancy) -> SafeString:
        """Render the kind of the discrepancy as a badge."""
        return badges.render_choice(DiscrepancyKind(row.kind))

    @display(description="Why, and what to do")
    def shown_said(self, row: Discrepancy) -> SafeString:
        """Render what is wrong and what to do."""
        return format_html('<span class="reason">{}</span>', row.said)

    @display(description="Where", ordering="host__name")
    def shown_where(self, row: Discrepancy) -> SafeString:
        """Render the host and the device as links."""
        return format_html('<span class="lines">{}{}</span>', self.shown_host(row), self.shown_device(row))

    @display(description="Host", ordering="host__name")
    def shown_host(self, row: Discrepancy) -> SafeString:
        """Render the host as a link."""
        return badges.render_page_link("host", row.host_id, row.host.name)

    @display(description="Device")
    def shown_device(self, row: Discrepancy) -> SafeString:
        """Render the device as a link; a dash if the discrepancy concerns no present device."""
        return badges.render_page_link("device", row.device_id, row.device) if row.device else badges.DASH

    @display(description="Provider")
    def shown_provider(self, row: Discrepancy) -> str:
        """Return the name and the uuid of the provider."""
        return f"{row.provider_name} ({row.provider})"

    @display(description="Instance")
    def shown_instance(self, row: Discrepancy) -> SafeString:
        """Render the uuid of the instance or other consumer as a link to its requests; a dash if there is none."""
        return badges.render_instance_link(row.instance, is_whole=True)

    @display(description="Since", ordering="-since")
    def shown_since(self, row: Discrepancy) -> SafeString:
        """Render when the discrepancy was first seen."""
        return badges.render_relative_time(row.since)

    @display(description="Last seen", ordering="-seen_at")
    def seen(self, row: Discrepancy) -> SafeString:
        """Render when the discrepancy was last seen."""
        return badges.render_relative_time(row.seen_at)


def _host_page_url(host: str) -> str:
    """Return the URL of a host's page about Placement; `host` is its id, uuid or name."""
    return reverse("admin:placement_sync_tree_change", args=[host])


def _request_synchronization(hosts: list[Host]) -> None:
    """Raise a `provider` intent for each of these hosts, and mark their stored allocations as outdated.

    The next comparison reads the allocations again. One transaction.
    """
    with conductor.writing():
        conductor.raise_provider_intents(hosts)
        discrepancies.invalidate_claims([host.pk for host in hosts])


def _compare_now(host: Host) -> list[str]:
    """Compare a host with Placement now and return the lines that `manage.py placement_sync --dry-run` would print.

    Writes nothing. An error of Placement, or that no cloud is configured, becomes a line that begins with `!`.
    """
    cloud = get_cloud_session(settings.KEYS.placement_endpoint)
    return (
        [f"! {PLACEMENT_OFF_TEXT}"]
        if cloud is None
        else describe.describe_result(tasks.sync_hosts(cloud, [host], dry_run=True)[0])
    )


def _sync_state_badge(tree: Tree, waiting: str | None) -> SafeString:
    """Return the badge of a host's state: behind, problems, in step, or not written yet; the first that applies.

    `waiting` is the last error of the host's open intent ('' if it has not failed). It is None if the host has no open
    intent; with an open intent the host is behind. The error or the problems are shown on hover.
    """
    if waiting is not None:
        return badges.render_badge("behind", "warn", waiting or "is being written")
    if tree.problems:
        count = len(tree.problems)
        return badges.render_badge(f"{count} problem{'' if count == 1 else 's'}", "bad", "; ".join(tree.problems)[:500])
    return badges.render_badge("in step", "good") if tree.looked_at else badges.render_badge("not written yet", "calm")


def _describe_writer(host: Host) -> str:
    """Return who writes to Placement for this host: "the conductor" or "its agent".

    If agents write but this host's agent cannot, also return why. A host without an agent counts as one whose agent
    cannot write.
    """
    if writer_election.get_writer().who == WriterChoice.CONDUCTOR:
        return "the conductor"
    unable = writer_election.list_hosts_without_writer([host])
    return f"the conductor, because its agent cannot write: {unable[0][1]}" if unable else "its agent"
