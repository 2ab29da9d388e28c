"""Render states, times, identifiers and changes as HTML for console pages.

A state is shown as a word with a tone and a glyph; a time as relative text, with the exact time on hover. Tones are
colours in `console.css`. The glyph repeats the tone for readers who cannot see colours, and the word repeats it for
readers who see neither colours nor glyphs.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from accelerators.domain.choices import Choice, Tone
from accelerators.domain.states import DeviceState, Health
from accelerators.runtime import database_clock

GLYPHS: dict[Tone, str] = {"good": "●", "busy": "◐", "calm": "○", "warn": "▲", "bad": "✕"}
DASH = SafeString('<span class="faint">–</span>')
"""The content of an empty cell of a table."""

ACTION_TONES: dict[str, Tone] = {
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

STATE_SINCE_FIELD = "state_since"
_TIME_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def render_badge(text: str, tone: Tone, tooltip: str = "") -> SafeString:
    """Render a word with a tone and the tone's glyph; `tooltip` is shown on hover. Both texts are escaped."""
    title_attribute = format_html(' title="{}"', tooltip) if tooltip else ""
    return format_html(
        '<span class="mark {}"{}><span aria-hidden="true">{}</span>{}</span>', tone, title_attribute, GLYPHS[tone], text
    )


def render_choice(choice: Choice, tooltip: str = "") -> SafeString:
    """Render the label of a member of an enumeration as a badge in its tone; `tooltip` is shown on hover."""
    return render_badge(choice.label, choice.tone, tooltip)


def join_badges(*badges: SafeString | str) -> SafeString:
    """Render several badges beside each other; empty ones are left out. Returns '' if all are empty."""
    shown = [(one,) for one in badges if one]
    return format_html('<span class="marks">{}</span>', format_html_join("", "{}", shown)) if shown else SafeString()


def render_device_state(device_state: str, tooltip: str = "") -> SafeString:
    """Render a device's state as a badge; `tooltip` is shown on hover. Raises ValueError for an unknown state."""
    return render_choice(DeviceState(device_state), tooltip)


def render_health(device_health: str, tooltip: str = "") -> SafeString:
    """Render a device's health, as its driver reports it, as a badge; `tooltip` is shown on hover.

    Raises ValueError for an unknown health.
    """
    return render_choice(Health(device_health), tooltip)


def render_stale_badge(reason: str) -> SafeString | str:
    """Render a badge for data that may be out of date, with the reason on hover; '' if `reason` is empty."""
    return render_badge("stale", "warn", reason) if reason else ""


def render_drain_badge(final_state: str | None, remaining: int | None = None) -> SafeString | str:
    """Render a badge for a device that waits for its last request to end; '' if `final_state` is None.

    `remaining` is the number of requests that still hold the device; it is shown if it is known.
    """
    if not final_state:
        return ""
    count = "" if remaining is None else f": {remaining} request{'' if remaining == 1 else 's'} left"
    return render_badge(f"draining{count}", "busy", f"It becomes {final_state} when its last request ends.")


def render_progress_bar(percent: int, text: str = "") -> SafeString:
    """Render a progress bar with `percent` (0 to 100) and the text of the current step.

    It needs no scripts or inline styles.
    """
    bar_template = '<span class="progress"><progress max="100" value="{0}">{0} %</progress> {0} %</span>'
    text_html = format_html('<span class="faint">{}</span>', text) if text else ""
    return format_html(bar_template + "{1}", percent, text_html)


def render_event_action(action_name: str) -> SafeString:
    """Render the action of an event as a badge; its tone comes from `ACTION_TONES`."""
    return render_badge(action_name, ACTION_TONES.get(action_name.rpartition(".")[2], "calm"))


def render_relative_time(moment: datetime | str | None, now: datetime | None = None) -> SafeString:
    """Render a time relative to `now`, as `3 min ago` or `in 3 min`, with the exact time in UTC on hover.

    `now` is the present time by default. Accepts ISO text as well, for times inside JSON. Renders a dash if `moment` is
    empty. A time without a time zone raises TypeError, text that is no time ValueError.
    """
    if not moment:
        return DASH
    time = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    seconds = ((now or database_clock.now()) - time).total_seconds()
    time_in_utc = time.astimezone(UTC)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        time_in_utc.isoformat(),
        f"{time_in_utc:%Y-%m-%d %H:%M:%S} UTC",
        _format_relative_time(seconds),
    )


def format_duration(since: datetime, until: datetime | None = None) -> str:
    """Return the time from `since` to `until` (default: now) as text, such as `1.2 s` or `3 min`; never negative.

    Durations below one second are in milliseconds, those below ten seconds have one decimal.
    """
    seconds = max(0.0, ((until or database_clock.now()) - since).total_seconds())
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else _format_seconds(seconds)


def _format_relative_time(seconds: float) -> str:
    """Return seconds before now as text: `3 min ago`, `in 3 min` if they are negative, `now` below one second."""
    amount = _format_seconds(abs(seconds))
    if abs(seconds) < 1:
        return "now"
    return f"{amount} ago" if seconds > 0 else f"in {amount}"


def _format_seconds(seconds: float) -> str:
    """Return a duration of at least 0 seconds in its largest unit (d, h, min, s), rounded down."""
    return next(
        (f"{int(seconds // unit)} {name}" for unit, name in _TIME_UNITS if seconds >= unit), f"{int(seconds)} s"
    )


def render_identifier(text: Any) -> SafeString:
    """Render an identifier in a monospaced font, where 0 and O differ; a dash if it is empty."""
    return DASH if text in (None, "") else format_html('<span class="mono">{}</span>', text)


def render_short_uuid(uuid: Any) -> SafeString:
    """Render the first eight characters of a uuid, with the whole uuid on hover; a dash if it is empty.

    Eight characters are enough to tell the rows of a list apart.
    """
    return format_html('<span class="mono" title="{}">{}</span>', uuid, str(uuid)[:8]) if uuid else DASH


def render_page_link(model: str, key: Any, text: Any) -> SafeString:
    """Render a link to the page of an object of this app; `key` is its id, its uuid, or the name of a host."""
    return format_html('<a href="{}">{}</a>', page_url(model, key), text)


def render_host_link(name: str | None) -> SafeString:
    """Render a link to the page of the host with this name; a dash if the name is empty."""
    return render_page_link("host", name, name) if name else DASH


def render_backend_link(host: Any, driver: str, name: str) -> SafeString:
    """Render a link to the page of the backend of this name, which belongs to the driver on the host."""
    return render_page_link("backend", f"{host.uuid}:{driver}:{name}", name)


def render_instance_link(instance: Any, *, is_whole: bool = False) -> SafeString:
    """Render the uuid of an instance, shortened unless `is_whole`, as a link to its requests; a dash if it is empty."""
    if not instance:
        return DASH
    text = render_identifier(instance) if is_whole else render_short_uuid(instance)
    return format_html('<a href="{}">{}</a>', request_list_url(instance), text)


def request_list_url(instance: Any) -> str:
    """Return the URL of the list of requests, searched for an instance; '' if `instance` is empty."""
    url = reverse("admin:accelerators_acceleratorrequest_changelist")
    return f"{url}?{urlencode({'q': str(instance)})}" if instance else ""


def page_url(model: str, key: Any) -> str:
    """Return the URL of the page of an object of this app; `key` is its id, its uuid, or the name of a host.

    Does not check whether the object exists. Raises NoReverseMatch if no model of this name has a page.
    """
    from django.contrib.admin.utils import quote

    return reverse(f"admin:accelerators_{model}_change", args=[quote(str(key))])


def describe_handle(attach_info: str) -> str:
    """Return readable text for an attach handle's JSON.

    That is the mark (`vgpu_mark`) of a mediated device, the path of a device node, or a PCI address. Returns
    `attach_info` itself if it is none of these.
    """
    try:
        info = json.loads(attach_info)
        if name := info.get("vgpu_mark") or info.get("path"):
            return str(name)
        return f"{info['domain']}:{info['bus']}:{info['device']}.{info['function']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return attach_info


def list_changes(fields: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return all changes of an event as (field, value before, value after); an empty value is the text "none".

    A value that is not a pair is taken as the new value.
    """
    pairs = ((name, v if isinstance(v, list) and len(v) == 2 else (None, v)) for name, v in fields.items())
    return [(_format_field_name(name), _format_value(before), _format_value(after)) for name, (before, after) in pairs]


def render_changes(fields: dict[str, Any], max_changes: int = 0) -> SafeString:
    """Render an event's changes as `field before → after`: at most `max_changes` of them, and the number of the others.

    If `max_changes` is 0, all are shown. A change of `state_since` is not listed; the duration of the former state is
    shown beside the change of `state`.
    """
    visible_changes = [(name, values) for name, values in fields.items() if name != STATE_SINCE_FIELD]
    shown_changes = visible_changes[: max_changes or None]
    former_duration = _render_former_duration(fields)
    lines = format_html_join(
        "",
        "{}",
        ((_render_change(name, values, former_duration if name == "state" else ""),) for name, values in shown_changes),
    )
    rest_text = (
        f"and {len(visible_changes) - len(shown_changes)} more" if len(visible_changes) > len(shown_changes) else ""
    )
    return format_html('<span class="changes">{}{}</span>', lines, rest_text)


def _render_former_duration(fields: dict[str, Any]) -> SafeString | str:
    """Render how long the former state lasted, from the change of `state_since`; '' if the event has no such change."""
    before, after = fields.get(STATE_SINCE_FIELD) or (None, None)
    if not before or not after:
        return ""
    seconds = (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds()
    exact = f"since {datetime.fromisoformat(before).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return format_html(' <span class="faint" title="{}">after {}</span>', exact, _format_seconds(max(0.0, seconds)))


def _render_change(name: str, values: Any, former_duration: SafeString | str = "") -> SafeString:
    """Render one change as `field before → after`, followed by `former_duration`.

    `values` is the pair of both values; anything else is the new value.
    """
    before, after = values if isinstance(values, list) and len(values) == 2 else (None, values)
    return format_html(
        '<span class="change" title="{}"><span class="faint">{}</span> <del>{}</del> <span aria-label="became">→</span>'
        " <ins>{}</ins>{}</span>",
        f"{name}: {before} → {after}",
        _format_field_name(name),
        _format_value(before),
        _format_value(after),
        former_duration,
    )


def _format_field_name(name: str) -> str:
    """Return a readable field name; in `handle {…}`, where JSON is part of the name, the handle replaces the JSON."""
    kind, _, rest = name.partition(" ")
    if not rest:
        return name.replace("_", " ")
    return f"{kind} {describe_handle(rest)}" if kind == "handle" else name


def _format_value(value: Any) -> str:
    """Return the value as text; "none" for None and ''."""
    return "none" if value in (None, "") else str(value)
