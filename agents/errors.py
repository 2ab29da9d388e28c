"""The base class of the exceptions of `agents`. This module is free of Django, because compute hosts import it.

All exceptions of this package, each with the module that defines it:

    AgentsError                         agents.errors
      MalformedMessageError             agents.wire
      AnnouncementError                 agents.certificates
      ConnectionRejectedError           agents.authentication
      SessionClosedError                agents.gateway.sessions
      TooManyCensusesError              agents.gateway.sample_cache
      GatewayUnreachableError           agents.gateway.sample_rpc
      HttpStatusError                   agents.host.connection.http
      ConnectionLostError               agents.host.connection.session
      SessionRefusedError               agents.host.connection.session
      JournalCorruptError               agents.host.journal.journal
      WrongHostError                    agents.host.journal.journal
      PlanFailedError                   agents.host.execution.plan_runner
"""

from __future__ import annotations


class AgentsError(Exception):
    """Base class of all exceptions of `agents`."""
