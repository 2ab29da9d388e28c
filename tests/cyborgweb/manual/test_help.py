"""Test the manual under `/help/` and as files: who may read it, its links, its search, and the described fields."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from cyborgweb.manual import contents, fields, pages, places, site
from cyborgweb.middleware.headers import build_content_policy

PAGE_NAMES = [entry.name for entry in contents.load_entries()]


@pytest.fixture
def reader(client: Client, db: None) -> Client:
    """Return the client of a user who may enter the console and has no other permission."""
    client.force_login(User.objects.create(username="rita", is_staff=True))
    return client


class LinkCollector(HTMLParser):
    """Collects the links of a page, and the anchors that links may point to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.links |= {str(said[name]) for name in ("href", "src") if said.get(name)}
        self.anchors |= {str(said["id"])} if said.get("id") else set()


def test_anonymous_readers_are_redirected_to_the_login(client: Client, db: None) -> None:
    for address in ("/help/", "/help/words/", "/help/search/?q=drain", "/help/images/console.png"):
        answered = client.get(address)
        assert answered.status_code == 302
        assert answered.headers["Location"].startswith(reverse("admin:login"))


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_a_page_has_the_strict_policy_and_is_marked_in_the_contents(reader: Client, name: str) -> None:
    answered = reader.get(site.SERVED_EDITION.page_url(name))
    text = answered.content.decode()
    assert answered.status_code == 200
    assert answered.headers["Content-Security-Policy"] == build_content_policy()
    assert text.count('aria-current="page"') == text.count("<h1") == 1
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", text)


@pytest.mark.slow
def test_every_link_of_every_page_has_an_existing_target_and_anchor(reader: Client) -> None:
    found = {site.SERVED_EDITION.page_url(name): LinkCollector(site.complete_page(name)) for name in PAGE_NAMES}
    checked: set[str] = set()
    for url, here in found.items():
        for link in here.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("/static/"):
                continue
            path = parts.path or url
            if path not in found and path not in checked:
                assert reader.get(path).status_code in (200, 302), f"{url} → {link}"
                checked.add(path)
            assert not parts.fragment or parts.fragment in found[path].anchors, f"{url} → {link}"


@pytest.mark.slow
def test_the_manual_written_as_files_links_only_to_its_own_files(tmp_path: Path) -> None:
    call_command("manual", tmp_path / "manual", verbosity=0)
    written = sorted((tmp_path / "manual").rglob("*.html"))
    assert len(written) == len(PAGE_NAMES) + 1
    found = {path.resolve(): LinkCollector(path.read_text()) for path in written}
    for path, here in found.items():
        for link in here.links:
            parts = urlsplit(link)
            assert not link.startswith("/"), f"{path.name}: {link} needs a server"
            if parts.scheme:
                continue
            target = (path.parent / parts.path).resolve() if parts.path else path
            assert target.exists(), f"{path.name} → {link}"
            assert not parts.fragment or parts.fragment in found[target].anchors, f"{path.name} → {link}"
    index = (tmp_path / "manual" / "assets" / "index.js").read_text()
    assert "quarantine" in index


@pytest.mark.slow
def test_search_finds_sections_with_all_words_and_ranks_headings_first(reader: Client) -> None:
    hits = site.search_sections("join TOKEN")
    assert [hit.url for hit in hits[:3]].count("/help/first-day/#join-a-host") == 1
    shown = reader.get("/help/search/", {"q": "join TOKEN"}).content.decode()
    assert html.escape(hits[0].url) in shown
    assert "No section has all of" in reader.get("/help/search/", {"q": "xyzzy"}).content.decode()
    assert "<script>alert" not in reader.get("/help/search/", {"q": "<script>alert(1)</script>"}).content.decode()


@pytest.mark.parametrize(
    "address", ["/help/nowhere/", "/help/../settings/", "/help/contents.toml", "/help/images/x.png"]
)
def test_addresses_outside_the_manual_are_answered_404(reader: Client, address: str) -> None:
    assert reader.get(address).status_code == 404


def test_html_and_script_links_in_a_page_are_neutralised() -> None:
    page = pages.render_page(
        "x", "# A\n\n<script>alert(1)</script> a<br>b [l](javascript:alert(1))", site.SERVED_EDITION.docs_url
    )
    assert "<script" not in page.html
    assert "a<br>b" in page.html
    assert 'href="javascript' not in page.html


def test_a_mermaid_block_is_shown_as_its_drawing_named_after_the_heading(reader: Client) -> None:
    shown = reader.get("/help/request-flows/").content.decode()
    drawing = (contents.DOCS_FOLDER / "images/request-flows-boot.svg").read_text().removeprefix("<svg ")
    assert f'<svg role="img" aria-label="Boot" {drawing.strip()}</div>' in shown
    assert "sequenceDiagram" not in shown


@pytest.mark.slow
def test_the_help_link_of_each_list_leads_to_its_section(client: Client, db: None) -> None:
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    for _, one in fields.iterate_lists():
        name = f"{one.opts.app_label}_{one.opts.model_name}"
        if name == "placement_sync_writer":
            continue  # a page for one row, without a list
        shown = client.get(reverse(f"admin:{name}_changelist"), follow=True).content.decode()
        assert (
            f'href="{site.SERVED_EDITION.docs_url(places.PLACE_BY_URL_NAME.get(name, places.DEFAULT_PLACE))}"' in shown
        ), name
    for place in {*places.PLACE_BY_URL_NAME.values(), places.DEFAULT_PLACE}:
        path, _, anchor = place.partition("#")
        sections = site.render_body(path.removesuffix(".md"), site.SERVED_EDITION).sections
        assert not anchor or anchor in [section.anchor for section in sections], place


def test_every_field_of_the_console_is_described() -> None:
    silent = [
        f"{one.opts.model_name}.{name}"
        for _, one in fields.iterate_lists()
        for name, _, said in fields.iterate_console_fields(one)
        if not said
    ]
    assert not silent, "say in docs/fields.toml, or as the model's help text, what they are"
    assert "| Freshness | Whether its agent is heard" in fields.render_fields_page()


def test_a_form_shows_the_description_of_the_manual(client: Client, db: None) -> None:
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    form = client.get(reverse("admin:accelerators_admissionrule_add")).content.decode()
    assert fields.field_sentence("admissionrule", "type") in html.unescape(form)


@pytest.mark.slow
def test_every_field_of_the_api_is_described() -> None:
    from cyborgweb.api import openapi

    silent = [
        f"{name}.{field}"
        for name, schema in openapi.generate_document()["components"]["schemas"].items()
        for field, said in schema.get("properties", {}).items()
        if said.keys().isdisjoint({"$ref", "description"})
    ]
    assert not silent, "say in docs/fields.toml, or as the serializer's help text, what they are"
