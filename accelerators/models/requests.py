"""Models of device profiles and accelerator requests. A bound request holds an attach handle."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from accelerators.domain.states import RequestState
from accelerators.models import fields
from accelerators.models.devices import AttachHandle, Deployable


class DeviceProfile(fields.SettingsRow):
    """A named list of groups. A group's index in it is the `device_profile_group_id` of its requests."""

    name = fields.name_field(unique=True)
    description = models.TextField(null=True, blank=True)
    groups = fields.KeptJson()

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return self.name


class AcceleratorRequest(fields.SettingsRow):
    """A request for one accelerator for one instance. `group` is a snapshot, independent of later profile changes.

    `generation` counts the changes of what its project has chosen: of the label.
    """

    project_id = models.CharField(max_length=255, db_collation="C", db_index=True)
    state = models.CharField(max_length=16, choices=RequestState.choices(), default=RequestState.INITIAL.value)
    profile = models.ForeignKey(DeviceProfile, models.PROTECT, related_name="requests")
    group_id = models.IntegerField(default=0)
    group = models.JSONField()
    hostname = models.CharField(max_length=255, null=True, blank=True)
    device_rp_uuid = models.UUIDField(null=True, blank=True)
    instance_uuid = models.UUIDField(null=True, blank=True, db_index=True)
    deployable = models.ForeignKey(Deployable, models.PROTECT, null=True, blank=True, related_name="requests")
    attach_handle = models.OneToOneField(AttachHandle, models.PROTECT, null=True, blank=True, related_name="request")
    deadline = models.DateTimeField(null=True, blank=True, help_text="When BindStarted becomes BindFailed.")
    fault = models.TextField(default="", blank=True, help_text="Why the bind failed.")
    label = models.CharField(max_length=255, default="", blank=True, help_text="A label that its project has chosen.")

    class Meta:
        ordering = ["id"]
        constraints = [
            fields.one_of_constraint("state", RequestState, "request_state_known"),
            models.CheckConstraint(
                condition=~Q(state="Bound") | Q(attach_handle__isnull=False), name="request_bound_holds_a_handle"
            ),
            models.CheckConstraint(
                condition=Q(state__in=["BindStarted", "Bound"]) | Q(attach_handle__isnull=True),
                name="request_handle_only_while_binding_or_bound",
            ),
            models.CheckConstraint(
                condition=~Q(state="BindStarted") | Q(deadline__isnull=False),
                name="request_bind_has_a_deadline",
            ),
        ]
        indexes = [
            models.Index(fields=["deadline"], condition=Q(state="BindStarted"), name="request_deadline"),
            # The removal of a host looks for its requests, also for those that were never bound.
            models.Index(fields=["hostname"], condition=Q(hostname__isnull=False), name="request_hostname"),
        ]

    def __str__(self) -> str:
        return str(self.uuid)
