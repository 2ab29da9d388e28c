"""Test every action of the console and of both APIs with every role, against the tables of `docs/rights.md`.

The actions are found in the URL configuration, the admin site, the routes of both APIs and the lists of buttons, so
that a new action without a row of a table fails here. The rights of the roles are asked of the permission layer; real
requests prove that each view asks for what its row names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import URLPattern, reverse

from accelerators import conductor
from accelerators.admin.device_actions import STATE_CHOICES
from accelerators.admin.drivers import BACKEND_BUTTONS, BUTTON_OPERATIONS
from accelerators.admin.partitioning import CHANGE_SIGNS
from accelerators.api.v2 import urls as v2_urls
from accelerators.api.v2.views import V2NotFoundView
from accelerators.commands.catalogue import ORDERABLE_COMMANDS
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.states import DrainTarget, EventSource, RolloutOp
from accelerators.models import AcceleratorRequest, AttachHandle, Attachment, Device, Host, HostDriver
from accelerators.ui.badges import page_url
from accelerators.workflows import bulk_actions, driver_rollouts
from accelerators.workflows.driver_config import DriverChange
from cyborgweb import asgi, urls
from cyborgweb.api import root as own_api
from cyborgweb.auth import policy, roles
from cyborgweb.auth.policy import IMPLIED_ROLES, Policy, RulePermission
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR, OWN_RULES, UPSTREAM_RULES
from cyborgweb.models import ApiToken, Maintenance
from cyborgweb.models.notify import Subscription
from cyborgweb.notify.admin import SUBSCRIPTION_ACTIONS
from placement_sync.models import Writer
from tests.accelerators.api.own.test_units import create_bound_request
from tests.support.reports import create_heard_host

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rights.md"
UUID = "604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d"
EXAMPLE_KEYS = {"{id}": "1", "{number}": "1", "{key}": f"{UUID}:pci_driver"}
"""Keys of members whose key is no uuid."""
ALL_RULES = frozenset(rule.name for rule in (*UPSTREAM_RULES, *OWN_RULES))
TOKEN_ROLES = {
    "no role": frozenset[str](),
    "reader": IMPLIED_ROLES["reader"],
    "member": IMPLIED_ROLES["member"],
    "manager": IMPLIED_ROLES["manager"],
    "service": frozenset({"service"}),
    "auditor": IMPLIED_ROLES[AUDITOR],
    "operator": IMPLIED_ROLES[OPERATOR],
    "admin": IMPLIED_ROLES["admin"],
}
"""The callers with a token, in the order in which the page names them, each with the roles of its token."""
CONSOLE_GROUPS = {
    "no group": "",
    "tenant": "project:p1",
    "viewer": roles.VIEWERS.group,
    "auditor": roles.AUDITORS.group,
    "operator": roles.OPERATORS.group,
    "administrator": roles.ADMINISTRATORS.group,
}
"""The people who may enter the console, in the order in which the page names them, each with their group."""
OPEN_ROUTES = ["GET /", "GET /api/", "GET /api/docs/", "GET /api/schema/", "GET /v2"]
"""Routes that need no login, because they show nothing that is stored."""
DJANGO_VIEWS = ("changelist", "add", "history", "delete", "change", "export")
PARTS_OF_PAGES = (
    "accelerators_bulk_now",
    "accelerators_bulk_rows",
    "accelerators_command_lately",
    "accelerators_command_now",
    "accelerators_host_load",
    "accelerators_rollout_now",
)
"""Addresses that show a part of a page to everybody who sees the page."""
PAGES_WITHOUT_BUTTONS = (
    "accelerators_acceleratorrequest_change",
    "accelerators_attachment_change",
    "accelerators_command_change",
    "accelerators_device_change",
    "accelerators_deviceprofile_change",
    "accelerators_event_change",
    "placement_sync_tree_change",
    "usage",
)
PERSONAL_PAGES = ("find", "inbox", "inbox_unread", "list_keep", "own_password")
"""Pages for everybody who may enter the console: what they show depends on the lists that the person sees."""

BULK_KINDS: tuple[tuple[str, str, Any], ...] = (
    ("states", Action.QUARANTINE, None),
    ("admission", "admit", None),
    ("commands", "health", None),
    ("more units", "partition", {"units": 1, "layout": {}, "generation": None}),
    ("fewer units", "partition", {"units": -1, "layout": {}, "generation": None}),
    ("layouts", "partition", {"units": 0, "layout": {"vfs": "8"}, "generation": None}),
    ("detachments", "detach", None),
    ("labels", "label", {"label": "training"}),
)
"""The kinds of bulk actions that need different rights, each with an action and its arguments."""

ExactRules = Callable[[Iterable[str]], AbstractContextManager[None]]


@pytest.fixture
def people() -> dict[str, Any]:
    """Return a request of each person of CONSOLE_GROUPS and of a superuser, by name."""
    requests = {}
    for name, group in [*CONSOLE_GROUPS.items(), ("superuser", "")]:
        user = User.objects.create(username=name, is_staff=True, is_superuser=name == "superuser")
        if group:
            user.groups.add(roles.get_group(group))
        requests[name] = make_request(user)
    return requests


def make_request(user: Any) -> Any:
    """Return a request of this user, as the permission layer sees it."""
    request: Any = RequestFactory().get("/admin/")
    request.user, request.session = user, {}
    return request


def make_person(*permissions: str) -> Any:
    """Return a person without groups who may enter the console and has these Django permissions; nothing is stored."""
    person: Any = User(username="ann", pk=1, is_staff=True)
    person._perm_cache, person.group_names = set(permissions), []
    return person


@pytest.fixture
def exact_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ExactRules:
    """Return a context manager in which a policy file allows by each rule the role with the rule's own name only.

    Every console session has the roles of the given rules. A token has the rules that its roles name.
    """
    (tmp_path / "policy.yaml").write_text("\n".join(f'"{rule}": "role:{rule}"' for rule in ALL_RULES))
    rules_in_force = Policy(tmp_path / "policy.yaml", False)

    @contextmanager
    def give_rules(rules: Iterable[str]) -> Iterator[None]:
        session_roles = frozenset(rules)
        with monkeypatch.context() as patched:
            patched.setattr(policy, "_get_policy", lambda: rules_in_force)
            patched.setattr(roles, "get_keystone_roles", lambda user: session_roles)
            yield

    return give_rules


@pytest.fixture
def short_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer a refusal with its reason alone: the page around it takes ten times as long as all the rest."""
    refuse = lambda request, exception: HttpResponse(str(exception), status=403)  # noqa: E731
    monkeypatch.setattr(urls, "handler403", refuse)
    monkeypatch.setattr(logging.getLogger("django.request"), "disabled", True)


def load_permissions() -> dict[str, int]:
    """Return the primary key of every Django permission by the name that `has_perm` knows."""
    rows = Permission.objects.values_list("content_type__app_label", "codename", "pk")
    return {f"{app}.{codename}": pk for app, codename, pk in rows}


def read_table(heading: str) -> list[list[str]]:
    """Return the rows of the table below this heading of the page, as lists of cells."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def format_names(allowed_by_name: Mapping[str, bool]) -> str:
    """Return the names whose value is True, as the page writes them."""
    allowed = [name for name, is_allowed in allowed_by_name.items() if is_allowed]
    return "everybody" if len(allowed) == len(allowed_by_name) else ", ".join(allowed) or "nobody"


def parse_needs(cell: str) -> list[tuple[str, str]]:
    """Return the (rule, permission) pairs of a cell; "" where the cell has only a rule or only a permission."""
    pairs = []
    for text in cell.split("<br>and "):
        names = re.findall(r"`([^`]+)`", text)
        rules, granted = [one for one in names if ":" in one], [one for one in names if ":" not in one]
        pairs.append((rules[0] if rules else "", granted[0] if granted else ""))
    return pairs


# The APIs


def find_api_operations() -> dict[str, str]:
    """Return `METHOD path` and its policy rule for every route of both APIs; "" for a route that needs no login."""
    found = {}
    routes = [("/api/", "/", one) for one in own_api.urlpatterns] + [("/v2/", "", one) for one in v2_urls.urlpatterns]
    for prefix, end, pattern in routes:
        view: Any = pattern.callback
        cls = getattr(view, "cls", None)
        if cls in (own_api.ApiNotFoundView, V2NotFoundView):
            continue
        path = spell_path(str(pattern.pattern), prefix, end)
        for method in ["GET"] if cls is None else list_methods(view, cls):
            found[f"{method} {path}"] = "" if cls is None else find_rule(view, cls, method)
    return found


def spell_path(regex: str, prefix: str, end: str) -> str:
    """Return the path of a route as the page writes it, such as `/api/devices/{uuid}/enable/`."""
    for piece in (r"\A", r"\Z", "/?", r"(?:\.json)?", "(?:v2/)?", "(?:/[^/]+)?"):
        regex = regex.replace(piece, "")
    regex = re.sub(r"\(\?P<\w+>([a-z]+)(?:\|[a-z]+)+\)", r"\1", regex)  # one of several words stands for all
    path = re.sub(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)", r"{\1}", regex)
    return f"{prefix}{path}{end}" if path not in ("", "v2") else prefix if prefix == "/api/" else f"/{path}"


def list_methods(view: Any, cls: Any) -> list[str]:
    """Return the methods that a route answers, without HEAD and OPTIONS, which need what GET needs."""
    names = getattr(view, "actions", None) or [name for name in cls.http_method_names if hasattr(cls, name)]
    return [name.upper() for name in names if name not in ("head", "options")]


def find_rule(view: Any, cls: Any, method: str) -> str:
    """Return the rule that a route names for the method; "" if it needs no login."""
    instance: Any = cls(**getattr(view, "initkwargs", {}))
    instance.action = (getattr(view, "actions", None) or {}).get(method.lower())
    if not cls.permission_classes:
        assert not cls.authentication_classes
        return ""
    assert [type(one) for one in instance.get_permissions()] == [RulePermission], cls
    return str(instance.policy_rules[method])


@pytest.mark.slow
def test_the_page_has_every_policy_rule_with_its_routes_and_the_roles_that_it_allows(people: dict[str, Any]) -> None:
    operations_by_rule: dict[str, list[str]] = {}
    for operation, rule in find_api_operations().items():
        operations_by_rule.setdefault(rule, []).append(operation)
    assert sorted(operations_by_rule.pop("")) == OPEN_ROUTES
    tokens = {name: Caller("ann", "u1", granted, "p1") for name, granted in TOKEN_ROLES.items()}
    sessions = {name: roles.get_session_caller(request.user, {}) for name, request in people.items()}
    superuser = sessions.pop("superuser")
    rows = []
    for rule in (*UPSTREAM_RULES, *OWN_RULES):
        operations = operations_by_rule.pop(rule.name, None) or rule.operations
        by_token = {name: policy.is_allowed(caller, rule.name) for name, caller in tokens.items()}
        by_session = {name: bool(one and policy.is_allowed(one, rule.name)) for name, one in sessions.items()}
        assert superuser and policy.is_allowed(superuser, rule.name) == by_session["administrator"]
        listed = "<br>".join(f"`{one}`" for one in operations)
        rows.append([f"`{rule.name}`", listed, format_names(by_token), format_names(by_session)])
    assert not operations_by_rule, "these routes name rules that do not exist"
    assert_table("The APIs", rows)


def assert_table(heading: str, rows: list[list[str]]) -> None:
    """Fail with the rows that differ unless the page's table has exactly these rows."""
    on_page = read_table(heading)
    missing = ["| " + " | ".join(row) + " |" for row in rows if row not in on_page]
    wrong = ["| " + " | ".join(row) + " |" for row in on_page if row not in rows]
    assert not missing and not wrong and len(rows) == len(on_page), (
        f"docs/rights.md, “{heading}”: these rows are missing:\n"
        + "\n".join(missing)
        + "\nthese rows are wrong:\n"
        + "\n".join(wrong)
    )


def fill_path(path: str) -> str:
    """Return the path of a route with an example of each key."""
    url = re.sub(r"\{\w+\}", lambda name: EXAMPLE_KEYS.get(name[0], UUID), path)
    return url.replace("backends/1", f"backends/{UUID}:pci_driver:a").replace(
        "services/1", f"services/{UUID}:pci_driver:a:b"
    )


ALTERNATIVE_RULES = {
    f"GET /api/{path}": {"cyborg:accelerator:get_all", "cyborg:attachment:get"}
    for path in ("bulk_actions/", "bulk_actions/{uuid}/", "bulk_results/", "bulk_results/{id}/")
}
"""Rules that are sufficient in place of the rule of an operation, for a part of its rows."""


@pytest.mark.slow
def test_every_route_refuses_a_caller_who_lacks_only_its_rule_and_then_writes_nothing(
    client: Client, exact_rules: ExactRules
) -> None:
    user = User.objects.create(username="ann")
    for number, (operation, rule) in enumerate(find_api_operations().items()):
        method, path = operation.split(" ")
        url = fill_path(path)
        if rule:
            assert client.generic(method, url).status_code == 401, operation
            lacking = {rule} | ALTERNATIVE_RULES.get(operation, set())
            token = ApiToken.create_with_secret(f"t{number}", user, sorted(ALL_RULES - lacking), "p1")
            with exact_rules([]), nothing_written(operation):
                answer = client.generic(method, url, b"", "application/json", headers={"X-Auth-Token": token})
            assert answer.status_code == 403, (operation, url, answer.content)
            assert f"Access was denied to the following resource: {rule}" in answer.content.decode(), operation


@pytest.mark.slow
def test_a_token_without_a_role_is_refused_by_every_route_of_our_own_api(client: Client) -> None:
    token = ApiToken.create_with_secret("bare", User.objects.create(username="ann"), [], "p1")
    refused = 0
    for operation, rule in find_api_operations().items():
        method, path = operation.split(" ")
        if rule and path.startswith("/api/"):
            with nothing_written(operation):
                answer = client.generic(
                    method, fill_path(path), b"", "application/json", headers={"X-Auth-Token": token}
                )
            assert answer.status_code == 403, (operation, answer.content)
            refused += 1
    assert refused > 80


@pytest.mark.slow
def test_a_token_of_an_auditor_is_refused_by_exactly_the_routes_whose_rules_do_not_allow_auditors(
    client: Client,
) -> None:
    printed = StringIO()
    call_command("api_token", "vera", "--role", "auditor", stdout=printed)
    headers = {"X-Auth-Token": printed.getvalue().splitlines()[-1]}
    auditor = Caller("vera", "u1", TOKEN_ROLES["auditor"], "local")
    allowed_writes = set()
    for operation, rule in find_api_operations().items():
        if not rule:
            continue
        method, path = operation.split(" ")
        is_allowed = policy.is_allowed(auditor, rule)
        with nullcontext() if is_allowed else nothing_written(operation):
            answer = client.generic(method, fill_path(path), b"", "application/json", headers=headers)
        denial = f"Access was denied to the following resource: {rule}"
        is_refused = answer.status_code == 403 and denial in answer.content.decode()
        assert is_refused is not is_allowed, (operation, answer.content)
        if is_allowed and method != "GET":
            allowed_writes.add(rule)
    assert allowed_writes == {"cyborg:census:create", "cyborg:inbox:update", "cyborg:inbox:read_all"}


@contextmanager
def nothing_written(action: str) -> Iterator[None]:
    """Fail if the block executes a statement that writes."""
    with CaptureQueriesContext(connection) as executed:
        yield
    written = [one["sql"] for one in executed if re.search(r"\b(INSERT|UPDATE|DELETE|COPY)\b", one["sql"])]
    assert not written, (action, written)


# The console


def test_the_page_has_every_list_of_the_console_and_who_sees_it(
    people: dict[str, Any], exact_rules: ExactRules
) -> None:
    needs_by_page = {row[0]: row[1] for row in read_table("Pages of the console")}
    rows = []
    for model, site_admin in admin.site._registry.items():
        name = str(model._meta.verbose_name_plural)
        seen = {who: site_admin.has_view_permission(request) for who, request in people.items()}
        assert seen.pop("superuser")
        needs = needs_by_page.get(name, "?")
        rows.append([name, needs, format_names(seen)])
        ((rule, permission),) = parse_needs(needs)
        with exact_rules([rule]):
            assert site_admin.has_view_permission(make_request(make_person(permission))), name
        with exact_rules([]):
            assert not site_admin.has_view_permission(make_request(make_person())), name
    assert_table("Pages of the console", rows)


@pytest.mark.slow
def test_every_list_with_its_pages_exports_and_saved_views_is_closed_to_people_who_may_not_see_it(
    client: Client, exact_rules: ExactRules, short_refusals: None
) -> None:
    anonymous = Client()
    client.force_login(User.objects.create(username="ann", is_staff=True))
    with exact_rules([]):
        for model in admin.site._registry:
            name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
            single_row = model in (Maintenance, Writer)  # a redirect leads from its list to its page
            listed = reverse(f"{name}_change", args=[1]) if single_row else reverse(f"{name}_changelist")
            exported = listed if model is Writer else reverse(f"{name}_export", args=["csv"])
            saved_views = reverse("list_keep", args=[model._meta.label_lower])
            with nothing_written(name):
                answers = [client.get(listed), client.get(exported), client.post(saved_views, {"name": "mine"})]
                assert anonymous.get(exported).status_code == 302, name
            expected = {403, 404} if model is Writer else {403}  # it has no list whose views could be saved
            assert {one.status_code for one in answers} == expected, name


Ask = Callable[[Any], bool]


def find_admin_actions() -> dict[str, Ask]:
    """Return the forms and the list actions of the admin site, each with a function that says who may use it."""
    found: dict[str, Ask] = {}
    superuser = make_request(User(username="root", is_staff=True, is_superuser=True, is_active=True))
    for model, site_admin in admin.site._registry.items():
        name = model._meta.verbose_name
        for verb in ("add", "change", "delete"):
            may = getattr(site_admin, f"has_{verb}_permission")
            if may(superuser):
                found[f"{name}: {verb}"] = may
        for action in site_admin.get_actions(superuser):
            if action != "delete_selected":
                found[f"{name}: {action} (list)"] = lambda request, one=action, of=site_admin: (
                    one in of.get_actions(request)
                )
    return found


@dataclass
class World:
    """Rows on which the buttons of the console work; `person` presses them."""

    person: User
    host: Host = field(init=False)
    device: Device = field(init=False)

    def __post_init__(self) -> None:
        self.host = create_heard_host("cmp1", 1)
        self.device = Device.objects.get()

    def page(self, of: str, pk: Any, *end: str) -> str:
        """Return the address of a row's page, or of a button below it."""
        return page_url(of, pk).removesuffix("change/") + "/".join([*end, ""]) if end else page_url(of, pk)

    def draft(self, action: Any, arguments: Any = None) -> str:
        """Return the page of a new bulk action that the person has chosen."""
        caller = Caller(self.person.username, str(self.person.pk), frozenset(), "")
        chosen: Any = Device.objects.all()
        if action == "detach":
            self.attachment_to_detach()
            chosen = Attachment.objects.all()
        elif action == "label":
            create_bound_request(AttachHandle.objects.filter(request__isnull=True)[0])
            chosen = AcceleratorRequest.objects.all()
        then = DrainTarget.MAINTENANCE
        return self.page("bulk", bulk_actions.create_draft(action, then, chosen, caller, arguments=arguments).pk)

    def driver(self) -> str:
        return self.page("hostdriver", HostDriver.objects.get(driver="pci_driver").pk)

    def rollout(self, is_draft: bool = False) -> str:
        caller = Caller(self.person.username, str(self.person.pk), frozenset(), "")
        change = DriverChange(RolloutOp.UPDATE, "pci_driver", False, None)
        if is_draft:
            draft = driver_rollouts.store_draft(change, [self.host], caller, source=EventSource.PERSON)
            return self.page("rollout", draft.rollout.pk)
        started = driver_rollouts.start_rollout(change, [self.host], caller, source=EventSource.PERSON)
        return self.page("rollout", started.pk)

    def attachment_to_detach(self) -> str:
        with conductor.writing():
            row = Attachment.objects.create(instance=UUID, project_id="p1", host="cmp1", actor="root", state="attached")
        return self.page("attachment", row.pk, "detach")

    def subscription(self, verb: str) -> str:
        row = Subscription.objects.create(
            name="mine",
            project_id=roles.LOCAL_PROJECT,
            person=str(self.person.pk),
            user=self.person,
            kinds=["device.found"],
            way="inbox",
        )
        return reverse("admin:cyborgweb_subscription_do", args=[row.pk, verb])


Press = Callable[[World], tuple[str, dict[str, Any]]]


def find_buttons() -> dict[str, tuple[str, Press]]:
    """Return the buttons of the console that are not forms of Django: the name of their address, and how to press each.

    The names of many buttons come from the lists of which the pages are made.
    """
    buttons: dict[str, tuple[str, Press]] = {}
    for choice in STATE_CHOICES:
        buttons[f"device: {choice}"] = (
            "accelerators_device_decide",
            lambda world, one=choice: (world.page("device", world.device.pk, "decide"), {"choice": one}),
        )
    for op, command in ORDERABLE_COMMANDS.items():
        buttons[f"{command.target}: {op}"] = (
            f"accelerators_{command.target}_order",
            lambda world, one=op, of=command.target: (
                world.page(of, getattr(world, of).pk, "order"),
                {"op": one, "layout": "vfs=4", "image": UUID},
            ),
        )
    for change in CHANGE_SIGNS:
        buttons[f"device: units, {change}"] = (
            "accelerators_device_units",
            lambda world, one=change: (
                reverse("admin:accelerators_device_units"),
                {"device": [str(world.device.uuid)], "change": one, "count": "1"},
            ),
        )
    for kind, action, arguments in BULK_KINDS:
        for verb in ("confirm", "try", "cancel", "again"):
            buttons[f"bulk action of {kind}: {verb}"] = (
                "accelerators_bulk_change",
                lambda world, one=verb, of=action, given=arguments: (world.draft(of, given), {"do": one}),
            )
    for operation in (*BUTTON_OPERATIONS, *BACKEND_BUTTONS):
        buttons[f"driver: {operation}"] = (
            "accelerators_hostdriver_change",
            lambda world, one=operation: (world.driver(), {"do": one}),
        )
    for op in ("retry", "compare"):
        buttons[f"host in Placement: {op}"] = (
            "placement_sync_tree_ask",
            lambda world, one=op: (reverse("admin:placement_sync_tree_ask", args=[world.host.pk]), {"op": one}),
        )
    for verb in SUBSCRIPTION_ACTIONS:
        buttons[f"subscription: {verb}"] = (
            "cyborgweb_subscription_do",
            lambda world, one=verb: (world.subscription(one), {}),
        )
    return buttons | {
        "host: cancel-removal": (
            "accelerators_host_cancel_removal",
            lambda world: (world.page("host", world.host.pk, "cancel-removal"), {}),
        ),
        "host: remove": (
            "accelerators_host_remove",
            lambda world: (world.page("host", world.host.pk, "remove"), {"name": "cmp1"}),
        ),
        "rollout: cancel": ("accelerators_rollout_change", lambda world: (world.rollout(), {"do": "cancel"})),
        "rollout: again": ("accelerators_rollout_change", lambda world: (world.rollout(), {"do": "again"})),
        "rollout: confirm": (
            "accelerators_rollout_change",
            lambda world: (world.rollout(is_draft=True), {"do": "confirm"}),
        ),
        "attachment: attach": (
            "accelerators_attachment_attach",
            lambda world: (reverse("admin:accelerators_attachment_attach"), {"instance": UUID}),
        ),
        "attachment: detach": (
            "accelerators_attachment_detach",
            lambda world: (world.attachment_to_detach(), {"sure": "yes"}),
        ),
        "accelerator request: label": (
            "accelerators_acceleratorrequest_label",
            lambda world: (reverse("admin:accelerators_acceleratorrequest_label"), {}),
        ),
        "admission rules: apply": (
            "accelerators_admissionrule_apply",
            lambda world: (reverse("admin:accelerators_admissionrule_apply"), {}),
        ),
        "maintenance: switch": (
            "cyborgweb_maintenance_change",
            lambda world: ("/admin/cyborgweb/maintenance/1/change/", {"off": "yes"}),
        ),
        "user: password": (
            "auth_user_password_change",
            lambda world: (reverse("admin:auth_user_password_change", args=[world.person.pk]), {}),
        ),
        "load census: ask": ("census", lambda world: (reverse("census"), {"profile": "none"})),
    }


def test_every_address_of_the_console_is_on_the_page_or_belongs_to_a_list() -> None:
    names = set()
    for model, site_admin in admin.site._registry.items():
        of_django = {f"{model._meta.app_label}_{model._meta.model_name}_{verb}" for verb in DJANGO_VIEWS}
        names |= {one.name for one in site_admin.get_urls() if one.name} - of_django
        if "change_view" in vars(type(site_admin)):
            names.add(f"{model._meta.app_label}_{model._meta.model_name}_change")
    own_pages = [one for one in urls.urlpatterns if isinstance(one, URLPattern)]
    names |= {one.name or "" for one in own_pages if str(one.pattern).startswith("admin/")}
    with_buttons = {name for name, _ in find_buttons().values()}
    assert names == with_buttons | {*PARTS_OF_PAGES, *PAGES_WITHOUT_BUTTONS, *PERSONAL_PAGES}


def test_the_page_names_every_other_address_of_the_product() -> None:
    others = {str(one.pattern) for one in urls.urlpatterns if not str(one.pattern).startswith(("admin/", "^admin/"))}
    apis = {"^api(?:/|$)", "^accelerator(?:/|$)", rf"^(?!(?:{urls.OWN_PATHS})(?:/|$))"}
    mail_links = {one for one in others if one.startswith("^mail/")}
    assert len(mail_links) == 1 and others - apis - mail_links == {
        "d/<str:prefix>",
        "healthz",
        "readyz",
        "metrics",
        "help/",
    }
    assert set(asgi.sockets) == {"^ws/agent$", "^ws/console$"}
    text = PAGE.read_text()
    for path in ("/d/", "/healthz", "/readyz", "/metrics", "/mail/", "/ws/agent", "/ws/console"):
        assert f"`{path}`" in text


@pytest.mark.slow
def test_the_page_has_every_action_of_the_console_and_who_may_use_it(
    people: dict[str, Any], exact_rules: ExactRules
) -> None:
    askers, buttons = find_admin_actions(), find_buttons()
    on_page: dict[str, str] = {}
    for actions, needs, allowed in read_table("Actions of the console"):
        pairs = parse_needs(needs)
        by_role: dict[str, bool] = {}
        for action in actions.split("<br>"):
            on_page[action] = needs
            if ask := askers.get(action):
                by_role = {who: bool(ask(request)) for who, request in people.items()}
                alternatives = [[pair] for pair in pairs] if needs.startswith("one of") else [pairs]
                prove_needs(action, alternatives, exact_rules, ask)
            else:
                by_role = {who: all(has_right(request, *pair) for pair in pairs) for who, request in people.items()}
            assert by_role.pop("superuser"), action
            assert allowed == format_names(by_role), f"{action}: {format_names(by_role)}"
    assert sorted(on_page) == sorted([*askers, *buttons])


def has_right(request: Any, rule: str, permission: str) -> bool:
    """Return whether the permission layer gives the request's user this right."""
    if permission and not rule:
        return bool(request.user.has_perm(permission))
    if rule and not permission:
        caller = roles.get_caller(request)
        return bool(caller and policy.is_allowed(caller, rule))
    return roles.has_right(request, rule, permission) and not roles.explain_refusal(request, rule, permission)


def prove_needs(action: str, alternatives: list[list[tuple[str, str]]], exact_rules: ExactRules, ask: Ask) -> None:
    """Fail unless the rules, or the permissions, of each alternative let a person do what `ask` asks for, and a person
    who lacks one right of each alternative may not do it, whatever else the person has."""
    for pairs in alternatives:
        if all(rule for rule, _ in pairs):
            with exact_rules(rule for rule, _ in pairs):
                assert ask(make_request(make_person())), f"{action}: the rules are not sufficient"
        if all(permission for _, permission in pairs):
            with exact_rules([]):
                assert ask(make_request(make_person(*(permission for _, permission in pairs)))), (
                    f"{action}: needs other permissions"
                )
    for lacking in product(*alternatives):
        with exact_rules(ALL_RULES - {rule for rule, _ in lacking}):
            others = load_permissions().keys() - {permission for _, permission in lacking}
            assert not ask(make_request(make_person(*others))), f"{action}: does not need {lacking}"


@pytest.mark.slow
def test_every_button_asks_for_exactly_what_the_page_says_and_a_refused_one_writes_nothing(
    client: Client, exact_rules: ExactRules, short_refusals: None
) -> None:
    ruth = User.objects.create(username="ruth", is_staff=True)
    world, every = World(ruth), load_permissions()
    views = {name for name in every if ".view_" in name}
    needs_by_action = {one: row[1] for row in read_table("Actions of the console") for one in row[0].split("<br>")}
    proven: set[str] = set()
    for action, (_, press) in find_buttons().items():
        needs = needs_by_action[action]
        pairs = parse_needs(needs)
        given = {permission for _, permission in pairs} - {""}
        cases = [(ALL_RULES - {rule}, set(every) - {permission}, False) for rule, permission in pairs]
        first_of_row = needs not in proven
        proven.add(needs)
        if first_of_row and all(rule for rule, _ in pairs):
            cases.append(({rule for rule, _ in pairs}, views, True))
        if first_of_row and all(permission for _, permission in pairs):
            cases.append((set(), views | given, True))
        for granted_rules, granted, expected in cases:
            with transaction.atomic(), exact_rules(granted_rules):
                url, fields = press(world)
                ruth.user_permissions.set([every[name] for name in granted])
                client.force_login(ruth)
                if expected:
                    answer = client.post(url, fields)
                else:
                    with nothing_written(action):
                        answer = client.post(url, fields)
                transaction.set_rollback(True)
            assert (answer.status_code != 403) is expected, (
                action,
                granted_rules,
                given,
                answer.content.decode()[-3000:],
            )
