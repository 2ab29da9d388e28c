"""Device profiles. A profile can be edited and deleted while no request refers to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import django_filters as filters
from django.core.validators import RegexValidator
from django.db.models import Exists, OuterRef
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.own import errors
from accelerators.api.own.fields import ChangeSerializer, RowSerializer, StrictTextField, UrlField
from accelerators.api.own.filters import ListFilter
from accelerators.api.own.views import CollectionView
from accelerators.domain import groups
from accelerators.models import AcceleratorRequest, DeviceProfile
from accelerators.requests import profiles


class ProfileFilter(ListFilter):
    """Filter by name, or by whether requests use the profile."""

    name = filters.CharFilter(help_text="Exactly this name.")
    used = filters.BooleanFilter(help_text="Whether there are requests that were made from it.")


class GroupsField(serializers.ListField):
    """The groups of a profile: resources, traits and accel: hints per group. All values are strings."""

    child = serializers.DictField(child=serializers.CharField())

    def to_internal_value(self, data: Any) -> list[groups.ProfileGroup]:
        """Check the groups and return them in the form in which they are stored.

        Raises ValidationError (400) for invalid groups, and ApiError 409 for more than MAX_REQUESTS accelerators.
        """
        if data == []:
            self.fail("empty")
        if isinstance(data, list) and not all(_has_text_values_only(group) for group in data):
            raise serializers.ValidationError("Say a list of objects whose values are strings.")
        if isinstance(data, list) and sum(_iterate_amounts(data)) > groups.MAX_REQUESTS:
            # The body is well formed but exceeds a quota. Neutron answers 409 in this case, too.
            raise errors.ApiError(409, f"groups: a profile may ask for at most {groups.MAX_REQUESTS} accelerators.")
        try:
            return groups.check_groups(data)
        except groups.GroupError as error:
            raise serializers.ValidationError(str(error)) from error

    def to_representation(self, data: Any) -> Any:
        """Return the groups as they are stored."""
        return data


def _has_text_values_only(group: Any) -> bool:
    """Return whether the group is an object whose values are all strings."""
    return isinstance(group, dict) and all(isinstance(value, str) for value in group.values())


def _iterate_amounts(data: list[dict[str, str]]) -> Iterator[int]:
    """Yield the amount of each resource in the groups; skip values that are not a number of at most nine digits."""
    for group in data:
        for key, value in group.items():
            if key.startswith("resources:") and len(value) <= 9 and value.isdecimal():
                yield int(value)


class ProfileSerializer(RowSerializer):
    """A named list of groups. The index of a group is the `group_id` of the requests made from it."""

    url = UrlField("profiles", source="uuid")
    # No uniqueness validator: a duplicate name is detected when the row is written.
    name = StrictTextField(
        validators=[RegexValidator(r"^[a-zA-Z0-9_-]+$", "Say letters, digits, - and _ only.")],
        max_length=255,
        help_text="Letters, digits, - and _.",
    )
    description = StrictTextField(
        max_length=profiles.MAX_DESCRIPTION, allow_blank=True, allow_null=True, required=False
    )
    groups = GroupsField(
        allow_empty=False, help_text='For example [{"resources:FPGA": "1", "trait:CUSTOM_FPGA_INTEL": "required"}].'
    )
    used = serializers.BooleanField(
        read_only=True, help_text="Whether there are requests that were made from it; if so, it cannot be edited."
    )

    class Meta:
        model = DeviceProfile
        fields = ("uuid", "url", "name", "description", "groups", "used", "generation", "created_at", "updated_at")


class ProfileChangeSerializer(ChangeSerializer, ProfileSerializer):
    """A change of a device profile."""


class ProfileView(CollectionView):
    """Device profiles, oldest first."""

    policy, read_policy = "device_profile", "profile"
    sort_fields = {"created": "id", "name": "name"}
    etag_collections = ("profiles", "requests")
    serializer_class = ProfileSerializer
    filterset_class = ProfileFilter
    body_serializers = {"partial_update": ProfileChangeSerializer}
    delete_parameters = ("generation",)
    queryset = DeviceProfile.objects.annotate(used=Exists(AcceleratorRequest.objects.filter(profile=OuterRef("pk"))))

    def create(self, request: Request) -> Response:
        """Create a device profile; 201. 409 if its name is in use, or if it asks for too many accelerators."""
        values = self.validate_body()
        uuid = profiles.create_profile(values["name"], values["groups"], values.get("description"), None, self.caller)
        return self.respond_with_stored_row(uuid)

    def partial_update(self, request: Request, **kwargs: str) -> Response:
        """Edit a device profile; 409 while requests made from it exist, if its new name is in use, or if it has another
        generation."""
        profile = self.get_object()
        values, generation = self.validate_change(profile)
        if values:
            profiles.edit_profile(profile.uuid, values, self.caller, generation=generation)
        return Response(self.get_serializer(self.get_object()).data)

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Delete a device profile; 204. 409 while requests made from it exist."""
        profile = self.get_object()
        generation = self.get_generation_to_delete(profile)
        profiles.delete_profile(profile.uuid, self.caller, generation=generation)
        return Response(status=204)
