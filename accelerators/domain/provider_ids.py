"""Which resource provider a deployable is. Pure; used when a device leaves `inactive`, and by what tells Placement."""

from __future__ import annotations

from uuid import NAMESPACE_DNS, UUID, uuid3


def provider_uuid(name: str) -> UUID:
    """The id a provider of this name has in every installation, upstream's included (contract section 6.2)."""
    return uuid3(NAMESPACE_DNS, name)
