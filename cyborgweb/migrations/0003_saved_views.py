"""What people keep of the console's lists."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("cyborgweb", "0002_keystone_users"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="SavedView",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("of", models.CharField(help_text="The model it lists, app.model.", max_length=100)),
                ("name", models.CharField(blank=True, max_length=64)),
                (
                    "query",
                    models.CharField(blank=True, help_text="The address after its question mark.", max_length=2000),
                ),
                (
                    "columns",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=64), default=list, size=None
                    ),
                ),
                ("shared", models.BooleanField(default=False)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="saved_views",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["name", "id"],
                "indexes": [models.Index(fields=["of"], name="saved_view_of")],
                "constraints": [models.UniqueConstraint(fields=("user", "of", "name"), name="saved_view_one_per_name")],
            },
        ),
    ]
