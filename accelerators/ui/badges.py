"""Render states, times, identifiers and changes as HTML for console pages.

A state is shown as a word with a tone and a glyph; a time as relative text, with the exact time on hover. Tones are
colours in `console.css`. The glyph repeats the tone for readers who cannot see colours, and the word repeats it for
readers who see neither colours nor glyphs.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

GLYPHS = {"good": "●", "busy": "◐", "calm": "○", "warn": "▲", "bad": "✕"}
NOTHING = SafeString('<span class="faint">–</span>')

STATES = {
    "inactive": "calm",
    "installing": "busy",
    "ready": "good",
    "maintenance": "busy",
    "failed": "bad",
    "quarantined": "warn",
    "missing": "warn",
    "retired": "calm",
}
HEALTH = {"ok": "good", "degraded": "warn", "failed": "bad", "unknown": "calm"}
COMMAND_STATES = {
    "preparing": "busy",
    "queued": "calm",
    "taken": "busy",
    "started": "busy",
    "succeeded": "good",
    "failed": "bad",
    "refused": "warn",
    "expired": "warn",
    "unknown": "bad",
}
REQUEST_STATES = {"Initial": "calm", "BindStarted": "busy", "Bound": "good", "BindFailed": "bad", "Unbound": "calm"}
ACTIONS = {
    "found": "good",
    "installing": "busy",
    "ready": "good",
    "drained": "good",
    "draining": "busy",
    "maintenance": "busy",
    "quarantined": "warn",
    "back": "good",
    "live": "good",
    "recovered": "good",
    "added": "good",
    "changed": "busy",
    "missing": "warn",
    "stale": "warn",
    "appeared": "warn",
    "mended": "good",
    "failed": "bad",
    "refused": "bad",
    "ordered": "busy",
    "succeeded": "good",
    "expired": "warn",
    "unknown": "bad",
}
"""Tone of an event by the verb of its action (`found` of `device.found`). Verbs that are not listed are calm."""

SINCE = "state_since"
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def mark(word: str, tone: str, why: str = "") -> SafeString:
    """Render a word with a tone and the tone's glyph; `why` is shown on hover."""
    title = format_html(' title="{}"', why) if why else ""
    return format_html(
        '<span class="mark {}"{}><span aria-hidden="true">{}</span>{}</span>', tone, title, GLYPHS[tone], word
    )


def marks(*shown: SafeString | str) -> SafeString:
    """Render several badges beside each other; empty ones are left out."""
    return format_html('<span class="marks">{}</span>', format_html_join("", "{}", ((one,) for one in shown if one)))


def state(word: str, why: str = "") -> SafeString:
    """Render a device's state as a badge; `why` is shown on hover."""
    return mark(word, STATES[word], why)


def health(word: str, why: str = "") -> SafeString:
    """Render a device's health, as its driver reports it, as a badge; `why` is shown on hover."""
    return mark(word, HEALTH[word], why)


def stale(why: str) -> SafeString | str:
    """Render a badge for data that may be out of date, with the reason on hover; '' if `why` is empty."""
    return mark("stale", "warn", why) if why else ""


def draining(to: str | None, left: int | None = None) -> SafeString | str:
    """Render a badge for a device that waits for its last request to end; '' if `to`, the state it then gets, is None.

    `left` is the number of requests that still hold the device; it is shown if it is known.
    """
    if not to:
        return ""
    count = "" if left is None else f": {left} request{'' if left == 1 else 's'} left"
    return mark(f"draining{count}", "busy", f"It becomes {to} when its last request ends.")


def progress(percent: int, text: str = "") -> SafeString:
    """Render a progress bar with the percentage and the text of the current step; needs no scripts or inline styles."""
    bar = '<span class="progress"><progress max="100" value="{0}">{0} %</progress> {0} %</span>'
    said = format_html('<span class="faint">{}</span>', text) if text else ""
    return format_html(bar + "{1}", percent, said)


def action(word: str) -> SafeString:
    """Render the action of an event as a badge; its tone comes from `ACTIONS`."""
    return mark(word, ACTIONS.get(word.rpartition(".")[2], "calm"))


def ago(moment: datetime | str | None, now: datetime | None = None) -> SafeString:
    """Render a time relative to `now`, as `3 min ago` or `in 3 min`, with the exact time in UTC on hover.

    Accepts ISO text as well, for times inside JSON. Renders a dash if there is no time.
    """
    if not moment:
        return NOTHING
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    exact = at.astimezone(UTC)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        exact.isoformat(),
        f"{exact:%Y-%m-%d %H:%M:%S} UTC",
        _relative(seconds),
    )


def lasted(since: datetime, until: datetime | None = None) -> str:
    """Return the time from `since` to `until` (default: now) as text.

    Durations below one second are in milliseconds, those below ten seconds have one decimal.
    """
    seconds = max(0.0, ((until or datetime.now(UTC)) - since).total_seconds())
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else _amount(seconds)


def _relative(seconds: float) -> str:
    amount = _amount(abs(seconds))
    if abs(seconds) < 1:
        return "now"
    return f"{amount} ago" if seconds > 0 else f"in {amount}"


def _amount(seconds: float) -> str:
    return next((f"{int(seconds // unit)} {name}" for unit, name in _UNITS if seconds >= unit), f"{int(seconds)} s")


def mono(text: Any) -> SafeString:
    """Render an identifier in a monospaced font, where 0 and O differ; a dash if it is empty."""
    return NOTHING if text in (None, "") else format_html('<span class="mono">{}</span>', text)


def short(text: Any) -> SafeString:
    """Render the first eight characters of a uuid, with the whole uuid on hover; a dash if it is empty.

    Eight characters are enough to tell the rows of a list apart.
    """
    return format_html('<span class="mono" title="{}">{}</span>', text, str(text)[:8]) if text else NOTHING


def link(model: str, key: Any, text: Any) -> SafeString:
    """Render a link to the page of an object of this app; `key` is its id, its uuid, or the name of a host."""
    return format_html('<a href="{}">{}</a>', page(model, key), text)


def page(model: str, key: Any) -> str:
    """Return the URL of an object's page; `key` as for `link`."""
    from django.contrib.admin.utils import quote

    return reverse(f"admin:accelerators_{model}_change", args=[quote(str(key))])


def handle(attach_info: str) -> str:
    """Return readable text for an attach handle's JSON: the mark of a mediated device, a device node, or a PCI address.

    Returns `attach_info` itself if it is none of these.
    """
    try:
        info = json.loads(attach_info)
        if named := info.get("vgpu_mark") or info.get("path"):
            return str(named)
        return f"{info['domain']}:{info['bus']}:{info['device']}.{info['function']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return attach_info


def before_after(fields: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return all changes of an event as (field, value before, value after)."""
    pairs = ((name, v if isinstance(v, list) and len(v) == 2 else (None, v)) for name, v in fields.items())
    return [(_field(name), _value(before), _value(after)) for name, (before, after) in pairs]


def changes(fields: dict[str, Any], most: int = 0) -> SafeString:
    """Render an event's changes as `field before → after`: at most `most` of them (0: all), and the number of the rest.

    A change of `state_since` is not listed; the duration of the former state is shown beside the change of `state`.
    """
    told = [(name, values) for name, values in fields.items() if name != SINCE]
    shown = told[: most or None]
    lasted = _lasted(fields)
    lines = format_html_join(
        "", "{}", ((_change(name, values, lasted if name == "state" else ""),) for name, values in shown)
    )
    more = f"and {len(told) - len(shown)} more" if len(told) > len(shown) else ""
    return format_html('<span class="changes">{}{}</span>', lines, more)


def _lasted(fields: dict[str, Any]) -> SafeString | str:
    before, after = fields.get(SINCE) or (None, None)
    if not before or not after:
        return ""
    seconds = (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds()
    exact = f"since {datetime.fromisoformat(before).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return format_html(' <span class="faint" title="{}">after {}</span>', exact, _amount(max(0.0, seconds)))


def _change(name: str, values: Any, lasted: SafeString | str = "") -> SafeString:
    before, after = values if isinstance(values, list) and len(values) == 2 else (None, values)
    return format_html(
        '<span class="change" title="{}"><span class="faint">{}</span> <del>{}</del> <span aria-label="became">→</span>'
        " <ins>{}</ins>{}</span>",
        f"{name}: {before} → {after}",
        _field(name),
        _value(before),
        _value(after),
        lasted,
    )


def _field(name: str) -> str:
    """Return a readable field name. For `handle {…}`, where the JSON is part of the name, show the handle instead."""
    kind, _, rest = name.partition(" ")
    if not rest:
        return name.replace("_", " ")
    return f"{kind} {handle(rest)}" if kind == "handle" else name


def _value(value: Any) -> str:
    return "none" if value in (None, "") else str(value)
