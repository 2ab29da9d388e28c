"""How much there is of each resource class: held, free, out of offer; as bars. Called by `overview`."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection
from django.utils.html import format_html
from django.utils.safestring import SafeString

MOST = 30
"""So many classes are shown, the largest first."""
CLASSES = """
SELECT coalesce(a.value, ''), sum(p.num_accelerators)::bigint, sum(coalesce(r.held, 0))::bigint,
  sum(CASE WHEN d.state = 'ready' AND p.missing_since IS NULL THEN 0
    ELSE greatest(p.num_accelerators - coalesce(r.held, 0), 0) END)::bigint
FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id AND d.state <> 'retired'
LEFT JOIN accelerators_attribute a ON a.deployable_id = p.id AND a.key = 'rc'
LEFT JOIN (SELECT deployable_id, count(*) AS held FROM accelerators_acceleratorrequest
  WHERE attach_handle_id IS NOT NULL GROUP BY 1) r ON r.deployable_id = p.id
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT %s
"""


@dataclass(frozen=True)
class Capacity:
    """Units of one resource class. `reserved` is free and not offered: Placement shows it as reserved."""

    name: str
    total: int
    held: int
    reserved: int

    @property
    def free(self) -> int:
        """What a request can get now."""
        return max(0, self.total - self.held - self.reserved)

    @property
    def bar(self) -> SafeString:
        """Held is full, free is light, out of offer is hatched; the numbers stand beside it."""
        whole = max(self.total, self.held + self.reserved, 1)
        held, free = 100 * self.held / whole, 100 * self.free / whole
        return format_html(
            '<svg class="capacity" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            '<rect class="reserved" width="100" height="10"/><rect class="free" width="{}" height="10"/>'
            '<rect class="held" width="{}" height="10"/></svg>',
            f"{held + free:.2f}",
            f"{held:.2f}",
        )


def classes() -> list[Capacity]:
    """One statement; devices that are retired do not count."""
    with connection.cursor() as cursor:
        cursor.execute(CLASSES, [MOST])
        return [Capacity(*row) for row in cursor.fetchall() if row[1]]
