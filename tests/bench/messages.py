"""Names, keys and reports of the bench's agents. Keys are computed from the host's number."""

from __future__ import annotations

import base64
import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from agents import wire
from drivers.inventory import AttachHandle, Attribute, Deployable, Device, DriverReport


def host_name(number: int) -> str:
    """Return the name of bench host `number`, which is also its node."""
    return f"bench-{number:05d}"


def host_address(number: int) -> str:
    """Return the loopback address of bench host `number`. Each host has its own, because the gateway gives each address
    a share of its handshakes."""
    return f"127.1.{number // 250 % 250}.{number % 250 + 1}"


def private_key(number: int) -> Ed25519PrivateKey:
    """Return the key of bench host `number`; it is the same in every process."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.blake2b(b"bench%d" % number, digest_size=32).digest())


def public_key(number: int) -> str:
    """Return the public key of bench host `number` in base64url, as in messages and in `agents.models.Agent`."""
    raw = private_key(number).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return base64.urlsafe_b64encode(raw).decode()


def devices(count: int, host: str = "bench", model: str = "1044") -> tuple[Device, ...]:
    """Return `count` plain PCI devices (at most 2 048) with one handle and three attributes each."""
    return tuple(_device(n, host, model) for n in range(count))


def _device(number: int, host: str, model: str) -> Device:
    bus, slot = divmod(number, 8)
    address = f"0000:{bus:02x}:{slot:02x}.0"
    handle = f'{{"bus": "{bus:02x}", "device": "{slot:02x}", "domain": "0000", "function": "0"}}'
    attributes = (
        Attribute("rc", "FPGA"),
        Attribute("trait0", "CUSTOM_FPGA_1AF4"),
        Attribute("trait1", "CUSTOM_FPGA_PRODUCT_ID_1044"),
    )
    return Device(
        key=f"pci:{address}",
        type="FPGA",
        vendor="1af4",
        model=model,
        address=address,
        std_board_info=f'{{"class": "1200", "device_id": "{model}"}}',
        vendor_board_info='{"vendor_info": "bench"}',
        numa_node=0,
        deployables=(Deployable(f"{host}_{address}", 1, attributes, (AttachHandle("PCI", handle),), "bench_driver"),),
    )


def report_parts(found: tuple[Device, ...], epoch: int = 1) -> tuple[str, str, str]:
    """Return the text of a Report in three pieces; `seq` and a hash of 40 characters belong between them."""
    seq, name = 987654321, "#" * 40
    text = wire.encode_message(wire.Report(epoch, seq, name, (DriverReport("bench_driver", "", found),)))
    head, _, rest = text.partition(str(seq))
    middle, _, tail = rest.partition(name)
    return head, middle, tail


def report(parts: tuple[str, str, str], seq: int, content: str = "") -> str:
    """Return the Report with this `seq`; its hash is `content` if given, otherwise it is computed from `seq`."""
    return f"{parts[0]}{seq}{parts[1]}{content or format(seq, '040x')}{parts[2]}"
