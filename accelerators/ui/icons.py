"""Icons for the types of devices, as inline SVG."""

from __future__ import annotations

from django.utils.html import format_html
from django.utils.safestring import SafeString

DEVICE_ICONS = {
    "GPU": "M3 9h30v18H3zM6 27v4M10 27v4M14 27v4M18 27v4M12 12.5a5.5 5.5 0 1 0 .01 0M24 12.5a5.5 5.5 0 1 0 .01 0"
    "M12 16.5a1.5 1.5 0 1 0 .01 0M24 16.5a1.5 1.5 0 1 0 .01 0",
    "FPGA": "M8 8h20v20H8zM13 3v5M18 3v5M23 3v5M13 28v5M18 28v5M23 28v5M3 13h5M3 18h5M3 23h5M28 13h5M28 18h5M28 23h5"
    "M12 12h5v5h-5zM19 12h5v5h-5zM12 19h5v5h-5zM19 19h5v5h-5z",
    "NIC": "M3 7h30v19H3zM7 26v4M11 26v4M15 26v4M7 21v-7h2v-2h4v2h2v7zM21 21v-7h2v-2h4v2h2v7z",
    "QAT": "M8 16h20v15H8zM12 16v-4a6 6 0 0 1 12 0v4M18 21a2 2 0 1 0 .01 0M18 25v3",
    "SSD": "M5 11h28v4a3 3 0 0 0 0 6v4H5v-4H3v-3h2v-1H3v-3h2zM9 14h6v8H9zM18 14h8v8h-8zM20 17h4M20 19h4",
    "AICHIP": "M8 8h20v20H8zM13 3v5M18 3v5M23 3v5M13 28v5M18 28v5M23 28v5M3 13h5M3 18h5M3 23h5M28 13h5M28 18h5M28 23h5"
    "M13 13l5 5 5-5M13 23l5-5 5 5M18 16.5a1.5 1.5 0 1 0 .01 0",
    "": "M3 9h30v17H3zM6 26v5M10 26v5M14 26v5M18 26v5M22 26v5",
}
"""SVG path of the icon for each type of device, 36 units wide and high; '' is the icon of all other types."""


def get_icon_path(device_type: str) -> str:
    """Return the SVG path of the icon for a type of device, 36 units wide and high."""
    return DEVICE_ICONS.get(device_type, DEVICE_ICONS[""])


def render_type_icon(device_type: str) -> SafeString:
    """Render the icon for a type of device; the type is its accessible name, and is shown on hover."""
    return format_html(
        '<svg class="kind" role="img" aria-label="{0}" viewBox="0 0 36 36"><title>{0}</title><path d="{1}"/></svg>',
        device_type,
        get_icon_path(device_type),
    )
