"""Test groups of device profiles: how many requests they make, when a bind programs, and which groups are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerators.domain.groups import (
    MAX_REQUESTS,
    GroupError,
    check_groups,
    check_profile_name,
    list_requested_groups,
    needs_programming,
)

ANY_JSON = st.one_of(
    st.text(max_size=20), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.lists(st.text())
)
GROUP_KEYS = st.sampled_from(
    ["resources:FPGA", "resources: CUSTOM_X ", "trait:CUSTOM_A", "accel:k", "resources1:FPGA", "x"]
)


@given(
    st.one_of(
        ANY_JSON,
        st.lists(st.dictionaries(st.one_of(GROUP_KEYS, st.text(max_size=20)), ANY_JSON, max_size=4), max_size=4),
    )
)
def test_accepted_groups_contain_only_strings_and_can_be_planned(groups: object) -> None:
    try:
        checked = check_groups(groups)
    except GroupError as error:
        assert str(error)
        return
    assert all(isinstance(key, str) and isinstance(value, str) for group in checked for key, value in group.items())
    wanted = list_requested_groups(checked)
    assert len(wanted) <= MAX_REQUESTS
    assert wanted == sorted(wanted)
    assert check_groups(checked) == checked


@pytest.mark.parametrize("split", [[MAX_REQUESTS], [MAX_REQUESTS - 6, 6]])
def test_a_profile_asks_for_at_most_256_accelerators(split: list[int]) -> None:
    asked = [{"resources:FPGA": str(amount)} for amount in split]
    assert len(list_requested_groups(check_groups(asked))) == MAX_REQUESTS
    with pytest.raises(GroupError, match="at most 256 accelerators"):
        check_groups([*asked, {"resources:FPGA": "1"}])


@pytest.mark.parametrize("name", ["FPGA", "GPU", "VGPU", "PGPU", "CUSTOM_QAT", "CUSTOM_NIC", "CUSTOM_SSD", "CUSTOM_X"])
def test_the_resource_classes_of_upstream_and_custom_ones_can_be_requested(name: str) -> None:
    assert check_groups([{f"resources:{name}": "1"}]) == [{f"resources:{name}": "1"}]
    with pytest.raises(GroupError, match="Unsupported resource class"):
        check_groups([{f"resources:{name.lower()}": "1"}])


def test_group_keys_and_values_longer_than_255_characters_are_refused() -> None:
    longest = {"accel:" + "k" * 249: "v" * 255}
    assert check_groups([longest]) == [longest]
    for group in ({"accel:" + "k" * 250: "v"}, {"accel:k": "v" * 256}):
        with pytest.raises(GroupError, match="longer than 255 characters"):
            check_groups([group])


@given(st.text())
def test_profile_names_consist_of_ascii_letters_digits_dashes_and_underscores(name: str) -> None:
    try:
        assert check_profile_name(name).isascii()
    except GroupError:
        assert not name or not all(c.isascii() and (c.isalnum() or c in "-_") for c in name)


@pytest.mark.parametrize(
    ("group", "loaded", "expected"),
    [
        ({"resources:FPGA": "1"}, None, False),
        ({"resources:FPGA": "1", "accel:bitstream_id": "a"}, None, True),
        ({"resources:FPGA": "1", "accel:bitstream_id": "a"}, "a", False),
        ({"resources:FPGA": "1", "accel:bitstream_id": "a"}, "b", True),
        ({"resources:FPGA": "1", "accel:function_id": "a"}, "a", True),
        ({"resources:PGPU": "1", "accel:bitstream_id": "a"}, None, False),
    ],
)
def test_an_fpga_is_programmed_unless_the_bitstream_is_loaded(
    group: dict[str, str], loaded: str | None, expected: bool
) -> None:
    assert needs_programming(group, loaded) is expected
