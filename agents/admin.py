"""Console pages (Django admin) of agents and join tokens."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin, messages
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.domain.errors import RefusedError
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import Listing, ReadOnly
from agents import key_revocation
from agents.liveness import WORDS, lacks, seen_at, standing, where, word_of
from agents.models import Agent, JoinToken

__all__ = ["TONES", "liveness", "seen_at", "where"]

TONES = {"up": "good", "late": "warn", "down": "bad"}
BARS = {"revoked": "bad", "clone": "bad"}


def liveness(agent: Agent) -> SafeString:
    """Return the badge of an agent's state: up, late or down by the age of its lease, or revoked or clone if barred."""
    word, seen = word_of(agent), seen_at(agent)
    heard = f"last heard {seen:%Y-%m-%d %H:%M:%S} UTC" if seen else "never heard since it enrolled"
    return badges.mark(word, (TONES | BARS)[word], agent.barred_reason if agent.barred else heard)


class Liveness(admin.SimpleListFilter):
    """Filter agents by state: up, late, down, revoked or clone."""

    title, parameter_name = "liveness", "is"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(word, word) for word in WORDS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Agent]) -> QuerySet[Agent]:
        return queryset.filter(standing(str(self.value()))) if self.value() in WORDS else queryset


@admin.register(Agent)
class AgentAdmin(ReadOnly):
    """Read-only pages of agents. Actions revoke selected agents, admit them again, or ask them for new keys."""

    actions = ("revoke", "admit", "rotate")
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
        "epoch",
        "address",
        "public_key",
        "key_since",
        "rotate_asked_at",
        "shown_writes",
        "barred_reason",
    )
    readonly_fields = fields
    exports = {"shown_liveness": ("host__lease__seen_at", "barred_reason")}
    empty = (
        "No agents yet. Make a join token with “manage.py join_token HOST” and start cyborg-agent on that host with it."
    )

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Agent | None:
        found = self.get_queryset(request).select_related("host__lease")
        known = object_id.isdecimal() and len(object_id) < 19
        return found.filter(pk=int(object_id)).first() if known else None

    @display(description="Host", ordering="host__name")
    def shown_host(self, agent: Agent) -> SafeString:
        return badges.link("host", agent.host_id, agent.host.name)

    @display(description="Liveness", ordering="host__lease__seen_at")
    def shown_liveness(self, agent: Agent) -> SafeString:
        return liveness(agent)

    @display(description="Writes to Placement itself")
    def shown_writes(self, agent: Agent) -> str:
        """Whether the agent can write to Placement itself, or why it cannot."""
        return lacks(agent) or "yes"

    @display(description="Last heard", ordering="-host__lease__seen_at")
    def heard(self, agent: Agent) -> SafeString:
        return badges.ago(seen_at(agent))

    @display(description="Boot", ordering="boot_id")
    def shown_boot(self, agent: Agent) -> SafeString:
        return badges.mono(agent.boot_id)

    @display(description="Connected", ordering="-connected_at")
    def connected(self, agent: Agent) -> SafeString:
        return badges.ago(agent.connected_at)

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may run the actions: that needs the permission to change agents."""
        return permissions.may(request, permissions.AGENTS, "agents.change_agent")

    @admin.action(description="Revoke: close their connections and bar their keys", permissions=["decide"])
    def revoke(self, request: HttpRequest, agents: QuerySet[Agent]) -> None:
        """Revoke the selected agents."""
        self._decide(
            request, agents, "revoked", lambda agent, by: key_revocation.revoke(agent, by, "revoked in the console")
        )

    @admin.action(description="Admit again agents that were barred as clones", permissions=["decide"])
    def admit(self, request: HttpRequest, agents: QuerySet[Agent]) -> None:
        """Lift the bars of selected agents that were barred as clones."""
        self._decide(request, agents, "admitted", key_revocation.admit)

    @admin.action(description="Ask for new keys", permissions=["decide"])
    def rotate(self, request: HttpRequest, agents: QuerySet[Agent]) -> None:
        """Ask the selected agents for new keys."""
        self._decide(request, agents, "asked for a new key", key_revocation.ask_rotation)

    def _decide(
        self, request: HttpRequest, agents: QuerySet[Agent], done: str, decide: Callable[[Agent, str], object]
    ) -> None:
        """Apply `decide` to each selected agent, and show which were changed and why others were refused."""
        hosts = []
        for agent in agents.select_related("host"):
            try:
                if decide(agent, request.user.get_username()) is not False:
                    hosts.append(agent.host.name)
            except RefusedError as refused:
                self.message_user(request, refused.text, messages.ERROR)
        self.message_user(
            request,
            f"{len(hosts)} agent{'' if len(hosts) == 1 else 's'} {done}{': ' if hosts else ''}{', '.join(hosts)}"[:500],
        )


class Use(admin.SimpleListFilter):
    """Filter join tokens by use: open, used, or expired without having been used."""

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
    """Pages of join tokens. They are made by `manage.py join_token`, which alone shows the secret.

    They cannot be changed. Deleting a token withdraws it.
    """

    list_display = ("host_name", "shown_use", "shown_key", "created_by", "created", "expires")
    list_filter = (Use,)
    ordering = ("-id",)
    search_fields = ("host_name__icontains", "public_key__startswith", "created_by__icontains")
    search_help_text = "host, public key, creator"
    fields = ("host_name", "shown_use", "public_key", "created_by", "created_at", "expires_at", "used_at")
    readonly_fields = fields
    exports = {"shown_use": ("used_at",)}
    empty = "No join tokens yet. “manage.py join_token HOST” makes one and prints it, once."

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    @display(description="Use")
    def shown_use(self, token: JoinToken) -> SafeString:
        if token.used_at:
            return badges.mark("used", "good", f"at {token.used_at:%Y-%m-%d %H:%M:%S} UTC")
        if token.expires_at < datetime.now(UTC):
            return badges.mark("expired", "calm")
        return badges.mark("open", "busy", "no agent has used it yet")

    @display(description="Bound key", ordering="public_key")
    def shown_key(self, token: JoinToken) -> SafeString:
        return badges.mono(token.public_key[:12] and f"{token.public_key[:12]}…")

    @display(description="Made", ordering="-created_at")
    def created(self, token: JoinToken) -> SafeString:
        return badges.ago(token.created_at)

    @display(description="Expires", ordering="expires_at")
    def expires(self, token: JoinToken) -> SafeString:
        return badges.ago(token.expires_at)
