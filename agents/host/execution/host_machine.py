"""The host as the checks right before each step read it: many devices are checked at once, and reads may hang."""

from __future__ import annotations

from drivers.isolation.threads import SharedWork
from drivers.machine import Machine, OpenNodes


class HostMachine(Machine):
    """A Machine of this host; those with the same `open_nodes_look` look at the processes of the host together.

    `open_nodes_look` runs `Machine.list_open_nodes`, which is the same for the machines of all drivers.
    """

    def __init__(self, node: str, open_nodes_look: SharedWork[OpenNodes], *, state_root: str) -> None:
        super().__init__(node, state_root=state_root)
        self._open_nodes_look = open_nodes_look

    def list_open_nodes(self) -> OpenNodes:
        """As `Machine.list_open_nodes`, by a look that begins after this call. Raises Timeout and Failed, too.

        No earlier look is used, because a program may have opened a node since.
        """
        return self._open_nodes_look.get_result()
