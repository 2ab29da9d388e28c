"""Index the requests by host name. The index is built concurrently, so that requests can be written meanwhile."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("accelerators", "0018_host_deleting_since")]

    operations = [
        AddIndexConcurrently(
            model_name="acceleratorrequest",
            index=models.Index(
                condition=models.Q(("hostname__isnull", False)), fields=["hostname"], name="request_hostname"
            ),
        ),
    ]
