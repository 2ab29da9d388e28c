"""Test that identifiers of others are hidden in a text, and that everything else stays."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerators.domain.redaction import HIDDEN, hide_foreign_ids

OWN, FOREIGN = "6f3c1a52-0d7e-4c8b-9b1f-2a4d5e6f7a8b", "0a3f7d1e-5f0c-4b1a-9d44-0d6f4f3b9a10"
SPELLINGS = [
    FOREIGN,
    FOREIGN.upper(),
    FOREIGN.replace("-", ""),
    f"mdev_{FOREIGN.replace('-', '_')}",
    f"/sys/bus/mdev/devices/{FOREIGN}/remove",
    f"instance={FOREIGN},",
    "instance-0000002a",
    f"{FOREIGN[:30]}",
    f"{FOREIGN[:9]}",
    FOREIGN.replace("-", "")[:30],
    FOREIGN.replace("-", "")[:8],
    f"e{FOREIGN}",
    f"{FOREIGN}e",
    f"e{FOREIGN[:20]}",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_foreign_identifier_is_hidden(spelling: str) -> None:
    shown = hide_foreign_ids(f"the unit {OWN} is attached to {spelling}", f"request {OWN.upper()}")
    assert shown.startswith(f"the unit {OWN} is attached to ") and HIDDEN in shown
    assert FOREIGN[:8] not in shown.lower() and "0000002a" not in shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing was heard from host cmp1 before the deadline",
        "0000:65:00.0 is bound to vfio-pci by process 4711 (qemu-system-x86)",
        f"sha256 {'ab' * 32}",
        "the instance-type is wrong",
        f"again {OWN}",
        f"again {OWN.replace('-', '')}",
    ],
)
def test_texts_without_foreign_identifiers_stay_as_they_are(text: str) -> None:
    assert hide_foreign_ids(text, OWN) == text


@given(st.lists(st.uuids(), max_size=4), st.uuids(), st.text(alphabet="ghijk ,.:=/()[]\n", max_size=9))
def test_no_foreign_uuid_survives_and_hiding_twice_changes_nothing(others: list[UUID], own: UUID, between: str) -> None:
    text = between.join(["", str(own), *map(str, others), ""]) if between else " ".join(map(str, [own, *others]))
    shown = hide_foreign_ids(text, str(own))
    assert not any(str(other) in shown for other in others if other != own)
    assert str(own) in shown and hide_foreign_ids(shown, str(own)) == shown
