"""The policy rules: upstream's with their names, defaults and legacy alternatives (contract section 3.1), and our own
API's rules.

The module holds only data. `cyborgweb.auth.policy` evaluates it with oslo.policy; `manage.py policy_sample` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

ADMIN = "rule:admin_api"
READER = "rule:project_reader_or_admin"
MANAGER = "rule:project_manager_or_admin"
MEMBER_OR_SERVICE = "rule:project_member_or_service"
ANYONE = "rule:admin_or_owner"
"""Allows every token of a project, because the target of a check is the caller's own project."""
STRICT_MEMBER = "rule:project_member_api or rule:admin_api"
ELEVATED = "rule:elevated"
OPERATOR = "accelerator_operator"
"""The role for people who operate accelerators and are not administrators."""
AUDITOR = "auditor"
"""The role for people who may see everything and change nothing."""
STRICT_MANAGER = f"rule:project_manager_api or rule:admin_api or {ELEVATED} or role:{AUDITOR}"
"""Allows the callers of `project_manager_or_admin` without its legacy alternative, which allows every token of a
project; and also operators and auditors."""
STRICT_READER = f"rule:project_reader_api or rule:project_member_api or {STRICT_MANAGER}"
"""Allows everybody with a role in the project. A token without any role reads nothing of our own API."""


@dataclass(frozen=True)
class PolicyRule:
    """One policy rule. Unless `CYBORG_ENFORCE_NEW_DEFAULTS` is on, `legacy` is an alternative to `check` (or).

    A rule without operations is a building block to which other rules refer.
    """

    name: str
    check: str
    description: str
    operations: tuple[str, ...] = ()
    legacy: str = ""
    session_rule: str = ""
    """The name of a rule that a caller with a session of the console must satisfy as well, whatever the policy file
    says about this one. It withholds what a token gives to every member, or every token, of a project."""


def _rule_with_legacy(name: str, check: str, description: str) -> PolicyRule:
    """Return a rule with the legacy check of upstream's old defaults.

    The legacy check allows every token of a project, because the target of a check is the caller's own project.
    """
    return PolicyRule(name, check, description, legacy="is_admin:True or project_id:%(project_id)s")


ARQ_BY_SESSION = "cyborg:arq:by_session"
INVENTORY = "cyborg:inventory:get_all"
LABEL_OF_ANY_PROJECT = "cyborg:accelerator:update_elevated"
NO_AUDITOR = f"not role:{AUDITOR}"
"""Auditors change nothing: the legacy alternatives, which allow every token of a project to write, are not for them.
An auditor who is also a member of the project is allowed by the rule itself."""

BUILDING_BLOCKS = (
    PolicyRule("admin_api", "role:admin", "Administrators of the cloud."),
    PolicyRule("service_api", "role:service", "Other services of the cloud."),
    PolicyRule("project_reader_api", "role:reader and project_id:%(project_id)s", "Readers of a project."),
    PolicyRule(
        "project_member_api",
        "role:member and project_id:%(project_id)s",
        "Members of a project, who may use resources.",
    ),
    PolicyRule("project_manager_api", "role:manager and project_id:%(project_id)s", "Managers of a project."),
    PolicyRule(
        "project_member_or_service",
        "rule:project_member_api or rule:service_api",
        "Members of a project, and services on their behalf.",
    ),
    _rule_with_legacy(
        "project_reader_or_admin", "rule:project_reader_api or rule:admin_api", "Readers and administrators."
    ),
    _rule_with_legacy(
        "project_member_or_admin", "rule:project_member_api or rule:admin_api", "Members and administrators."
    ),
    _rule_with_legacy(
        "project_manager_or_admin", "rule:project_manager_api or rule:admin_api", "Managers, administrators."
    ),
    PolicyRule(
        "elevated",
        f"role:admin or role:{OPERATOR}",
        "Operators of the accelerators of the whole cloud, who need not be administrators: they see all accelerators,"
        " search for more, install drivers on hosts, attach and detach for every project. A project's manager can only"
        " view. Give the role to people whom you trust with all hosts, or name another role here.",
    ),
    PolicyRule("admin_or_owner", "is_admin:True or project_id:%(project_id)s", "Legacy: every token of a project."),
    PolicyRule("admin_or_user", "is_admin:True or user_id:%(user_id)s", "Legacy: every user."),
    PolicyRule("is_admin", ADMIN, "Legacy: administrators."),
    PolicyRule("default", ANYONE, "Legacy: every token of a project."),
    PolicyRule("allow", "@", "Legacy: everyone."),
    PolicyRule("deny", "!", "Legacy: no one."),
)

UPSTREAM_RULES = (
    PolicyRule("cyborg:device_profile:get_all", READER, "List device profiles.", ("GET /v2/device_profiles",), ANYONE),
    PolicyRule(
        "cyborg:device_profile:get_one", READER, "Show a profile.", ("GET /v2/device_profiles/{profile}",), ANYONE
    ),
    PolicyRule("cyborg:device_profile:create", ADMIN, "Make a device profile.", ("POST /v2/device_profiles",)),
    PolicyRule(
        "cyborg:device_profile:delete",
        ADMIN,
        "Delete device profiles.",
        ("DELETE /v2/device_profiles/{profile}", "DELETE /v2/device_profiles?value={names}"),
    ),
    PolicyRule("cyborg:arq:get_all", READER, "List accelerator requests.", ("GET /v2/accelerator_requests",), ANYONE),
    PolicyRule("cyborg:arq:get_one", READER, "Show a request.", ("GET /v2/accelerator_requests/{uuid}",), ANYONE),
    PolicyRule(
        "cyborg:arq:create",
        MEMBER_OR_SERVICE,
        "Make accelerator requests.",
        ("POST /v2/accelerator_requests",),
        f"rule:project_member_or_admin and {NO_AUDITOR}",
        ARQ_BY_SESSION,
    ),
    PolicyRule(
        "cyborg:arq:delete",
        MEMBER_OR_SERVICE,
        "Delete requests.",
        ("DELETE /v2/accelerator_requests",),
        f"{ANYONE} and {NO_AUDITOR}",
        ARQ_BY_SESSION,
    ),
    PolicyRule(
        "cyborg:arq:update",
        MEMBER_OR_SERVICE,
        "Bind and unbind requests. A service token is needed as well, whatever this rule says.",
        ("PATCH /v2/accelerator_requests",),
        f"{ANYONE} and {NO_AUDITOR}",
        ARQ_BY_SESSION,
    ),
    PolicyRule("cyborg:device:get_all", MANAGER, "List devices.", ("GET /v2/devices",), ADMIN, INVENTORY),
    PolicyRule("cyborg:device:get_one", MANAGER, "Show a device.", ("GET /v2/devices/{uuid}",), ADMIN, INVENTORY),
    PolicyRule("cyborg:device:disable", ADMIN, "Take a device out of offer.", ("POST /v2/devices/{uuid}/disable",)),
    PolicyRule("cyborg:device:enable", ADMIN, "Offer a device.", ("POST /v2/devices/{uuid}/enable",)),
    PolicyRule("cyborg:deployable:get_all", MANAGER, "List deployables.", ("GET /v2/deployables",), ADMIN, INVENTORY),
    PolicyRule(
        "cyborg:deployable:get_one", MANAGER, "Show a deployable.", ("GET /v2/deployables/{uuid}",), ADMIN, INVENTORY
    ),
    PolicyRule("cyborg:deployable:program", ADMIN, "Program a deployable.", ("PATCH /v2/deployables/{uuid}/program",)),
    PolicyRule("cyborg:attribute:get_all", MANAGER, "List attributes.", ("GET /v2/attributes",), ADMIN, INVENTORY),
    PolicyRule(
        "cyborg:attribute:get_one", MANAGER, "Show an attribute.", ("GET /v2/attributes/{uuid}",), ADMIN, INVENTORY
    ),
    PolicyRule("cyborg:attribute:create", ADMIN, "Make an attribute.", ("POST /v2/attributes",)),
    PolicyRule("cyborg:attribute:delete", ADMIN, "Delete an attribute.", ("DELETE /v2/attributes/{uuid}",)),
)

ELEVATED_READER = f"{ELEVATED} or role:{AUDITOR}"
"""Allows operators, administrators and auditors, who see all projects in the console, too."""

OWN_RULES = (
    PolicyRule(
        "cyborg:request:get_all",
        f"rule:cyborg:arq:get_all and ({STRICT_READER})",
        "List accelerator requests with our own API: for callers with a role in the project.",
        ("GET /api/requests/",),
    ),
    PolicyRule(
        "cyborg:request:get_one",
        f"rule:cyborg:arq:get_one and ({STRICT_READER})",
        "Show a request with our own API.",
        ("GET /api/requests/{uuid}/",),
    ),
    PolicyRule(
        "cyborg:request:elevated",
        ELEVATED_READER,
        "See the requests of every project, not only of one's own.",
        ("GET /api/requests/", "GET /api/requests/{uuid}/"),
    ),
    PolicyRule(
        "cyborg:profile:get_all",
        f"rule:cyborg:device_profile:get_all and ({STRICT_READER})",
        "List device profiles with our own API: for callers with a role in the project.",
        ("GET /api/profiles/",),
    ),
    PolicyRule(
        "cyborg:profile:get_one",
        f"rule:cyborg:device_profile:get_one and ({STRICT_READER})",
        "Show a profile with our own API.",
        ("GET /api/profiles/{uuid}/",),
    ),
    PolicyRule(
        ARQ_BY_SESSION,
        ADMIN,
        "Make, bind and delete requests with a session of the console instead of a token.",
        ("POST /v2/accelerator_requests", "PATCH /v2/accelerator_requests", "DELETE /v2/accelerator_requests"),
    ),
    PolicyRule("cyborg:host:get_all", STRICT_MANAGER, "List hosts.", ("GET /api/hosts/",)),
    PolicyRule("cyborg:host:get_one", STRICT_MANAGER, "Show a host.", ("GET /api/hosts/{uuid}/",)),
    PolicyRule("cyborg:agent:get_all", STRICT_MANAGER, "List agents.", ("GET /api/agents/",)),
    PolicyRule("cyborg:agent:get_one", STRICT_MANAGER, "Show an agent.", ("GET /api/agents/{uuid}/",)),
    PolicyRule(
        "cyborg:agent:update",
        ADMIN,
        "Revoke an agent, admit it again, or ask it for a new key.",
        ("POST /api/agents/{uuid}/revoke/", "POST /api/agents/{uuid}/admit/", "POST /api/agents/{uuid}/rotate/"),
    ),
    PolicyRule("cyborg:join_token:get_all", STRICT_MANAGER, "List join tokens.", ("GET /api/join_tokens/",)),
    PolicyRule("cyborg:join_token:get_one", STRICT_MANAGER, "Show a join token.", ("GET /api/join_tokens/{id}/",)),
    PolicyRule("cyborg:join_token:create", ADMIN, "Make a join token.", ("POST /api/join_tokens/",)),
    PolicyRule("cyborg:join_token:delete", ADMIN, "Withdraw a join token.", ("DELETE /api/join_tokens/{id}/",)),
    PolicyRule(
        INVENTORY,
        STRICT_MANAGER,
        "List devices and deployables with their states, reasons and holders, and list discrepancies.",
        (
            *("GET /api/devices/", "GET /api/deployables/", "GET /api/discrepancies/"),
            *("GET /api/bulk_actions/", "GET /api/bulk_results/"),
        ),
    ),
    PolicyRule(
        "cyborg:inventory:get_one",
        STRICT_MANAGER,
        "Show a device or a deployable with its state, reason and holders, or a discrepancy.",
        (
            *("GET /api/devices/{uuid}/", "GET /api/deployables/{uuid}/", "GET /api/discrepancies/{uuid}/"),
            *("GET /api/bulk_actions/{uuid}/", "GET /api/bulk_results/{id}/"),
        ),
    ),
    PolicyRule(
        "cyborg:device:get_usage", STRICT_MANAGER, "See the load of a device.", ("GET /api/devices/{uuid}/usage/",)
    ),
    PolicyRule(
        "cyborg:attach_handle:get_all",
        STRICT_MANAGER,
        "List attach handles with their holders.",
        ("GET /api/attach_handles/",),
    ),
    PolicyRule(
        "cyborg:attach_handle:get_one",
        STRICT_MANAGER,
        "Show an attach handle with its holder.",
        ("GET /api/attach_handles/{uuid}/",),
    ),
    PolicyRule(
        "cyborg:event:get_all",
        STRICT_READER,
        "List the events of requests of one's own project.",
        ("GET /api/events/",),
    ),
    PolicyRule(
        "cyborg:event:get_one",
        STRICT_READER,
        "Show an event of a request of one's own project.",
        ("GET /api/events/{id}/",),
    ),
    PolicyRule(
        "cyborg:event:elevated",
        ELEVATED_READER,
        "See all events, not only those of requests of one's own project.",
        ("GET /api/events/", "GET /api/events/{id}/"),
    ),
    PolicyRule("cyborg:seal:get_all", STRICT_MANAGER, "List the seals over events.", ("GET /api/seals/",)),
    PolicyRule("cyborg:seal:get_one", STRICT_MANAGER, "Show a seal.", ("GET /api/seals/{number}/",)),
    PolicyRule("cyborg:subscription:get_all", STRICT_READER, "List subscriptions.", ("GET /api/subscriptions/",)),
    PolicyRule(
        "cyborg:subscription:get_one", STRICT_READER, "Show a subscription.", ("GET /api/subscriptions/{uuid}/",)
    ),
    PolicyRule("cyborg:subscription:create", STRICT_MEMBER, "Subscribe to messages.", ("POST /api/subscriptions/",)),
    PolicyRule(
        "cyborg:subscription:update",
        STRICT_MEMBER,
        "Change a subscription, test it, give it another secret; see its whole URL.",
        ("PATCH /api/subscriptions/{uuid}/", "POST /api/subscriptions/{uuid}/{test,rotate}/"),
    ),
    PolicyRule("cyborg:subscription:delete", STRICT_MEMBER, "Unsubscribe.", ("DELETE /api/subscriptions/{uuid}/",)),
    PolicyRule(
        "cyborg:subscription:hand_over",
        "rule:project_manager_api or rule:admin_api",
        "Hand a subscription of the project over to another owner; see the ended ones of all its members.",
        ("POST /api/subscriptions/{uuid}/hand_over/",),
    ),
    PolicyRule(
        "cyborg:subscription:elevated",
        ELEVATED,
        "Subscribe to the events of every device and request, not only of one's own project.",
        ("POST /api/subscriptions/ (scope: cloud)",),
    ),
    PolicyRule(
        "cyborg:delivery:get_all", STRICT_READER, "List deliveries to subscriptions.", ("GET /api/deliveries/",)
    ),
    PolicyRule("cyborg:delivery:get_one", STRICT_READER, "Show a delivery.", ("GET /api/deliveries/{uuid}/",)),
    PolicyRule("cyborg:delivery:update", STRICT_MEMBER, "Repeat a delivery.", ("POST /api/deliveries/{uuid}/replay/",)),
    PolicyRule("cyborg:inbox:get_all", STRICT_READER, "List one's own messages.", ("GET /api/inbox/",)),
    PolicyRule("cyborg:inbox:get_one", STRICT_READER, "Show one's own message.", ("GET /api/inbox/{uuid}/",)),
    PolicyRule(
        "cyborg:inbox:update", STRICT_READER, "Mark one's own message as read.", ("POST /api/inbox/{uuid}/read/",)
    ),
    PolicyRule(
        "cyborg:inbox:read_all",
        STRICT_READER,
        "Mark all of one's own messages as read.",
        ("POST /api/inbox/read_all/",),
    ),
    PolicyRule(
        "cyborg:accelerator:get_all",
        STRICT_READER,
        "List attached accelerators, and see the bulk actions that label them.",
        (
            "GET /api/accelerators/",
            *("GET /api/bulk_actions/ (action: label)", "GET /api/bulk_actions/{uuid}/ (action: label)"),
            *("GET /api/bulk_results/ (action: label)", "GET /api/bulk_results/{id}/ (action: label)"),
        ),
    ),
    PolicyRule(
        "cyborg:accelerator:get_one", STRICT_READER, "Show an attached accelerator.", ("GET /api/accelerators/{uuid}/",)
    ),
    PolicyRule(
        "cyborg:accelerator:update",
        STRICT_MEMBER,
        "Label attached accelerators of one's own project.",
        (
            "PATCH /api/accelerators/{uuid}/",
            "POST /api/accelerators/label/",
            "POST /api/bulk_actions/ (action: label)",
            "POST /api/bulk_actions/{uuid}/{cancel,retry}/ (action: label)",
        ),
        session_rule=LABEL_OF_ANY_PROJECT,
    ),
    PolicyRule(
        LABEL_OF_ANY_PROJECT,
        ELEVATED,
        "Label the accelerators of every project, not only those of one's own.",
        ("PATCH /api/accelerators/{uuid}/", "POST /api/accelerators/label/"),
    ),
    PolicyRule(
        "cyborg:accelerator:elevated",
        STRICT_MANAGER,
        "See the accelerators of every project, not only one's own, and see the free ones.",
        ("GET /api/accelerators/",),
    ),
    PolicyRule("cyborg:accelerator:create", ADMIN, "Divide devices into more units.", ("POST /api/accelerators/",)),
    PolicyRule(
        "cyborg:accelerator:delete", ADMIN, "Divide devices into fewer units.", ("POST /api/accelerators/delete/",)
    ),
    PolicyRule(
        "cyborg:device:update",
        ADMIN,
        "Move a device to another state, or give it another layout.",
        (
            "POST /api/devices/{uuid}/{enable,disable,drain,quarantine,release,retire,reinstate}/",
            "PATCH /api/devices/{uuid}/",
            "POST /api/bulk_actions/ (an action that changes states)",
            "POST /api/bulk_actions/{uuid}/{cancel,retry}/ (an action that changes states)",
        ),
    ),
    PolicyRule(
        "cyborg:backend:get",
        STRICT_MANAGER,
        "See drivers' backends.",
        ("GET /api/backends/", "GET /api/backends/{id}/"),
    ),
    PolicyRule("cyborg:service:get", STRICT_MANAGER, "See what backends can do.", ("GET /api/services/",)),
    PolicyRule(
        "cyborg:service:discover",
        ELEVATED,
        "Make a host's drivers search for devices again.",
        ("POST /api/commands/ (op: rescan)",),
    ),
    PolicyRule(
        "cyborg:driver:get",
        STRICT_MANAGER,
        "See hosts' drivers and rollouts.",
        ("GET /api/drivers/", "GET /api/rollouts/", "GET /api/rollouts/{uuid}/"),
    ),
    PolicyRule(
        "cyborg:driver:rollout",
        ELEVATED,
        "Install, uninstall, change drivers on any host: for administrators and the role accelerator_operator.",
        (
            "POST /api/rollouts/",
            "POST /api/rollouts/{uuid}/{cancel,retry}/",
            "POST /api/backends/",
            "PATCH /api/backends/{id}/",
            "DELETE /api/backends/{id}/",
        ),
    ),
    PolicyRule(
        "cyborg:attachment:get",
        ELEVATED_READER,
        "See what was attached to running instances, step by step, and the bulk actions that detach it.",
        (
            *("GET /api/attachments/", "GET /api/attachments/{uuid}/"),
            *("GET /api/bulk_actions/ (action: detach)", "GET /api/bulk_actions/{uuid}/ (action: detach)"),
            *("GET /api/bulk_results/ (action: detach)", "GET /api/bulk_results/{id}/ (action: detach)"),
        ),
    ),
    PolicyRule("cyborg:attachment:create", ELEVATED, "Attach to a running instance.", ("POST /api/attachments/",)),
    PolicyRule(
        "cyborg:attachment:delete",
        ELEVATED,
        "Detach from a running instance.",
        (
            "POST /api/attachments/{uuid}/detach/",
            "POST /api/bulk_actions/ (action: detach)",
            "POST /api/bulk_actions/{uuid}/{cancel,retry}/ (action: detach)",
        ),
    ),
    PolicyRule(
        "cyborg:attachment:elevated",
        ELEVATED,
        "Attach and detach for the instances of every project, not only of one's own.",
        ("POST /api/attachments/", "POST /api/attachments/{uuid}/detach/"),
    ),
    PolicyRule(
        "cyborg:attachment:get_elevated",
        f"rule:cyborg:attachment:elevated or role:{AUDITOR}",
        "See the attachments of every project, not only of one's own.",
        ("GET /api/attachments/", "GET /api/attachments/{uuid}/"),
    ),
    PolicyRule("cyborg:usage:get", STRICT_READER, "See how many units one's own project holds.", ("GET /api/usage/",)),
    PolicyRule(
        "cyborg:usage:elevated",
        STRICT_MANAGER,
        "See what every project holds, what is free on each host, and how busy devices are.",
        ("GET /api/usage/",),
    ),
    PolicyRule(
        "cyborg:census:create",
        STRICT_MANAGER,
        "Ask hosts now how busy they are, and which have free units. Nothing is changed.",
        ("POST /api/census/",),
    ),
    PolicyRule(
        "cyborg:nova_endpoint:get_all",
        STRICT_MANAGER,
        "List the addresses of Nova that were used, and whether their answer 404 is believed.",
        ("GET /api/nova_endpoints/",),
    ),
    PolicyRule(
        "cyborg:nova_endpoint:get_one", STRICT_MANAGER, "Show an address of Nova.", ("GET /api/nova_endpoints/{uuid}/",)
    ),
    PolicyRule(
        "cyborg:nova_endpoint:update",
        ADMIN,
        "Confirm an address of Nova, or withdraw that: requests of instances that it does not know are deleted.",
        ("POST /api/nova_endpoints/{uuid}/confirm/", "POST /api/nova_endpoints/{uuid}/withdraw/"),
    ),
    PolicyRule(
        "cyborg:placement_writer:update",
        ADMIN,
        "Decide in the console whether the conductor or the agents write to Placement.",
        ("POST /admin/placement_sync/writer/1/change/",),
    ),
    PolicyRule(
        "cyborg:maintenance:update",
        ADMIN,
        "Switch read-only mode on or off in the console.",
        ("POST /admin/cyborgweb/maintenance/1/change/",),
    ),
    PolicyRule("cyborg:command:get_all", STRICT_MANAGER, "List commands to agents.", ("GET /api/commands/",)),
    PolicyRule("cyborg:command:get_one", STRICT_MANAGER, "Show a command.", ("GET /api/commands/{uuid}/",)),
    PolicyRule(
        "cyborg:command:create",
        ADMIN,
        "Command a host's agent.",
        (
            "POST /api/commands/",
            "POST /api/bulk_actions/ (action: health, reset)",
            "POST /api/bulk_actions/{uuid}/{cancel,retry}/ (action: health, reset)",
        ),
    ),
    PolicyRule("cyborg:rule:get_all", STRICT_MANAGER, "List admission rules.", ("GET /api/rules/",)),
    PolicyRule(
        "cyborg:host:delete",
        ADMIN,
        "Remove a host, or cancel its removal.",
        ("POST /api/hosts/{uuid}/remove/", "POST /api/hosts/{uuid}/cancel_removal/"),
    ),
    PolicyRule("cyborg:rule:get_one", STRICT_MANAGER, "Show an admission rule.", ("GET /api/rules/{uuid}/",)),
    PolicyRule("cyborg:rule:create", ADMIN, "Make an admission rule.", ("POST /api/rules/",)),
    PolicyRule("cyborg:rule:update", ADMIN, "Change an admission rule.", ("PATCH /api/rules/{uuid}/",)),
    PolicyRule("cyborg:rule:delete", ADMIN, "Delete an admission rule.", ("DELETE /api/rules/{uuid}/",)),
    PolicyRule(
        "cyborg:device_profile:update", ADMIN, "Edit a profile until it is used.", ("PATCH /api/profiles/{uuid}/",)
    ),
)

RULES = (*BUILDING_BLOCKS, *UPSTREAM_RULES, *OWN_RULES)
SESSION_RULES = {rule.name: rule.session_rule for rule in RULES if rule.session_rule}
