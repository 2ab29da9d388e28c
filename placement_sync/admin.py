"""How hosts stand in Placement, in the console. Called by Django's admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import CharField, OuterRef, QuerySet, Subquery
from django.db.models.functions import Cast
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators import conductor
from accelerators.admin import marks
from accelerators.admin.listing import ReadOnly
from accelerators.models import Host, Intent
from placement_sync.models import Tree, WrittenProvider

STANDINGS = ("in step", "problems", "behind")


class Standing(admin.SimpleListFilter):
    """In step, with problems, or behind: something is still to be told."""

    title, parameter_name = "standing", "is"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(word, word) for word in STANDINGS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Tree]) -> QuerySet[Tree]:
        if self.value() == "problems":
            return queryset.exclude(problems=[])
        if self.value() == "behind":
            return queryset.filter(waiting__isnull=False)
        return queryset.filter(problems=[], waiting__isnull=True) if self.value() == "in step" else queryset


@admin.register(Tree)
class TreeAdmin(ReadOnly):
    """One row a host whose devices Placement was told of. What is asked here is done by the job, within seconds."""

    actions = ("look_now",)
    list_display = ("shown_host", "standing", "providers", "looked", "shown_root")
    list_display_links = ("standing",)
    list_filter = (Standing,)
    list_select_related = ("host",)
    ordering = ("host__name",)
    search_fields = ("host__name__icontains", "root__startswith")
    search_help_text = "host, uuid of its compute provider"
    fields = ("shown_host", "standing", "shown_root", "looked", "shown_problems", "shown_providers")
    readonly_fields = fields
    empty = "Placement has been told of no host yet. Enable a device, and configure a cloud: docs/configuration.md."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tree]:
        told = Intent.objects.filter(kind="provider", key=Cast(OuterRef("host__uuid"), CharField()))
        rows = super().get_queryset(request).prefetch_related("host__written_providers")
        return rows.annotate(waiting=Subquery(told.values("last_error")[:1]))

    @display(description="Host", ordering="host__name")
    def shown_host(self, tree: Tree) -> SafeString:
        return marks.link("host", tree.host_id, tree.host.name)

    @display(description="Standing")
    def standing(self, tree: Any) -> SafeString:
        if tree.waiting is not None:
            return marks.mark("behind", "warn", tree.waiting or "is being told")
        if tree.problems:
            return marks.mark(f"{len(tree.problems)} problems", "bad", "; ".join(tree.problems)[:500])
        return marks.mark("in step", "good")

    @display(description="Providers")
    def providers(self, tree: Tree) -> int:
        return len(tree.host.written_providers.all())

    @display(description="Looked at", ordering="-looked_at")
    def looked(self, tree: Tree) -> SafeString:
        return marks.ago(tree.looked_at)

    @display(description="Compute provider")
    def shown_root(self, tree: Tree) -> SafeString:
        return marks.mono(str(tree.root or ""))

    @display(description="Problems")
    def shown_problems(self, tree: Tree) -> SafeString | str:
        return format_html_join("", "<p>{}</p>", ((problem,) for problem in tree.problems)) or "none"

    @display(description="Providers")
    def shown_providers(self, tree: Tree) -> SafeString | str:
        rows = format_html_join("", "<tr><td>{}</td><td>{}</td><td>{}</td></tr>", map(_row, _known(tree)))
        head = "<tr><th>Provider</th><th>Inventories</th><th>Traits</th></tr>"
        return format_html("<table>{}{}</table>", SafeString(head), rows) if rows else "none"

    def has_look_permission(self, request: HttpRequest) -> bool:
        """Whoever may change hosts."""
        return request.user.has_perm("accelerators.change_host")

    @admin.action(description="Compare with Placement now", permissions=["look"])
    def look_now(self, request: HttpRequest, trees: QuerySet[Tree]) -> None:
        hosts = Host.objects.filter(placement__in=trees)
        with conductor.writing():
            conductor.providers_changed(hosts)
        self.message_user(request, f"{len(hosts)} hosts are compared now; what differs is mended.")


def _known(tree: Tree) -> list[WrittenProvider]:
    return sorted(tree.host.written_providers.all(), key=lambda one: (one.seen or {}).get("name", ""))


def _row(one: WrittenProvider) -> tuple[str, str, str]:
    seen = one.seen or {}
    numbers = (
        f"{name} {e['total']}, {e.get('reserved', 0)} reserved" for name, e in seen.get("inventories", {}).items()
    )
    return seen.get("name", str(one.uuid)), "; ".join(numbers), " ".join(seen.get("traits", ()))
