"""Enrol the hosts of `tests.fleet.rollout_hosts`: `python -m tests.fleet.enrol_rollout_hosts COUNT`, with the state
directory of a running database."""

from __future__ import annotations

import os
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from accelerators import conductor  # noqa: E402  (needs Django's registry, like all imports below)
from accelerators.models import Host  # noqa: E402
from agents.models import Agent  # noqa: E402
from tests.bench import messages  # noqa: E402
from tests.fleet.rollout_hosts import host_name  # noqa: E402


def enrol(count: int) -> None:
    """Create hosts 0 … count-1 with the keys of their agents."""
    names = [host_name(number) for number in range(count)]
    with conductor.writing():
        hosts = Host.objects.bulk_create([Host(name=name, node=name) for name in names])
        Agent.objects.bulk_create(
            [Agent(host=host, public_key=messages.public_key(number)) for number, host in enumerate(hosts)]
        )


if __name__ == "__main__":
    enrol(int(sys.argv[1]))
