from typing import Any

from django.contrib import admin
from django.forms import CheckboxInput

class ModelAdmin(admin.ModelAdmin[Any]): ...

checkbox: CheckboxInput
