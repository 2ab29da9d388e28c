"""Prepare the database rows that a measurement needs."""

from __future__ import annotations

from django.db import connection

from accelerators import conductor
from accelerators.models import Host
from agents.models import Agent
from tests.bench import messages
from tests.support import emptying

INVENTORY = ("attachhandle", "attribute", "deployable", "device", "event", "intent")


def enrol(count: int, applied_hash: str = "") -> list[int]:
    """Create bench hosts 0 … count-1 and their agents if they are missing; return the ids of all hosts, in order."""
    names = [messages.host_name(n) for n in range(count)]
    with conductor.writing():
        existing = set(Host.objects.filter(name__in=names).values_list("name", flat=True))
        new = [n for n in range(count) if names[n] not in existing]
        hosts = Host.objects.bulk_create([Host(name=names[n], node=names[n]) for n in new])
        Agent.objects.bulk_create(
            [Agent(host=host, public_key=messages.public_key(n)) for n, host in zip(new, hosts, strict=True)]
        )
        Host.objects.filter(name__in=names).update(applied_hash=applied_hash)
    return list(Host.objects.filter(name__in=names).order_by("name").values_list("id", flat=True))


def empty_inventory() -> None:
    """Delete all devices, events and intents and reset what was applied of each host; keep hosts and agents."""
    tables = ", ".join(f"accelerators_{name}" for name in INVENTORY)
    emptying.allow_emptying()
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {tables}, spool, tick, django_q_ormq CASCADE")
        cursor.execute(
            "UPDATE accelerators_host SET applied_epoch = 0, applied_seq = 0, applied_hash = '', drivers = '{}'"
        )
        cursor.execute("VACUUM ANALYZE accelerators_host")
        cursor.execute("CHECKPOINT")


def empty_spool() -> None:
    """Delete all reports that wait to be merged."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE spool, tick, django_q_ormq")
