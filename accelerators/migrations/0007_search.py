"""What the console's search looks up by the beginning: PCI addresses, keys with their serials, attach handles."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accelerators", "0006_images"),
    ]

    operations = [
        migrations.AddIndex("device", models.Index(fields=["address"], name="device_address")),
        migrations.AddIndex("device", models.Index(fields=["key"], name="device_key")),
        migrations.AddIndex("attachhandle", models.Index(fields=["attach_info"], name="handle_info")),
    ]
