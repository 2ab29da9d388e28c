from typing import TypeVar

from django.contrib import admin
from django.db.models import Model
from django.forms import CheckboxInput

M = TypeVar("M", bound=Model)

class ModelAdmin(admin.ModelAdmin[M]): ...

checkbox: CheckboxInput
