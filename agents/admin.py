"""Console pages (Django admin) of agents and join tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import AgentState, EventSource
from accelerators.models import Host
from accelerators.runtime import database_clock
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ConsoleModelAdmin, ReadOnlyModelAdmin
from accelerators.ui.empty_lists import JOIN_COMMAND, JOIN_IN_MANUAL, Source
from accelerators.ui.explained_admin import Rights
from accelerators.ui.permissions import Right
from agents import join_tokens, key_revocation
from agents.liveness import (
    build_state_condition,
    explain_cannot_write,
    get_agent_state,
    get_last_heard,
)
from agents.models import Agent, JoinToken

CREATE_JOIN_TOKEN = Right("cyborg:join_token:create", "agents.add_jointoken")
DELETE_JOIN_TOKEN = Right("cyborg:join_token:delete", "agents.delete_jointoken")
UPDATE_AGENTS = Right("cyborg:agent:update", "agents.change_agent")


def render_liveness_badge(agent: Agent) -> SafeString:
    """Return the badge of an agent's state: up, late or down by the age of its lease, or revoked or clone if barred.

    The time when it was last heard, or the reason of the bar, is shown on hover. Runs up to two queries unless
    `host__lease` was loaded with select_related.
    """
    state, last_heard = get_agent_state(agent), get_last_heard(agent)
    heard = f"last heard {last_heard:%Y-%m-%d %H:%M:%S} UTC" if last_heard else "never heard since it enrolled"
    return badges.render_choice(state, agent.barred_reason if agent.barred else heard)


def build_host_section(host: Host) -> dict[str, Any] | None:
    """Return the data of a host's agent for the host's page.

    These are its row, its state, and four times: last heard, connected, enrolled, and since when it has its key.
    Returns None if no agent has joined for the host.
    """
    agent: Agent | None = getattr(host, "agent", None)
    if agent is None:
        return None
    return {
        "row": agent,
        "liveness": render_liveness_badge(agent),
        "heard": badges.render_relative_time(get_last_heard(agent)),
        "connected": badges.render_relative_time(agent.connected_at),
        "enrolled": badges.render_relative_time(agent.enrolled_at),
        "key_since": badges.render_relative_time(agent.key_since),
    }


class LivenessFilter(admin.SimpleListFilter):
    """Filter agents by state: up, late, down, revoked or clone."""

    title, parameter_name = "liveness", "is"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the states of `AgentState` as choices."""
        return AgentState.choices()

    def queryset(self, request: HttpRequest, queryset: QuerySet[Agent]) -> QuerySet[Agent]:
        """Return the agents in the chosen state; all if none, or no existing state, is chosen."""
        return queryset.filter(build_state_condition(str(self.value()))) if self.value() in [*AgentState] else queryset


@admin.register(Agent)
class AgentAdmin(ReadOnlyModelAdmin):
    """Read-only pages of agents. Actions revoke selected agents, admit them again, or ask them for new keys."""

    actions = ("revoke", "admit", "rotate")
    list_display = ("shown_host", "shown_liveness", "heard", "version", "wire", "shown_boot", "connected")
    list_display_links = ("shown_liveness",)
    list_filter = (LivenessFilter, "version", "wire")
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
        "fingerprint",
        "newest_certificate",
        "barred_reason",
    )
    readonly_fields = fields
    exports = {"shown_liveness": ("host__lease__seen_at", "barred_reason")}
    empty = "No agents yet. An agent on a compute host joins with a join token. This command prints one:"
    empty_command = JOIN_COMMAND
    rights: ClassVar[Rights] = {"decide": (UPDATE_AGENTS,)}
    sources = (Source("Join tokens", "agents.jointoken"), JOIN_IN_MANUAL)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Agent | None:
        """Return an agent by its id, with host and lease; None if `object_id` is no number or no agent has it."""
        agents = self.get_queryset(request).select_related("host__lease")
        is_valid_id = object_id.isdecimal() and len(object_id) < 19
        return agents.filter(pk=int(object_id)).first() if is_valid_id else None

    @display(description="Host", ordering="host__name")
    def shown_host(self, agent: Agent) -> SafeString:
        """Render the agent's host as a link."""
        return badges.render_page_link("host", agent.host_id, agent.host.name)

    @display(description="Liveness", ordering="host__lease__seen_at")
    def shown_liveness(self, agent: Agent) -> SafeString:
        """Render the agent's state as a badge, with the same text on hover as `render_liveness_badge`."""
        return render_liveness_badge(agent)

    @display(description="Writes to Placement itself")
    def shown_writes(self, agent: Agent) -> str:
        """Return "yes" if the agent can write to Placement itself, otherwise why it cannot."""
        return explain_cannot_write(agent) or "yes"

    @display(description="Last heard", ordering="-host__lease__seen_at")
    def heard(self, agent: Agent) -> SafeString:
        """Render when the agent was last heard; a dash if never."""
        return badges.render_relative_time(get_last_heard(agent))

    @display(description="Boot", ordering="boot_id")
    def shown_boot(self, agent: Agent) -> SafeString:
        """Render the boot id of the agent's host; a dash if it is not known."""
        return badges.render_identifier(agent.boot_id)

    @display(description="Connected", ordering="-connected_at")
    def connected(self, agent: Agent) -> SafeString:
        """Render when the agent last connected; a dash if never."""
        return badges.render_relative_time(agent.connected_at)

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may run the actions; Django asks this for the permission `decide`.

        The rule `cyborg:agent:update` or Django's permission `agents.change_agent` allows it, but not while everything
        is read only.
        """
        return permissions.is_allowed(request, UPDATE_AGENTS)

    @admin.action(description="Revoke: close their connections and bar their keys", permissions=["decide"])
    def revoke(self, request: HttpRequest, agents: QuerySet[Agent]) -> None:
        """Revoke the selected agents: end their connections, bar their keys and expire their hosts' join tokens.

        A host comes back only with a new join token and a new key. Agents that are revoked already are left as they
        are.
        """
        self._apply_to_selected(
            request,
            agents,
            "revoked",
            lambda agent, by: key_revocation.revoke_agent(agent, by, "revoked in the console"),
        )

    @admin.action(description="Admit again agents that were barred as clones", permissions=["decide"])
    def admit(self, request: HttpRequest, agents: QuerySet[Agent]) -> None:
        """Lift the bars of those selected agents that were barred as clones; agents without a bar are left as they are.

        Revoked agents are refused, with a message for each.
        """
        self._apply_to_selected(request, agents, "admitted", key_revocation.lift_clone_bar)

    @admin.action(description="Ask for new keys", permissions=["decide"])
    def rotate(self, request: HttpRequest, agents: QuerySet[Agent]) -> None:
        """Ask the selected agents for new keys, now or when they connect next.

        Barred agents are refused, with a message for each.
        """
        self._apply_to_selected(request, agents, "asked for a new key", key_revocation.request_key_rotation)

    def _apply_to_selected(
        self, request: HttpRequest, agents: QuerySet[Agent], done_text: str, decision: Callable[[Agent, str], object]
    ) -> None:
        """Call `decision` for each selected agent with the user's name, each in a transaction of its own.

        Shows an error message for each agent that is refused (RefusedError), and a message with the hosts that were
        changed. An agent for which `decision` returns False counts as not changed.
        """
        hosts = []
        for agent in agents.select_related("host"):
            try:
                if decision(agent, request.user.get_username()) is not False:
                    hosts.append(agent.host.name)
            except RefusedError as refused:
                self.message_user(request, refused.text, messages.ERROR)
        self.message_user(
            request,
            f"{len(hosts)} agent{'' if len(hosts) == 1 else 's'} {done_text}{': ' if hosts else ''}{', '.join(hosts)}"[
                :500
            ],
        )


class TokenUseFilter(admin.SimpleListFilter):
    """Filter join tokens by use: open, used, or expired without having been used."""

    title, parameter_name = "use", "use"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the three choices: open, used and expired."""
        return [("open", "open"), ("used", "used"), ("expired", "expired")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[JoinToken]) -> QuerySet[JoinToken]:
        """Return the join tokens with the chosen use; all if none is chosen."""
        now = database_clock.now()
        conditions = {
            "open": Q(used_at__isnull=True, expires_at__gte=now),
            "used": Q(used_at__isnull=False),
            "expired": Q(used_at__isnull=True, expires_at__lt=now),
        }
        condition = conditions.get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


@admin.register(JoinToken)
class JoinTokenAdmin(ConsoleModelAdmin):
    """List of join tokens, the page of one, and the form for a new one, which alone shows the secret.

    They cannot be changed. Deleting a token withdraws it.
    """

    list_display = ("host_name", "shown_use", "shown_key", "created_by", "created", "expires")
    list_filter = (TokenUseFilter,)
    ordering = ("-id",)
    search_fields = ("host_name__icontains", "public_key__startswith", "created_by__icontains")
    search_help_text = "host, public key, creator"
    fields = ("host_name", "shown_use", "public_key", "created_by", "created_at", "expires_at", "used_at")
    readonly_fields = fields
    exports = {"shown_use": ("used_at",)}
    empty = "No join tokens yet. The form for a new one shows it once, and so does this command:"
    empty_command = JOIN_COMMAND
    sources = (JOIN_IN_MANUAL,)
    rights: ClassVar[Rights] = {"add": (CREATE_JOIN_TOKEN,), "change": None, "delete": (DELETE_JOIN_TOKEN,)}

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show the form. POST: make the token and show it, once, with the command to paste on the host.

        A refusal shows the form again. Raises PermissionDenied for a user who may not make join tokens.
        """
        permissions.require_permission(request, CREATE_JOIN_TOKEN)
        values = {name: request.POST.get(name, "").strip() for name in ("host", "hours", "address")}
        values = {"hours": str(join_tokens.DEFAULT_HOURS)} | {name: one for name, one in values.items() if one}
        issued = None
        if request.method == "POST":
            try:
                hours = int(values["hours"]) if values["hours"].isdecimal() and len(values["hours"]) < 6 else 0
                by, address = request.user.get_username(), values.get("address", "")
                issued = join_tokens.issue_join_token(
                    values.get("host", ""), address, False, hours, by, EventSource.PERSON
                )
            except RefusedError as refused:
                messages.error(request, refused.text)
        context = self.admin_site.each_context(request) | {
            "title": f"Join token for {issued.row.host_name}" if issued else "Add join token",
            "opts": self.opts,
            "issued": issued,
            "form_values": values,
            "max_hours": join_tokens.MAX_HOURS,
        }
        return TemplateResponse(request, "agents/admin/add_join_token.html", context)

    def delete_model(self, request: HttpRequest, obj: JoinToken) -> None:
        """Withdraw the token, with an event."""
        join_tokens.withdraw_join_token(obj, request.user.get_username(), EventSource.PERSON)

    @display(description="Use")
    def shown_use(self, token: JoinToken) -> SafeString:
        """Render a badge: used, with the time on hover, expired without having been used, or open."""
        if token.used_at:
            return badges.render_badge("used", "good", f"at {token.used_at:%Y-%m-%d %H:%M:%S} UTC")
        if token.expires_at < database_clock.now():
            return badges.render_badge("expired", "calm")
        return badges.render_badge("open", "busy", "no agent has used it yet")

    @display(description="Bound key", ordering="public_key")
    def shown_key(self, token: JoinToken) -> SafeString:
        """Render the first 12 characters of the public key to which the token is bound; a dash if there is none."""
        return badges.render_identifier(token.public_key[:12] and f"{token.public_key[:12]}…")

    @display(description="Made", ordering="-created_at")
    def created(self, token: JoinToken) -> SafeString:
        """Render when the token was made."""
        return badges.render_relative_time(token.created_at)

    @display(description="Expires", ordering="expires_at")
    def expires(self, token: JoinToken) -> SafeString:
        """Render when the token expires."""
        return badges.render_relative_time(token.expires_at)
