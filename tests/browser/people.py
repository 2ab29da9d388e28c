"""The users of the sample: one in each group of docs/roles.md except the administrator's."""

from __future__ import annotations

TENANT_PROJECT = "p2"
PASSWORD = "a-password-of-the-sample"
PEOPLE = {
    "operator": "role:operator",
    "auditor": "role:auditor",
    "viewer": "role:viewer",
    "tenant": f"project:{TENANT_PROJECT}",
}
"""User name → group."""
