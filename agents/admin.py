"""Agents and join tokens in the console. Called by Django's admin; `cyborgweb.pages` shows them beside other rooms."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import marks
from accelerators.admin.listing import Listing, ReadOnly
from agents.models import Agent, JoinToken

TONES = {"up": "good", "late": "warn", "down": "bad"}


def limits(now: datetime | None = None) -> tuple[datetime, datetime]:
    """Heard since the first moment: up. Since the second only: late. Earlier, or never: down.

    One beat, and what a gateway waits before it writes a lease, are normal. Down is when the watcher of leases makes
    the host stale.
    """
    beat, flush = settings.KEYS.beat_s, settings.KEYS.lease_flush_s
    down = 2 * beat + 2
    at = now or datetime.now(UTC)
    return at - timedelta(seconds=min(beat + flush, down)), at - timedelta(seconds=down)


def where(word: str, lease: str = "") -> Q:
    """The condition for up, late or down; `lease` is the path to the moment a lease was last renewed."""
    path = lease or "host__lease__seen_at"
    up, down = limits()
    if word == "up":
        return Q(**{f"{path}__gte": up})
    if word == "late":
        return Q(**{f"{path}__lt": up, f"{path}__gte": down})
    return Q(**{f"{path}__lt": down}) | Q(**{f"{path}__isnull": True})


def seen_at(agent: Agent) -> datetime | None:
    """When it was last heard; None: never."""
    lease = getattr(agent.host, "lease", None)
    return lease.seen_at if lease else None


def liveness(agent: Agent) -> SafeString:
    """Up, late or down, by the age of its lease."""
    seen = seen_at(agent)
    if seen is None:
        return marks.mark("down", TONES["down"], "never heard since it enrolled")
    up, down = limits()
    word = "up" if seen >= up else "late" if seen >= down else "down"
    return marks.mark(word, TONES[word], f"last heard {seen:%Y-%m-%d %H:%M:%S} UTC")


class Liveness(admin.SimpleListFilter):
    """Up, late or down."""

    title, parameter_name = "liveness", "is"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(word, word) for word in TONES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Agent]) -> QuerySet[Agent]:
        return queryset.filter(where(str(self.value()))) if self.value() in TONES else queryset


@admin.register(Agent)
class AgentAdmin(ReadOnly):
    """Who was heard, and when."""

    list_display = ("shown_host", "shown_liveness", "heard", "version", "wire", "shown_boot", "connected")
    list_display_links = ("shown_liveness",)
    list_filter = (Liveness, "version", "wire")
    list_select_related = ("host__lease",)
    ordering = ("host__name",)
    search_fields = ("host__name__icontains", "host__uuid__startswith", "public_key__startswith", "boot_id__startswith")
    search_help_text = "host, public key, boot id"
    fields = (
        "shown_host",
        "shown_liveness",
        "heard",
        "connected",
        "enrolled_at",
        "version",
        "wire",
        "boot_id",
        "public_key",
    )
    readonly_fields = fields
    empty = (
        "No agents yet. Make a join token with “manage.py join_token HOST” and start cyborg-agent on that host with it."
    )

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Agent | None:
        found = self.get_queryset(request).select_related("host__lease")
        return found.filter(pk=int(object_id)).first() if object_id.isdigit() else None

    @display(description="Host", ordering="host__name")
    def shown_host(self, agent: Agent) -> SafeString:
        return marks.link("host", agent.host_id, agent.host.name)

    @display(description="Liveness", ordering="host__lease__seen_at")
    def shown_liveness(self, agent: Agent) -> SafeString:
        return liveness(agent)

    @display(description="Last heard", ordering="-host__lease__seen_at")
    def heard(self, agent: Agent) -> SafeString:
        return marks.ago(seen_at(agent))

    @display(description="Boot", ordering="boot_id")
    def shown_boot(self, agent: Agent) -> SafeString:
        return marks.mono(agent.boot_id)

    @display(description="Connected", ordering="-connected_at")
    def connected(self, agent: Agent) -> SafeString:
        return marks.ago(agent.connected_at)


class Use(admin.SimpleListFilter):
    """Whether a join token is still good for a new agent."""

    title, parameter_name = "use", "use"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("open", "open"), ("used", "used"), ("expired", "expired")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[JoinToken]) -> QuerySet[JoinToken]:
        now = datetime.now(UTC)
        asked = {
            "open": Q(used_at__isnull=True, expires_at__gte=now),
            "used": Q(used_at__isnull=False),
            "expired": Q(used_at__isnull=True, expires_at__lt=now),
        }
        return queryset.filter(asked[self.value()]) if self.value() in asked else queryset


@admin.register(JoinToken)
class JoinTokenAdmin(Listing):
    """Permissions to join. Made by `manage.py join_token`, which alone knows the secret; deleting one withdraws it."""

    list_display = ("host_name", "shown_use", "shown_key", "created_by", "created", "expires")
    list_filter = (Use,)
    ordering = ("-id",)
    search_fields = ("host_name__icontains", "public_key__startswith", "created_by__icontains")
    search_help_text = "host, public key, maker"
    fields = ("host_name", "shown_use", "public_key", "created_by", "created_at", "expires_at", "used_at")
    readonly_fields = fields
    empty = "No join tokens yet. “manage.py join_token HOST” makes one and prints it, once."

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    @display(description="Use")
    def shown_use(self, token: JoinToken) -> SafeString:
        if token.used_at:
            return marks.mark("used", "good", f"at {token.used_at:%Y-%m-%d %H:%M:%S} UTC")
        if token.expires_at < datetime.now(UTC):
            return marks.mark("expired", "calm")
        return marks.mark("open", "busy", "waits for its agent")

    @display(description="Bound key", ordering="public_key")
    def shown_key(self, token: JoinToken) -> SafeString:
        return marks.mono(token.public_key[:12] and f"{token.public_key[:12]}…")

    @display(description="Made", ordering="-created_at")
    def created(self, token: JoinToken) -> SafeString:
        return marks.ago(token.created_at)

    @display(description="Expires", ordering="expires_at")
    def expires(self, token: JoinToken) -> SafeString:
        return marks.ago(token.expires_at)
