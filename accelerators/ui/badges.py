"""How words look: a state is a word with a tone and a glyph, a moment is relative with the exact time on hover.

Called by every list and page of the console. Tones are colours in `console.css`; the glyph carries the same meaning
for who does not see colours, and the word for who sees neither.
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
"""Tone of an event by the verb of its action (`device.found`); a verb that is not here is calm."""

SINCE = "state_since"
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def mark(word: str, tone: str, why: str = "") -> SafeString:
    """A word with its tone and glyph; `why` shows on hover."""
    title = format_html(' title="{}"', why) if why else ""
    return format_html(
        '<span class="mark {}"{}><span aria-hidden="true">{}</span>{}</span>', tone, title, GLYPHS[tone], word
    )


def marks(*shown: SafeString | str) -> SafeString:
    """Several beside each other; empty ones are left out."""
    return format_html('<span class="marks">{}</span>', format_html_join("", "{}", ((one,) for one in shown if one)))


def state(word: str, why: str = "") -> SafeString:
    """A device's state."""
    return mark(word, STATES[word], why)


def health(word: str, why: str = "") -> SafeString:
    """What the hardware says of itself."""
    return mark(word, HEALTH[word], why)


def stale(why: str) -> SafeString | str:
    """Shown beside what may be out of date; nothing when there is no reason to think so."""
    return mark("stale", "warn", why) if why else ""


def draining(to: str | None, left: int | None = None) -> SafeString | str:
    """That a device waits for its last request, for how many if that is known, and what for; nothing for any other."""
    if not to:
        return ""
    count = "" if left is None else f": {left} request{'' if left == 1 else 's'} left"
    return mark(f"draining{count}", "busy", f"{to} when its last request is gone")


def progress(percent: int, text: str = "") -> SafeString:
    """How far something is, as a bar, and the step it is at; without scripts or styles of its own."""
    bar = '<span class="progress"><progress max="100" value="{0}">{0} %</progress> {0} %</span>'
    said = format_html('<span class="faint">{}</span>', text) if text else ""
    return format_html(bar + "{1}", percent, said)


def action(word: str) -> SafeString:
    """What an event is about."""
    return mark(word, ACTIONS.get(word.rpartition(".")[2], "calm"))


def ago(moment: datetime | str | None, now: datetime | None = None) -> SafeString:
    """`3 min ago`, exact on hover; what lies ahead is `in 3 min`. Takes ISO text as well, for times inside JSON."""
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
    """How long it took, or takes by now; below ten seconds with tenths, below one in milliseconds."""
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
    """An identifier, in a face where 0 and O differ."""
    return NOTHING if text in (None, "") else format_html('<span class="mono">{}</span>', text)


def short(text: Any) -> SafeString:
    """The beginning of a uuid, all of it on hover: enough to tell one from another in a list."""
    return format_html('<span class="mono" title="{}">{}</span>', text, str(text)[:8]) if text else NOTHING


def link(model: str, key: Any, text: Any) -> SafeString:
    """To the page of an object of this room; `key` is its id, its uuid or, of a host, its name."""
    return format_html('<a href="{}">{}</a>', page(model, key), text)


def page(model: str, key: Any) -> str:
    """Address of an object's page."""
    from django.contrib.admin.utils import quote

    return reverse(f"admin:accelerators_{model}_change", args=[quote(str(key))])


def handle(attach_info: str) -> str:
    """What an attach handle points at, readable: a mediated device's mark, a node, or a PCI address."""
    try:
        info = json.loads(attach_info)
        if named := info.get("vgpu_mark") or info.get("path"):
            return str(named)
        return f"{info['domain']}:{info['bus']}:{info['device']}.{info['function']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return attach_info


def before_after(fields: dict[str, Any]) -> list[tuple[str, str, str]]:
    """All of an event's changes: field, before, after."""
    pairs = ((name, v if isinstance(v, list) and len(v) == 2 else (None, v)) for name, v in fields.items())
    return [(_field(name), _value(before), _value(after)) for name, (before, after) in pairs]


def changes(fields: dict[str, Any], most: int = 0) -> SafeString:
    """An event's changes as `field before → after`; at most `most` of them, the rest is counted (0: all).

    Since when a state was, is told as how long it was.
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
    """Handles carry their JSON in the field's name."""
    kind, _, rest = name.partition(" ")
    if not rest:
        return name.replace("_", " ")
    return f"{kind} {handle(rest)}" if kind == "handle" else name


def _value(value: Any) -> str:
    return "none" if value in (None, "") else str(value)
