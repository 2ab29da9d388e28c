"""Model of admission rules, which decide the first state of a device. `accelerators.domain.admission` applies them."""

from __future__ import annotations

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models

from accelerators.domain.states import AdmittedState, DeviceType
from accelerators.models import fields

RULE_NAME = RegexValidator(r"^[a-zA-Z0-9_.-]+\Z", "Say letters, digits, ., - and _ only.")
MAX_RULE_ORDER = 1_000_000


class AdmissionRule(fields.SettingsRow):
    """A rule that decides the first state of a found device.

    The first enabled rule that matches decides. An empty field matches everything.
    """

    name = models.CharField(
        max_length=64,
        unique=True,
        db_collation="C",
        validators=[RULE_NAME],
        help_text="Letters, digits and the characters . - _ are allowed.",
    )
    order = models.IntegerField(
        default=100,
        validators=[MinValueValidator(0), MaxValueValidator(MAX_RULE_ORDER)],
        help_text="Rules are tried in this order, lowest number first.",
    )
    host = fields.name_field(default="", blank=True, help_text="Name of the host, with the wildcards * and ?.")
    driver = models.CharField(max_length=64, default="", blank=True, db_collation="C", help_text="Name of the driver.")
    vendor = fields.name_field(
        default="", blank=True, help_text="The vendor as the driver reports it, for example 10de."
    )
    model = fields.name_field(default="", blank=True, help_text="Model or product, with the wildcards * and ?.")
    type = models.CharField(max_length=16, default="", blank=True, choices=DeviceType.choices())
    action = models.CharField(
        max_length=16,
        choices=AdmittedState.choices(),
        help_text="The state that a matching device gets.",
    )
    enabled = models.BooleanField(default=True)

    class Meta:
        ordering = ["order", "id"]
        constraints = [
            fields.one_of_constraint("action", AdmittedState, "rule_action_known"),
            models.CheckConstraint(
                condition=models.Q(type__in=["", *(kind.value for kind in DeviceType)]), name="rule_type_known"
            ),
        ]

    def __str__(self) -> str:
        return self.name
