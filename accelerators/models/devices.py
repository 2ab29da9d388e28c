"""Models of devices, their deployables (resource providers), and the deployables' attributes and attach handles."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import models
from django.db.models import F, Func, Q, Value
from django.db.models.functions import Coalesce, Now

from accelerators.domain.device_actions import LifecycleState
from accelerators.domain.offer import OFFERED_STATE, WITHHELD_HEALTH
from accelerators.domain.pci_names import HardwareName
from accelerators.domain.states import AttributeOrigin, DeviceState, DeviceType, DrainTarget, HandleType, Health
from accelerators.models import fields
from accelerators.models.hosts import Host
from accelerators.runtime.hardware_names import get_hardware_name

STATES_WITHOUT_DRAIN = (DeviceState.READY.value, DeviceState.INSTALLING.value)
"""States in which a device is offered or about to be; a draining device is never in one of them."""
HANDLE_USES = {
    "held": Q(request__isnull=False),
    "free": Q(request__isnull=True, release__isnull=True),
    "released": Q(request__isnull=True, release__isnull=False),
}
"""The uses of attach handles: name → condition for queries of AttachHandle.

A `held` handle has a request. A `released` one is not free, because a guest may still use it (ReleasedHandle)."""
MIN_TERM_LENGTH = 3
"""Shorter terms are searched only in the model that drivers report."""
UNHEALTHY_STATUSES = (Health.DEGRADED.value, Health.FAILED.value)


class Device(fields.Row):
    """A card, identified by its host and `key`.

    `state` is the device's place in its life cycle, which operators, admission rules, reports and commands change;
    `status` is the health that its driver reports.
    """

    host = models.ForeignKey(Host, models.PROTECT, related_name="devices", db_index=False)
    key = fields.name_field(help_text="Identity on its host: serial:…, else pci:ADDRESS, else a key of the driver.")
    driver = models.CharField(max_length=64, db_collation="C")
    type = models.CharField(max_length=16, choices=DeviceType.choices())
    vendor = fields.name_field()
    model = fields.name_field()
    address = models.CharField(
        max_length=32, null=True, blank=True, help_text="PCI address of the management function."
    )
    std_board_info = models.TextField(default="", blank=True)
    vendor_board_info = models.TextField(default="", blank=True)
    numa_node = models.IntegerField(default=-1, help_text="NUMA node; -1 if unknown.")
    kernel_driver = models.CharField(max_length=64, default="", blank=True)
    to_install = models.TextField(
        default="", blank=True, help_text="The steps by which its driver would make it ready, one per line."
    )
    acts = models.CharField(
        max_length=255, default="", blank=True, help_text="The commands that its driver supports for it."
    )
    changeable = models.CharField(
        max_length=255,
        default="",
        db_default="",
        blank=True,
        help_text="The settings of a layout that its driver accepts.",
    )
    sized_by = models.CharField(
        max_length=64,
        default="",
        db_default="",
        blank=True,
        help_text="The setting of a layout that determines the number of handles.",
    )
    backend = models.CharField(
        max_length=64, default="", db_default="", blank=True, help_text="The backend of its driver that found it."
    )
    bridges = models.CharField(
        max_length=255,
        default="",
        db_default="",
        blank=True,
        help_text="The PCI bridges above it, starting at the root.",
    )
    physical_function = models.CharField(
        max_length=32,
        null=True,
        blank=True,
        help_text="PCI address of its card's function, if the device is a virtual function.",
    )
    subsystem = models.CharField(
        max_length=9,
        default="",
        db_default="",
        blank=True,
        help_text="The PCI ids by which the maker of the board identifies it, such as 10de:1533; empty if unknown.",
    )

    status = models.CharField(max_length=16, choices=Health.choices(), default=Health.UNKNOWN.value)
    status_reason = models.TextField(default="", blank=True)
    status_since = models.DateTimeField(db_default=Now())

    state = models.CharField(max_length=16, choices=DeviceState.choices(), default=DeviceState.INACTIVE.value)
    state_reason = models.TextField(default="found by its driver", blank=True)
    state_since = models.DateTimeField(db_default=Now())
    state_by = fields.name_field(default="agent")
    returns_to = models.CharField(
        max_length=16,
        choices=DeviceState.choices(),
        null=True,
        blank=True,
        help_text="The state that a missing device returns to when it is found again.",
    )
    drain_to = models.CharField(
        max_length=16,
        choices=DrainTarget.choices(),
        null=True,
        blank=True,
        help_text="While it drains: its state once its last request is gone.",
    )
    busy_with = models.UUIDField(
        null=True, blank=True, help_text="The exclusive command in progress; meanwhile the device is not bound."
    )
    generation = models.BigIntegerField(
        default=0, db_default=0, help_text="Increases with every exclusive command, and when its attach handles change."
    )

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["host", "key"], name="device_one_per_host_and_key"),
            fields.one_of_constraint("type", DeviceType, "device_type_known"),
            fields.one_of_constraint("state", DeviceState, "device_state_known"),
            fields.one_of_constraint("status", Health, "device_status_known"),
            models.CheckConstraint(
                condition=Q(state="missing") | Q(returns_to__isnull=True), name="device_returns_only_from_missing"
            ),
            fields.one_of_constraint("drain_to", DrainTarget, "device_drain_known"),
            models.CheckConstraint(
                condition=Q(drain_to__isnull=True)
                | ~Q(state__in=STATES_WITHOUT_DRAIN)
                & (Q(returns_to__isnull=True) | ~Q(returns_to__in=STATES_WITHOUT_DRAIN)),
                name="device_that_drains_is_not_offered",
            ),
        ]
        indexes = [
            models.Index(fields=["state", "type"], name="device_state_type"),
            models.Index(fields=["type", "vendor"], name="device_type_vendor"),
            models.Index(fields=["id"], condition=Q(drain_to__isnull=False), name="device_draining"),
            models.Index(fields=["status"], condition=Q(status__in=UNHEALTHY_STATUSES), name="device_unwell"),
            models.Index(fields=["address"], name="device_address"),
            models.Index(fields=["key"], name="device_key"),
        ]

    def __str__(self) -> str:
        return f"{self.hardware_name.full} {self.address or self.key}"

    @property
    def hardware_name(self) -> HardwareName:
        """Return the names of the hardware, from the PCI ID database and the configuration."""
        return get_hardware_name(self.vendor, self.model, self.subsystem)

    @property
    def lifecycle_text(self) -> str:
        """Return state, `returns_to` and `drain_to` as one text (`LifecycleState.as_text`).

        Forms send it back, so that a person who decides about a device learns when it has changed meanwhile.
        """
        returns_to = DeviceState(self.returns_to) if self.returns_to else None
        drain_to = DrainTarget(self.drain_to) if self.drain_to else None
        return LifecycleState(DeviceState(self.state), returns_to, drain_to).as_text


class Deployable(fields.Row):
    """Database row of the part of a device that is a resource provider.

    `rp_uuid` is None until a provider id is recorded; from then on it is used instead of the id computed from the name.
    """

    device = models.ForeignKey(Device, models.PROTECT, related_name="deployables", db_index=False)
    parent = models.ForeignKey("self", models.PROTECT, null=True, blank=True, related_name="children")
    root = models.ForeignKey("self", models.PROTECT, null=True, blank=True, related_name="+")
    name = fields.name_field(help_text="The provider's name in Placement.")
    num_accelerators = models.IntegerField()
    driver_name = models.CharField(max_length=100, default="", blank=True)
    rp_uuid = models.UUIDField(null=True, blank=True, db_index=True)
    bitstream_id = models.UUIDField(null=True, blank=True)
    bitstream_in_flash = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Whether it keeps its bitstream in flash memory, so that resets and reboots do not end it.",
    )
    missing_since = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["device", "name"], name="deployable_one_per_device_and_name"),
            models.CheckConstraint(condition=Q(num_accelerators__gte=0), name="deployable_count_not_negative"),
        ]

    def __str__(self) -> str:
        return self.name


class ProviderOwner(models.Model):
    """The host to which a resource provider belongs, for ever.

    A trigger of the deployables' table writes the row when a host first names a deployable or records a provider id,
    and refuses deployables with a provider of another host (`accelerators/migrations/sql/owners.sql`).
    """

    provider = models.UUIDField(primary_key=True)
    host = models.ForeignKey(Host, models.CASCADE, related_name="+")

    def __str__(self) -> str:
        return f"{self.provider} of {self.host}"


class Attribute(fields.Row):
    """A key and a value of a deployable. Reports do not change attributes with `origin` operator or conductor."""

    deployable = models.ForeignKey(Deployable, models.CASCADE, related_name="attributes", db_index=False)
    key = fields.name_field()
    value = models.TextField()
    origin = models.CharField(max_length=16, choices=AttributeOrigin.choices(), default=AttributeOrigin.AGENT.value)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["deployable", "key"], name="attribute_one_per_deployable_and_key"),
            fields.one_of_constraint("origin", AttributeOrigin, "attribute_origin_known"),
        ]

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


class AttachHandle(fields.Row):
    """One assignable unit of a deployable. The request that holds it refers to it; at most one request can hold it."""

    deployable = models.ForeignKey(Deployable, models.PROTECT, related_name="attach_handles", db_index=False)
    attach_type = models.CharField(max_length=16, choices=HandleType.choices())
    attach_info = models.CharField(max_length=255, db_collation="C", help_text="JSON; its bytes are its identity.")
    in_use = models.CharField(
        max_length=16,
        default="",
        db_default="",
        blank=True,
        help_text="As last reported: guest, unknown, or empty if no guest can use it or its driver does not tell.",
    )
    missing_since = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["deployable", "attach_info"], name="handle_one_per_deployable_and_info"),
            fields.one_of_constraint("attach_type", HandleType, "handle_type_known"),
        ]
        indexes = [models.Index(fields=["attach_info"], name="handle_info")]

    def __str__(self) -> str:
        return f"{self.attach_type} {self.attach_info}"

    @property
    def reason_not_offered(self) -> str:
        """Return the reason why this handle is not offered to Nova, or '' if it can be.

        Runs a query unless `release` was loaded with the handle.
        """
        if self.attach_type == HandleType.DEV:
            return "not offered to Nova: it is a device node, and Nova gives device nodes to no guest"
        release: ReleasedHandle | None = getattr(self, "release", None)
        return f"not offered to Nova: {release.description}" if release else ""


class ReleasedHandle(fields.Row):
    """An attach handle whose request is gone, but of which its host has not confirmed yet that no guest uses it.

    While this row exists, no request gets the handle; a trigger of the database rejects it. `created_at` is the time of
    the release. The foreign key has no constraint, so that a conductor of the release before can still delete handles.
    """

    handle = models.OneToOneField(AttachHandle, models.CASCADE, related_name="release", db_constraint=False)
    instance = models.UUIDField(null=True, blank=True, help_text="The instance that had the handle.")
    ask_at = models.DateTimeField(help_text="When the host is asked again.")
    ask_until = models.DateTimeField(
        null=True, blank=True, help_text="When its device is quarantined; empty once that has been done."
    )
    answer = models.TextField(default="", blank=True, help_text="Why the host has not confirmed it yet.")

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.handle} of {self.instance}"

    @property
    def description(self) -> str:
        """Return a phrase for operators: what the handle waits for, and why it still does."""
        owner = f"instance {self.instance}" if self.instance else "an unknown instance"
        waits = f"{owner} had it, and its host has not confirmed that no guest uses it"
        return f"{waits} ({self.answer})" if self.answer else waits


def build_offered_condition(device: str = "") -> Q:
    """Build the condition that a device is offered (`accelerators.domain.offer`).

    `device` is the path from the queried model to the device, such as "deployable__device"; '' for queries of devices.
    """
    path = f"{device}__" if device else ""
    return Q(**{f"{path}state": OFFERED_STATE.value}) & ~Q(**{f"{path}status": WITHHELD_HEALTH.value})


def build_driver_error_expression() -> Func:
    """Build an expression for device queries: the last error of the device's driver and of its backend.

    Both are read from `Host.drivers` and concatenated. The value is '' if both answered, and NULL if nothing is known
    of the driver.
    """
    drivers, driver, error = F("host__drivers"), F("driver"), Value("error")
    driver_error_text, backend_error_or_null = (
        Func(drivers, driver, *path, function="jsonb_extract_path_text", output_field=models.TextField())
        for path in ((error,), (Value("backends"), F("backend"), error))
    )
    text_field = models.TextField()
    backend_error_text = Coalesce(backend_error_or_null, Value(""), output_field=text_field)
    return Func(
        driver_error_text, backend_error_text, template="(%(expressions)s)", arg_joiner=" || ", output_field=text_field
    )


def build_name_condition(term: str) -> Q:
    """Return the condition of `find_name_condition`, or one that no device meets."""
    return find_name_condition(term) or Q(pk__in=[])


def find_name_condition(term: str) -> Q | None:
    """Return the condition for devices whose hardware's names contain all words of `term`; None if there are none. See
    `find_name_conditions`."""
    return find_name_conditions([term]).get(term)


def find_name_conditions(terms: Sequence[str]) -> dict[str, Q]:
    """Return the condition for devices whose hardware's names contain all words of a term, for each of `terms`; terms
    that no hardware is called by are left out.

    Hardware that no database knows is found by the model that its driver reports. A condition compares vendor, model
    and subsystem with those values of devices in the database that have such a name. Costs one statement, which reads
    all devices, or none without terms.
    """
    if not terms:
        return {}
    devices = Device.objects.order_by().values_list("vendor", "model", "subsystem").distinct()
    hardware = [(*ids, get_hardware_name(*ids)) for ids in devices]
    conditions: dict[str, Q] = {}
    for term in terms:
        text = term.strip().lower()
        has_name = len(text) >= MIN_TERM_LENGTH
        models_by_vendor: dict[str, dict[str, set[str]]] = {}
        for vendor, model, subsystem, name in hardware:
            if text in model.lower() or (has_name and name.has_words(term)):
                models_by_vendor.setdefault(vendor, {}).setdefault(model, set()).add(subsystem)
        condition = Q()
        for vendor, subsystems_by_model in models_by_vendor.items():
            for model, subsystems in subsystems_by_model.items():
                condition |= Q(vendor=vendor, model=model, subsystem__in=subsystems)
        if condition:
            conditions[term] = condition
    return conditions
