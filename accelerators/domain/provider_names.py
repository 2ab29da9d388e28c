"""Decide whether a host may use a name for a new resource provider. Pure: it reads and writes nothing.

Providers of all hosts share one namespace in Placement, and a provider's id is computed from its name. So a name begins
with the host's node and `_`; otherwise a host could take a name that another host will need. Only the nodes of hosts
that exist are known: `cmp1` can take names that begin with `cmp1_2_` until the node `cmp1_2` exists. Those names stay
with `cmp1`, and `cmp1_2` gets a fault for each of its devices with such a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection

SEPARATOR = "_"
_UNUSUAL_CHARACTER = re.compile(r"[^a-zA-Z0-9_-]")
"""The fake driver replaces these characters of the node by `_`, as upstream's does."""


def describe_wrong_name(name: str, node: str, other_nodes: Collection[str]) -> str:
    """Return why a host with this node may not use a name that no host has used; '' if it may.

    `other_nodes` are the nodes of other hosts that the beginning of such a name could be confused with: those that
    begin with this node and `_`, and one that is equal to this node in the fake driver's spelling. The longest node
    with which the name begins decides: `cmp1_2_0000:01:00.0` belongs to the node `cmp1_2`, not to `cmp1`.
    """
    prefix, rest = name[: len(node)], name[len(node) :]
    is_own = prefix == node or (prefix == _UNUSUAL_CHARACTER.sub(SEPARATOR, node) and prefix not in other_nodes)
    if not is_own or not rest.startswith(SEPARATOR) or rest == SEPARATOR:
        return f"it must begin with the node name of its host, {node}, and {SEPARATOR}"
    if other_nodes:
        for found in re.finditer(SEPARATOR, name[len(node) + 1 :]):
            longer = name[: len(node) + 1 + found.start()]
            if longer in other_nodes:
                return f"names that begin with {longer}{SEPARATOR} belong to the host with the node name {longer}"
    return ""
