"""Test which keys PCI devices keep when serial numbers are unreadable, ambiguous, or elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.inventory import Device, DriverReport
from drivers.pci import identity
from drivers.pci.identity import RememberedIdentity

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
SERIAL, OTHER = "serial:10ee:000a35ffff000001:0", "serial:10ee:000a35ffff000002:0"


def make_device(key: str, address: str | None, model: str = "5000") -> Device:
    return Device(key=key, type="FPGA", vendor="10ee", model=model, address=address)


class Agent:
    """An agent that remembers the identities of devices from one report to the next."""

    def __init__(self) -> None:
        self.remembered: dict[str, RememberedIdentity] = {}

    def report(self, *devices: Device) -> list[str]:
        """Return the keys of these devices, which one driver found, and remember them."""
        (settled,), self.remembered = identity.settle_keys([DriverReport("one", devices=devices)], self.remembered)
        assert [one.address for one in settled.devices] == [one.address for one in devices]
        return [device.key for device in settled.devices]


@pytest.fixture
def agent() -> Agent:
    return Agent()


def test_a_serial_number_that_was_read_once_stays_the_key_while_it_cannot_be_read(agent: Agent) -> None:
    assert agent.report(make_device(SERIAL, FIRST)) == [SERIAL]
    assert agent.report() == []
    assert agent.report(make_device(f"pci:{FIRST}", FIRST)) == [SERIAL]


def test_another_serial_number_at_the_address_is_another_device(agent: Agent) -> None:
    agent.report(make_device(SERIAL, FIRST))
    assert agent.report(make_device(OTHER, FIRST)) == [OTHER]
    assert agent.report(make_device(f"pci:{FIRST}", FIRST)) == [OTHER]


def test_a_card_of_another_model_does_not_get_the_serial_number_of_the_former_one(agent: Agent) -> None:
    agent.report(make_device(SERIAL, FIRST))
    assert agent.report(make_device(f"pci:{FIRST}", FIRST, "5001")) == [f"pci:{FIRST}"]


def test_a_second_card_with_the_same_serial_number_leaves_the_first_one_its_identity(agent: Agent) -> None:
    agent.report(make_device(SERIAL, SECOND))
    both = make_device(SERIAL, FIRST), make_device(SERIAL, SECOND)
    assert agent.report(*both) == [f"pci:{FIRST}", SERIAL]
    assert agent.report(*both[::-1]) == [SERIAL, f"pci:{FIRST}"]
    assert agent.report(both[0]) == [f"pci:{FIRST}"], "the newcomer keeps its identity when the first card is pulled"


def test_cards_that_always_had_the_same_serial_number_have_their_addresses_as_identity(agent: Agent) -> None:
    both = make_device(SERIAL, FIRST), make_device(SERIAL, SECOND)
    for _ in range(2):
        assert agent.report(*both) == [f"pci:{FIRST}", f"pci:{SECOND}"]
    assert agent.report(both[1]) == [f"pci:{SECOND}"]


def test_a_card_that_moves_keeps_its_identity_and_its_old_slot_has_none(agent: Agent) -> None:
    agent.report(make_device(SERIAL, FIRST))
    assert agent.report(make_device(SERIAL, SECOND)) == [SERIAL]
    assert agent.report(make_device(f"pci:{FIRST}", FIRST), make_device(SERIAL, SECOND)) == [f"pci:{FIRST}", SERIAL]


def test_two_drivers_that_name_one_function_get_the_same_key(agent: Agent) -> None:
    reports = [DriverReport(name, devices=(make_device(SERIAL, FIRST),)) for name in ("one", "two")]
    settled, _ = identity.settle_keys(reports, {})
    assert [report.devices[0].key for report in settled] == [SERIAL, SERIAL]


def test_keys_that_a_driver_chose_itself_and_devices_without_address_stay(agent: Agent) -> None:
    assert agent.report(make_device("one:7", FIRST), make_device("one:8", None)) == ["one:7", "one:8"]
    assert not agent.remembered


@given(
    st.lists(
        st.dictionaries(st.sampled_from([FIRST, SECOND, "0000:03:00.0"]), st.sampled_from(["", SERIAL, OTHER])),
        max_size=6,
    )
)
def test_no_two_addresses_ever_have_one_key_and_a_repeated_report_changes_nothing(
    history: list[dict[str, str]],
) -> None:
    agent = Agent()
    for slots in history:
        devices = [make_device(serial or f"pci:{address}", address) for address, serial in slots.items()]
        keys = agent.report(*devices)
        assert len(set(keys)) == len(keys)
        assert agent.report(*devices) == keys
