"""The formats of times and dates: as in the tooltips of relative times, such as `2026-11-28 10:06:43 UTC`."""

DATE_FORMAT = "Y-m-d"
TIME_FORMAT = "H:i:s e"
DATETIME_FORMAT = "Y-m-d H:i:s e"
