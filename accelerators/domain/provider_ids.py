"""The computed id of a deployable's resource provider. A recorded `rp_uuid` takes precedence over it."""

from __future__ import annotations

from functools import lru_cache
from uuid import NAMESPACE_DNS, UUID, uuid3


@lru_cache(maxsize=16_384)
def compute_provider_uuid(name: str) -> UUID:
    """Compute the id of the provider with this name (the deployable's name): uuid3 with NAMESPACE_DNS.

    Every installation, and upstream, computes the same id for a name (contract section 6.2).
    """
    return uuid3(NAMESPACE_DNS, name)
