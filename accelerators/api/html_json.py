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

from accelerators.ui import badges

COLUMNS = 8
"""The maximum number of table columns. The JSON below the table has all fields."""
MAX_CELL = 80
TONES = {**badges.STATES, **badges.COMMAND_STATES, **badges.HEALTH, **badges.REQUEST_STATES}
TONES |= {"up": "good", "late": "warn", "down": "bad", "enabled": "good", "maintaining": "busy"}
TONES |= {"ACTIVE": "good", "ERROR": "bad", "gone": "warn"}
LEFT_OUT = ("uuid", "url", "links", "created_at", "updated_at")
NAMING = ("name", "model", "address", "request", "uuid")
"""Keys that represent an object in a table cell; the first one that the object has is shown."""
SHORT = ("instance", "subject", "project", "project_id", "boot_id", "public_key")
"""Keys whose values are shortened to their beginning; keys that end in `uuid` are shortened as well."""

PCI = {"domain", "bus", "device", "function"}
_TOKEN = re.compile(r'("(?:\\.|[^"\\])*")(\s*:)?|\b(?:true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?')


def coloured(data: Any, base: str) -> SafeString:
    """Return `data` as indented, escaped HTML, with keys and values coloured and addresses below `base` as links."""
    text = orjson.dumps(data, default=str, option=orjson.OPT_INDENT_2).decode()
    pieces, end = [], 0
    for match in _TOKEN.finditer(text):
        pieces += [conditional_escape(text[end : match.start()]), _token(match, base)]
        end = match.end()
    # Every piece was escaped on its own.
    return mark_safe("".join((*pieces, conditional_escape(text[end:]))))


def _token(match: re.Match[str], base: str) -> SafeString:
    string, colon = match[1], match[2]
    if string is None:
        return format_html('<span class="value">{}</span>', match[0])
    if colon is not None:
        return format_html('<span class="key">{}</span>{}', string, colon)
    address = orjson.loads(string)
    if address.startswith(f"{base}/"):
        return format_html('<span class="text">"<a href="{}">{}</a>"</span>', address, address)
    return format_html('<span class="text">{}</span>', string)


class Table(NamedTuple):
    """A list, prepared for an HTML table."""

    columns: list[str]
    rows: list[tuple[str, str, list[SafeString | str]]]
    """For each row: its address, the text of the link, its cells."""


def table(rows: list[Any], base: str) -> Table | None:
    """Build a table from the rows of a list; return None if there are no rows or they are not objects."""
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        return None
    columns = [key for key in rows[0] if key not in LEFT_OUT and key != _titled(rows[0])][:COLUMNS]
    made = [(_address(row, base), _title(row), [_cell(key, row.get(key), base) for key in columns]) for row in rows]
    return Table([column.replace("_", " ") for column in columns], made)


def _titled(row: Mapping[str, Any]) -> str:
    return "name" if isinstance(row.get("name"), str) else "id" if "uuid" not in row else "uuid"


def _title(row: Mapping[str, Any]) -> str:
    found = str(row.get(_titled(row), ""))
    return found[:8] if found == row.get("uuid") else found[:MAX_CELL] or "–"


def _address(row: Mapping[str, Any], base: str) -> str:
    """Return the address of a row or object: `url` in our own API, the `self` link in v2; '' if it has none below
    `base`."""
    links = row.get("links")
    own = [link.get("href") for link in links if link.get("rel") == "self"] if isinstance(links, list) else []
    found = str(row.get("url") or (own[0] if own else ""))
    return found if found.startswith(f"{base}/") else ""


def _cell(key: str, value: Any, base: str) -> SafeString | str:
    if value is None or value in ("", [], {}):
        return badges.NOTHING
    if isinstance(value, Mapping):
        return _object(value, base)
    if isinstance(value, list):
        shown = [(_object(one, base) if isinstance(one, Mapping) else str(one)[:MAX_CELL],) for one in value[:4]]
        return format_html_join(", ", "{}", shown)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _text(key, str(value), base)


def _text(key: str, value: str, base: str) -> SafeString | str:
    if key in ("state", "status"):
        return badges.mark(value, TONES.get(value, "calm"))
    if value.startswith(f"{base}/"):
        return format_html('<a class="mono" href="{}">{}</a>', value, value.rstrip("/").rpartition("/")[2][:8])
    if moment := _moment(key, value):
        return badges.ago(moment)
    return badges.short(value) if key in SHORT or key.endswith("uuid") else value[:MAX_CELL]


def _object(value: Mapping[str, Any], base: str) -> SafeString | str:
    key = next((key for key in NAMING if value.get(key)), "")
    if set(value) >= PCI:
        return badges.mono(badges.handle(orjson.dumps(value).decode()))
    if not key:
        plain = ", ".join(f"{key}={one}" for key, one in value.items() if not isinstance(one, Mapping | list))
        return (plain or ", ".join(value))[:MAX_CELL]
    name = badges.short(value[key]) if key in ("request", "uuid") else str(value[key])[:MAX_CELL]
    address = _address(value, base)
    shown = format_html('<a href="{}">{}</a>', address, name) if address else name
    return badges.marks(shown, _text("state", str(value["state"]), base)) if value.get("state") else shown


def _moment(key: str, value: str) -> datetime | None:
    if not key.endswith(("at", "since", "deadline")):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
