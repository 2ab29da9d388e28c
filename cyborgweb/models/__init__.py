"""Tables of the console and of access: API tokens, users of Keystone, saved views, the read-only switch, subscriptions
and deliveries."""

from cyborgweb.models.identity import ApiToken, KeystoneUser, Maintenance, SavedView, hash_token
from cyborgweb.models.notify import ConfirmationRequest, Delivery, MailServer, Reader, SlowProject, Subscription

__all__ = [
    "ApiToken",
    "ConfirmationRequest",
    "Delivery",
    "KeystoneUser",
    "MailServer",
    "Maintenance",
    "Reader",
    "SavedView",
    "SlowProject",
    "Subscription",
    "hash_token",
]
