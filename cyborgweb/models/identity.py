"""Tables of identity: API tokens for installations without Keystone, and the mapping of Keystone's users to ours.

Also the saved views of the console's lists, and the read-only switch.
"""

from __future__ import annotations

import hashlib
import secrets

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now


class ApiToken(models.Model):
    """A local user's token for `X-Auth-Token`. Only its hash is stored.

    `roles` are names of Keystone roles: admin, member, service… The token is valid while its user is active; it does
    not expire.
    """

    name = models.CharField(max_length=255)
    token_hash = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="api_tokens")
    roles = ArrayField(models.CharField(max_length=64), default=list)
    project_id = models.CharField(max_length=64, default="", blank=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["name"]
        verbose_name = "API token"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def create_with_secret(cls, name: str, user: object, roles: list[str], project_id: str) -> str:
        """Create a token of this user and return its secret, of which only a hash is stored, so that it cannot be shown
        again. No event is recorded here.
        """
        secret = secrets.token_urlsafe(32)
        cls.objects.create(name=name, user=user, token_hash=hash_token(secret), roles=roles, project_id=project_id)
        return secret


class KeystoneUser(models.Model):
    """Maps Keystone's id of a user to our user. A name can change and be used again; the id cannot."""

    keystone_id = models.CharField(max_length=64, primary_key=True)
    user = models.OneToOneField(settings.AUTH_USER_MODEL, models.CASCADE, related_name="keystone")

    def __str__(self) -> str:
        return self.keystone_id


class SavedView(models.Model):
    """A user's saved view of a list: filters, search and order as a query string.

    The row without a name holds the columns that the user has chosen for this list.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="saved_views")
    of = models.CharField(max_length=100, help_text="The listed model: app.model.")
    name = models.CharField(max_length=64, blank=True)
    query = models.CharField(max_length=2000, blank=True, help_text="The query string of the list's address.")
    columns = ArrayField(models.CharField(max_length=64), default=list)
    shared = models.BooleanField(default=False)

    class Meta:
        ordering = ["name", "id"]
        constraints = [models.UniqueConstraint(fields=["user", "of", "name"], name="saved_view_one_per_name")]
        indexes = [models.Index(fields=["of"], name="saved_view_of")]

    def __str__(self) -> str:
        return self.name


class Maintenance(models.Model):
    """The read-only switch: while the one possible row exists, the console and both APIs refuse changes.

    Agents and jobs go on. The row says since when, by whom and why. `cyborgweb.auth.read_only` reads and sets it.
    """

    since = models.DateTimeField(db_default=Now(), help_text="Since when the service is read-only.")
    by = models.CharField(max_length=255, help_text="Who made the service read-only.")
    reason = models.CharField(
        max_length=4096, blank=True, help_text="The reason, which is shown to everybody whose change is refused."
    )

    class Meta:
        verbose_name_plural = "maintenance"
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="maintenance_is_one")]

    def __str__(self) -> str:
        return f"read only since {self.since:%Y-%m-%d %H:%M}"


def hash_token(secret: str) -> str:
    """Return the SHA-256 of a token in hex, by which it is stored and found.

    A plain hash is sufficient, because tokens are 256 random bits.
    """
    return hashlib.sha256(secret.encode()).hexdigest()
