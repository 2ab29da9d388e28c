"""Render JSON as HTML: coloured text with links to our own addresses, and the rows of a list as a table.

All input is escaped. Only addresses below the caller's own base become links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import orjson
from django.utils.html import conditional_escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from accelerators.domain.choices import Tone
from accelerators.domain.states import AgentState, CommandState, DeviceState, Health, RequestState
from accelerators.ui import badges

MAX_COLUMNS = 8
"""The maximum number of table columns. The JSON below the table has all fields."""
MAX_CELL_CHARS = 80
TONE_BY_WORD: dict[str, Tone] = {
    **{
        state: state.tone
        for states in (AgentState, DeviceState, CommandState, Health, RequestState)
        for state in states
    },
    **{"enabled": "good", "maintaining": "busy", "ACTIVE": "good", "ERROR": "bad", "gone": "warn"},
}
OMITTED_KEYS = ("uuid", "url", "links", "created_at", "updated_at")
NAME_KEYS = ("name", "model", "address", "request", "uuid")
"""Keys that represent an object in a table cell; the first one that the object has is shown."""
SHORTENED_KEYS = ("instance", "subject", "project", "project_id", "boot_id", "public_key")
"""Keys whose values are shortened to their beginning; keys that end in `uuid` are shortened as well."""

PCI_KEYS = {"domain", "bus", "device", "function"}
_TOKEN = re.compile(r'("(?:\\.|[^"\\])*")(\s*:)?|\b(?:true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?')


def render_json(data: Any, base: str) -> SafeString:
    """Return `data` as indented, escaped HTML, with keys and values coloured and addresses below `base` as links."""
    text = orjson.dumps(data, default=str, option=orjson.OPT_INDENT_2).decode()
    pieces, end = [], 0
    for match in _TOKEN.finditer(text):
        pieces += [conditional_escape(text[end : match.start()]), _render_token(match, base)]
        end = match.end()
    # Every piece was escaped on its own.
    return mark_safe("".join((*pieces, conditional_escape(text[end:]))))


def _render_token(match: re.Match[str], base: str) -> SafeString:
    """Render a key, a text or another value of JSON as coloured HTML; a text that is an address below `base` is a
    link."""
    string, colon = match[1], match[2]
    if string is None:
        return format_html('<span class="value">{}</span>', match[0])
    if colon is not None:
        return format_html('<span class="key">{}</span>{}', string, colon)
    address = orjson.loads(string)
    if address.startswith(f"{base}/"):
        return format_html('<span class="text">"<a href="{}">{}</a>"</span>', address, address)
    return format_html('<span class="text">{}</span>', string)


class HtmlTable(NamedTuple):
    """A list, prepared for an HTML table: the headings of its columns, and its rows."""

    columns: list[str]
    rows: list[tuple[str, str, list[SafeString | str]]]
    """For each row: its address, the text of the link, its cells."""


def build_table(rows: list[Any], base: str) -> HtmlTable | None:
    """Build a table from the rows of a list; return None if there are no rows or one of them is no object.

    The columns are the first MAX_COLUMNS keys of the first row, without its title and OMITTED_KEYS.
    """
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        return None
    columns = [key for key in rows[0] if key not in OMITTED_KEYS and key != _find_title_key(rows[0])][:MAX_COLUMNS]
    table_rows = [
        (_find_address(row, base), _build_title(row), [_render_cell(key, row.get(key), base) for key in columns])
        for row in rows
    ]
    return HtmlTable([column.replace("_", " ") for column in columns], table_rows)


def _find_title_key(row: Mapping[str, Any]) -> str:
    """Return the key of the value that names a row: `name` if it is text, else `uuid` if the row has one, else `id`."""
    return "name" if isinstance(row.get("name"), str) else "id" if "uuid" not in row else "uuid"


def _build_title(row: Mapping[str, Any]) -> str:
    """Return the text that names a row: the first eight characters of its uuid, or MAX_CELL_CHARS of its name or id.

    An empty name becomes a dash.
    """
    title = str(row.get(_find_title_key(row), ""))
    return title[:8] if title == row.get("uuid") else title[:MAX_CELL_CHARS] or "–"


def _find_address(row: Mapping[str, Any], base: str) -> str:
    """Return the address of a row or object: `url` in our own API, the `self` link in v2; '' if it has none below
    `base`."""
    links = row.get("links")
    self_links = [link.get("href") for link in links if link.get("rel") == "self"] if isinstance(links, list) else []
    address = str(row.get("url") or (self_links[0] if self_links else ""))
    return address if address.startswith(f"{base}/") else ""


def _render_cell(key: str, value: Any, base: str) -> SafeString | str:
    """Render a value of a row for a table cell: a dash if it is empty, the first four elements of a list, yes or no for
    a boolean, anything else as `_render_object` or `_render_text` does."""
    if value is None or value in ("", [], {}):
        return badges.DASH
    if isinstance(value, Mapping):
        return _render_object(value, base)
    if isinstance(value, list):
        items = [
            (_render_object(one, base) if isinstance(one, Mapping) else str(one)[:MAX_CELL_CHARS],) for one in value[:4]
        ]
        return format_html_join(", ", "{}", items)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _render_text(key, str(value), base)


def _render_text(key: str, value: str, base: str) -> SafeString | str:
    """Render a text as its key and form suggest: a state as a badge, an address below `base` as a link, a time, a uuid.

    Any other text is cut at MAX_CELL_CHARS.
    """
    if key in ("state", "status"):
        return badges.render_badge(value, TONE_BY_WORD.get(value, "calm"))
    if value.startswith(f"{base}/"):
        return format_html('<a class="mono" href="{}">{}</a>', value, value.rstrip("/").rpartition("/")[2][:8])
    if moment := _parse_time(key, value):
        return badges.render_relative_time(moment)
    return badges.render_short_uuid(value) if key in SHORTENED_KEYS or key.endswith("uuid") else value[:MAX_CELL_CHARS]


def _render_object(value: Mapping[str, Any], base: str) -> SafeString | str:
    """Render an object in a table cell: a PCI address, else its name with a link and its state.

    An object without any of NAME_KEYS is shown by its plain values, or by its keys if it has none.
    """
    key = next((key for key in NAME_KEYS if value.get(key)), "")
    if set(value) >= PCI_KEYS:
        return badges.render_identifier(badges.describe_handle(orjson.dumps(value).decode()))
    if not key:
        pairs = ", ".join(f"{key}={one}" for key, one in value.items() if not isinstance(one, Mapping | list))
        return (pairs or ", ".join(value))[:MAX_CELL_CHARS]
    name = badges.render_short_uuid(value[key]) if key in ("request", "uuid") else str(value[key])[:MAX_CELL_CHARS]
    address = _find_address(value, base)
    label = format_html('<a href="{}">{}</a>', address, name) if address else name
    return badges.join_badges(label, _render_text("state", str(value["state"]), base)) if value.get("state") else label


def _parse_time(key: str, value: str) -> datetime | None:
    """Return the value as a time if the key names a time and the value has an offset from UTC, otherwise None."""
    if not key.endswith(("at", "since", "deadline")):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
