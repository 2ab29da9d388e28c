"""The base class of the exceptions of `placement_sync`. This module is free of Django, because compute hosts import it.

All exceptions of this package, each with the module that defines it:

    PlacementSyncError                  placement_sync.errors
      PlacementUnavailableError         placement_sync.client
      PlacementConflictError            placement_sync.client
      PlacementRejectedError            placement_sync.client
      WriterStoppedError                placement_sync.client
      ProviderMissingError              placement_sync.apply_writes
      _CredentialsError                 placement_sync.agent_writer
      NovaUnavailableError              placement_sync.nova.client
        NovaSilentError                 placement_sync.nova.client
        InvalidMarkerError              placement_sync.nova.client
        UntrustedEndpointError          placement_sync.nova.endpoints
      AgentWritesError                  placement_sync.jobs.providers
      NotBegunError                     placement_sync.jobs.providers
      RetryLaterError                   placement_sync.jobs.attachments
"""

from __future__ import annotations


class PlacementSyncError(Exception):
    """Base class of all exceptions of `placement_sync`."""
