"""The base class of the exceptions of `cyborgweb`. This module is free of Django, because the command line imports it.

All exceptions of this package, each with the module that defines it:

    CyborgwebError                      cyborgweb.errors
      CliError                          cyborgweb.cli.exit_codes
      KeystoneUnavailableError          cyborgweb.auth.authentication
      LoginThrottledError               cyborgweb.auth.login_throttle
      ListingNotAllowedError            cyborgweb.auth.keystone
      PolicyDeniedError                 cyborgweb.auth.policy
      PolicyFileError                   cyborgweb.auth.policy
      ReadOnlyError                     cyborgweb.auth.read_only
      TokenCheckUnavailableError        cyborgweb.auth.token_cache
        NoAnswerAboutOneError           cyborgweb.auth.keystone
      CensusBusyError                   cyborgweb.telemetry.census
      ClientDisconnectedError           cyborgweb.http.refusals
      RefusedRequestError               cyborgweb.http.refusals
      DecryptionError                   cyborgweb.notify.keyring
      MailServerError                   cyborgweb.notify.mail
      WebhookUrlError                   cyborgweb.notify.webhook
      BackupError                       cyborgweb.server.backup
      StartError                        cyborgweb.server.supervisor
      MailAddressError                  cyborgweb.settings.mail_address
      PostgresError                     cyborgweb.database.postgres
"""

from __future__ import annotations


class CyborgwebError(Exception):
    """Base class of all exceptions of `cyborgweb`."""
