"""Tests of the checks of attach handles, when a driver creates one and when a message is decoded."""

from __future__ import annotations

import msgspec
import pytest

from drivers.inventory import AttachHandle


@pytest.mark.parametrize("info", ["[]", "null", "no JSON", '{"bus": 3}', '{"bus": {}}', "\ud800{}"])
def test_a_handle_whose_info_is_no_json_object_of_strings_is_refused(info: str) -> None:
    with pytest.raises(ValueError, match="a JSON object of strings"):
        AttachHandle("PCI", info)


def test_a_decoded_handle_is_validated_too() -> None:
    handle = AttachHandle("PCI", '{"bus": "3b"}')
    sent = msgspec.json.encode(handle)
    assert msgspec.json.decode(sent, type=AttachHandle) == handle
    with pytest.raises(msgspec.ValidationError, match="a JSON object of strings"):
        msgspec.json.decode(sent.replace(rb"{\"bus\": \"3b\"}", b"[]"), type=AttachHandle)
