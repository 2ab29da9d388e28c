"""Test the HTML pages of /api/ and /v2: they show the answer and the forms that the caller may use."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.request import Request

from accelerators.api import browsable
from accelerators.api.own.views import CollectionView
from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest, Device
from cyborgweb.auth import read_only, roles
from tests.accelerators.api.own.conftest import Ask, Fill

pytestmark = pytest.mark.django_db

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def get_page(ask: Ask, path: str, by: str = "admin", status: int = 200) -> str:
    """Return the HTML of a page; check that it loads files from /static/ only."""
    response = ask(path, by, Accept=BROWSER)
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "text/html; charset=utf-8"
    text = response.content.decode()
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="([^"]+)"', text)
    assert loaded
    assert all(address.startswith("/static/") for address in loaded)
    return text


def list_forms(text: str) -> set[tuple[str, str]]:
    """Return the method and address of each form."""
    return set(re.findall(r'data-method="(\w+)" data-url="([^"]+)"', text))


@pytest.mark.slow
def test_every_collection_and_element_has_an_html_page(ask: Ask, fill: Fill) -> None:
    fill(3)
    for name in ("hosts", "agents", "devices", "deployables", "attach_handles", "accelerators", "requests", "events"):
        text = get_page(ask, f"/api/{name}/?limit=1")
        member = re.search(rf'<td class="tight mono"><a href="http://testserver(/api/{name}/[^"]+)"', text)
        assert member, name
        assert 'aria-current="page"' in get_page(ask, member[1])
    selects = re.findall(r'<select id="POST-(\w+)".*?</select>', get_page(ask, "/api/accelerators/"))
    assert {*selects} == {"dry_run", "store_draft"}, "no field loads rows to choose from"


def test_yes_or_no_and_one_of_fixed_values_are_chosen_from_a_list(ask: Ask) -> None:
    page = get_page(ask, "/api/bulk_actions/")
    lists = dict(re.findall(r'<select id="POST-(\w+)"([^>]*>.*?)</select>', page))
    assert {*lists} == {"action", "then", "dry_run", "store_draft"}
    options = '<option value=""></option><option value="true">yes</option><option value="false">no</option>'
    assert lists["dry_run"] == f' name="dry_run" data-kind="json">{options}'
    assert " required>" in lists["action"] and '<option value="partition">partition</option>' in lists["action"]
    path = json.loads(ask("/api/rules/", method="POST", data={"name": "gpus", "action": "ready"}).content)["url"]
    enabled = re.search(r'<select id="PATCH-enabled"([^>]*>.*?)</select>', get_page(ask, path))
    chosen = '<option value="true" selected>yes</option><option value="false">no</option>'
    assert enabled and enabled[1] == f' name="enabled" data-kind="json">{chosen}', "there is no empty choice"


def test_what_stands_in_backticks_in_a_description_is_shown_as_code(ask: Ask) -> None:
    described = re.search(r'<p class="about">(.*?)</p>', get_page(ask, "/api/requests/"), re.DOTALL)
    assert described and "<code>" in described[1] and "`" not in described[1]


def test_the_forms_that_change_and_delete_settings_send_the_generation_that_the_page_shows(ask: Ask) -> None:
    rule = {"name": "gpus", "action": "ready"}
    path = json.loads(ask("/api/rules/", method="POST", data=rule).content)["url"].removeprefix("http://testserver")
    ask(path, method="PATCH", data={"name": "cards", "generation": 1})
    page = get_page(ask, path)
    assert {("PATCH", path), ("DELETE", f"{path}?generation=2")} <= list_forms(page)
    field = re.search(r"<textarea [^>]*name=\"generation\"[^>]*>([^<]*)<", page)
    assert field and "data-always" in field[0] and field[1] == "2"
    assert page.count("data-always") == 1, "all other fields are sent only if they were edited"


def test_pages_offer_only_the_forms_that_the_caller_may_use(ask: Ask, fill: Fill) -> None:
    fill(1)
    uuid = AcceleratorRequest.objects.filter(project_id="p1").first().uuid
    assert list_forms(get_page(ask, "/api/profiles/")) == {("POST", "/api/profiles/")}
    assert list_forms(get_page(ask, "/api/profiles/", "reader")) == set()
    labelled = get_page(ask, f"/api/accelerators/{uuid}/", "member")
    assert list_forms(labelled) == {("PATCH", f"/api/accelerators/{uuid}/")}
    assert 'name="label" value="" maxlength="255"' in labelled
    assert "csrfmiddlewaretoken" in labelled


def read_refusals(text: str) -> dict[str, str]:
    """Return the actions that a page does not offer, each with the reason that the page gives."""
    _, _, part = text.partition("Why can’t I do more here?")
    return dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", part.partition("</section>")[0]))


def test_pages_say_which_role_the_actions_need_that_they_do_not_offer(ask: Ask, fill: Fill) -> None:
    fill(1)
    accelerator = AcceleratorRequest.objects.filter(project_id="p1").first()
    device = Device.objects.first()
    create = (
        "Access was denied to the following resource: cyborg:device_profile:create. The role admin would be sufficient."
    )
    assert read_refusals(get_page(ask, "/api/profiles/", "reader")) == {"Create": create}
    assert read_refusals(get_page(ask, "/api/profiles/")) == {}
    labelled = read_refusals(get_page(ask, f"/api/accelerators/{accelerator.uuid}/", "reader"))
    assert set(labelled) >= {"Change"} and all("would be sufficient." in reason for reason in labelled.values())
    decided = read_refusals(get_page(ask, f"/api/devices/{device.uuid}/", "manager"))
    assert "Enable" in decided and all("The role admin would be sufficient." in reason for reason in decided.values())


@pytest.mark.parametrize("by", ["admin", "reader"])
def test_a_page_checks_once_whether_the_caller_may_use_an_action(
    by: str, ask: Ask, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(1)
    uuid = AcceleratorRequest.objects.filter(project_id="p1").first().uuid
    checked: list[tuple[str, str]] = []
    explain = CollectionView.explain_refusal

    def explain_and_note(view: CollectionView[Any], request: Request, rule: str = "") -> str:
        checked.append((str(request.method), rule))
        return explain(view, request, rule)

    monkeypatch.setattr(CollectionView, "explain_refusal", explain_and_note)
    for path in ("/api/accelerators/", f"/api/accelerators/{uuid}/", "/api/profiles/"):
        checked.clear()
        get_page(ask, path, by)
        assert len(checked) == len(set(checked)) > 0, path


def test_pages_offer_no_action_while_everything_is_read_only_and_say_so(ask: Ask, fill: Fill) -> None:
    fill(1)
    path = f"/api/devices/{Device.objects.get().uuid}/"
    assert list_forms(get_page(ask, path))
    read_only.switch_read_only(True, Caller("olga", "1", frozenset(), ""), "the database moves", EventSource.PERSON)
    read_only._drop_cached(None)  # the notification after the commit
    text = get_page(ask, path)
    assert list_forms(text) == set()
    assert all("by olga: the database moves" in reason for reason in read_refusals(text).values())
    assert read_refusals(text)


def test_pages_without_a_token_link_to_the_login(client: Client, ask: Ask) -> None:
    text = get_page(ask, "/api/hosts/?limit=3", by="", status=401)
    assert "/admin/login/?next=%2Fapi%2Fhosts%2F%3Flimit%3D3" in text
    assert "cyborg:host:get_all" in get_page(ask, "/api/hosts/", "reader", 403)
    get_page(ask, "/api/nope", status=404)
    assert client.get("/api/", headers={"Accept": BROWSER}).status_code == 200


def test_stored_texts_are_escaped_on_pages(ask: Ask, fill: Fill) -> None:
    fill(1)
    uuid = AcceleratorRequest.objects.filter(project_id="p1").first().uuid
    label = '"><script>alert(1)</script>'
    assert ask(f"/api/accelerators/{uuid}/", method="PATCH", data={"label": label, "generation": 1}).status_code == 200
    for path in (f"/api/accelerators/{uuid}/", "/api/accelerators/", f"/api/events/?subject={uuid}"):
        text = get_page(ask, path)
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text


def test_empty_filter_fields_of_a_form_are_ignored(ask: Ask, fill: Fill) -> None:
    fill(12)
    text = get_page(ask, "/api/devices/?host=cmp1&state=&stale=&ordering=created")
    assert text.count('<td class="tight mono">') == 2


def test_v2_answers_browsers_with_pages_and_others_with_json(ask: Ask, fill: Fill) -> None:
    fill(1)
    text = get_page(ask, "/v2/devices")
    member = re.search(r'<td class="tight mono"><a href="http://testserver/accelerator(/v2/devices/[^"]+)"', text)
    assert member
    assert list_forms(get_page(ask, member[1])) == {("POST", f"{member[1]}/{act}") for act in ("enable", "disable")}
    assert list_forms(get_page(ask, "/v2/device_profiles")) == {("POST", "/v2/device_profiles")}
    get_page(ask, "/v2/nope", status=404)
    for public in ("/", "/v2", "/accelerator/v2/"):
        assert "Log in" in get_page(ask, public, by="")
    assert ask("/v2/devices", method="HEAD", Accept=BROWSER).content == b""
    assert "/admin/login/?next=%2Fv2%2Fdevices" in get_page(ask, "/v2/devices", by="", status=401)
    for accept, status in {
        "text/html": 406,
        "*/*": 200,
        "text/html,*/*": 200,
        "application/json,text/html": 200,
    }.items():
        response = ask("/v2/devices", Accept=accept)
        assert (response.status_code, response["Content-Type"]) == (status, "application/json")


def test_pages_of_v2_offer_what_the_caller_may_do_and_say_which_role_the_rest_needs(ask: Ask, fill: Fill) -> None:
    fill(1)
    path = f"/v2/devices/{Device.objects.get().uuid}"
    for address in (path, f"/accelerator{path}.json"):
        text = get_page(ask, address, "member")
        assert list_forms(text) == set()
        assert read_refusals(text) == {
            verb: f"Access was denied to the following resource: cyborg:device:{verb.lower()}."
            " The role admin would be sufficient."
            for verb in ("Enable", "Disable")
        }
        assert read_refusals(get_page(ask, address)) == {}
    assert list_forms(get_page(ask, "/v2/accelerator_requests", "member")) == {("POST", "/v2/accelerator_requests")}
    read_only.switch_read_only(True, Caller("olga", "1", frozenset(), ""), "the database moves", EventSource.PERSON)
    read_only._drop_cached(None)  # the notification after the commit
    text = get_page(ask, path)
    assert list_forms(text) == set() and "by olga: the database moves" in read_refusals(text)["Enable"]


def test_a_page_of_v2_that_may_not_be_opened_names_the_role_and_other_clients_get_upstreams_answer(
    client: Client, ask: Ask
) -> None:
    tenant = User.objects.create_user("tom", is_staff=True)
    tenant.groups.add(roles.get_group("project:p1"))
    client.force_login(tenant)
    denial = "Access was denied to the following resource: cyborg:device:get_all"
    page = get_page(ask, "/v2/devices", by="", status=403)
    assert f"<p>{denial}. The role auditor would be sufficient.</p>" in page
    fault = {"faultcode": "Client", "faultstring": denial, "debuginfo": None}
    assert json.loads(ask("/v2/devices", by="").content) == {"error_message": json.dumps(fault)}
    page = get_page(ask, "/v2/deployables/x/program", status=405)
    assert "The method GET is not allowed" in page and "<dt>Allow</dt><dd>GET</dd>" in page


def test_a_long_list_of_v2_is_cut_on_a_page_with_a_link_to_the_rest(
    ask: Ask, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsable, "MAX_ROWS", 4)
    fill(6)
    text = get_page(ask, "/v2/devices")
    assert text.count('<td class="tight mono">') == 4
    assert "2 more rows are not shown." in text
    rest = re.search(r'href="(/v2/devices\?limit=4&amp;marker=[^"]+)">Next 4', text)
    assert rest
    assert get_page(ask, rest[1].replace("&amp;", "&")).count('<td class="tight mono">') == 2


def test_the_api_documentation_page_loads_only_own_static_files(client: Client) -> None:
    text = client.get("/api/docs/").content.decode()
    assert 'data-schema="/api/schema/"' in text
    for address in re.findall(r'(?:src|href)="(/static/[^"]+)"', text):
        assert client.get(address).status_code == 200, address
