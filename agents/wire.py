"""The messages between an agent and its gateway, their limits and their versions.

The module is pure, and both sides import it. Messages are JSON text frames over a WebSocket at `/ws/agent`; the wire
version is the WebSocket subprotocol. Unknown fields are ignored, and unknown message types are dropped and counted, so
that an agent one version older or newer works (promise C2).

`agents.credentials` describes how a connection begins. After the upgrade the gateway sends the first message, Welcome.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from agents.errors import AgentsError
from drivers.inventory import AttachHandle, DriverReport, Name, Text, Word

VERSIONS = ("cyborg.agent.1",)
"""WebSocket subprotocols that this release supports, best first."""
MAX_MESSAGE_BYTES = 1024 * 1024
"""Default of `CYBORG_MAX_MESSAGE_BYTES`, the maximum size of one message in bytes."""
MAX_SAMPLES_BYTES = 128 * 1024
"""Maximum size of one Samples message in bytes: enough for a thousand devices."""
MESSAGE_MARGIN_BYTES = 64 * 1024
"""Bytes by which the limit of the web server's WebSocket library is higher than `CYBORG_MAX_MESSAGE_BYTES`. Without
this margin the library would close a connection before the gateway can refuse the message with a reason."""
MESSAGE_ERROR_KEY = "cyborg_message_error"
"""Key of `scope["state"]` where the web server stores (close code, reason) when it rejects a message.
The application never sees that message, and can no longer send a Refuse to the peer."""
MAX_PAYLOAD_CHARS = 512 * 1024
"""Maximum length of a command's payload in characters."""
AGENT_PATH = "/ws/agent"
CHALLENGE_PATH = "/ws/agent/challenge"
IMAGE_PATH = "/ws/agent/image/"

MAX_ANNOUNCEMENTS = 32
"""Maximum number of announcements of certificates in a file, in a message and in an agent's journal."""
FINGERPRINT_PATTERN = "^[0-9a-f]{64}$"

CODE_KEY_BARRED = "key-barred"
"""Code of a 403 that tells an agent to join with a new key: its token is valid, but its key is barred for ever."""

NonNegativeInt = Annotated[int, Meta(ge=0, le=2**53)]
Nonce = Annotated[str, Meta(max_length=64)]
Fingerprint = Annotated[str, Meta(pattern=FINGERPRINT_PATTERN)]
"""The SHA-256 of a certificate in DER: 64 lower-case hexadecimal digits."""
BootId = Annotated[str, Meta(max_length=64, pattern=r"^[^\x00]*$")]
"""The kernel's random id of one boot of a host (/proc/sys/kernel/random/boot_id)."""
STATES_NOT_RUNNING = ("disabled", "absent")
"""States of a driver that does not run on the host."""
ResultOutcome = Literal["succeeded", "failed", "refused", "unknown"]
"""How a command ended. `failed`: it was tried, and undone as far as possible. `refused`: nothing was changed.
`unknown`: it was interrupted."""


class Message(Struct, frozen=True, tag_field="type", tag=True):
    """Base class of all messages. The field `type` of the JSON object is the class name."""


class Hello(Message, frozen=True):
    """First message of an agent: its version, its boot id, its enabled `drivers`, and what it supports."""

    agent_version: Word
    boot_id: BootId
    drivers: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()
    ops: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()
    """The commands that the agent supports. Empty if the agent's release knows no commands."""
    writes: Annotated[str, Meta(max_length=500)] | None = None
    """Why the agent cannot write to Placement itself; '' if it can, None if its release does not support that."""
    newest_certificate: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """The certificate to which the announcements that it has kept lead, or the pinned one if there are none. '' if it
    would accept no announcement: it pins no certificate, does not know the announcement key, or its release does not
    support announcements."""


class Report(Message, frozen=True, omit_defaults=True):
    """The complete inventory of a host. (`epoch`, `seq`) orders reports; `hash` identifies the content.

    `drivers` are the drivers that were asked for devices. If a driver or one of its backends has an `error`, the report
    repeats its last known devices, or has none of them if they would make the message too large. `others` are drivers
    that do not run; they have their own field, because an older conductor would think that such a driver had answered
    and found no devices. `urgent`: the report shows a fault. Only conductors of older releases use it, to process the
    report before those of other hosts; today's find that out themselves.
    `boot_id`: the host's boot id when the report was made, '' if the agent does not tell it; it is part of the content,
    so that the first report after a reboot is never taken for one that is known already.
    """

    epoch: NonNegativeInt
    seq: NonNegativeInt
    hash: Annotated[str, Meta(min_length=32, max_length=64)]
    drivers: Annotated[tuple[DriverReport, ...], Meta(max_length=64)]
    others: Annotated[tuple[DriverReport, ...], Meta(max_length=64)] = ()
    urgent: bool = False
    boot_id: BootId = ""

    @classmethod
    def from_driver_reports(
        cls, epoch: int, seq: int, content_hash: str, driver_reports: tuple[DriverReport, ...], boot_id: str = ""
    ) -> Report:
        """Make a Report from the reports of all drivers: split them into `drivers` and `others`, and set `urgent`."""
        drivers = tuple(report for report in driver_reports if report.state not in STATES_NOT_RUNNING)
        others = tuple(one for one in driver_reports if one.state in STATES_NOT_RUNNING)
        return cls(epoch, seq, content_hash, drivers, others, shows_fault(drivers), boot_id)

    @property
    def all_drivers(self) -> tuple[DriverReport, ...]:
        """The reports of all drivers, those that do not run last."""
        return (*self.drivers, *self.others)


def shows_fault(drivers: tuple[DriverReport, ...]) -> bool:
    """Return whether a driver or backend has an error, or a device's status is failed or degraded."""
    return any(
        report.error
        or any(backend.error for backend in report.backends)
        or any(device.status in ("failed", "degraded") for device in report.devices)
        for report in drivers
    )


class Beat(Message, frozen=True):
    """A heartbeat: it renews the host's lease. The gateway answers with an Ack that has the same `seq`."""

    seq: NonNegativeInt


class Alive(Message, frozen=True):
    """Answer to a Probe, with its nonce: a running agent still holds this connection."""

    nonce: Nonce


class NewKey(Message, frozen=True):
    """Answer to Rotate: the host's new public key in base64url.

    `signature` is made with the present key and `proof` with the new one, both over `build_rotation_bytes`. The gateway
    answers with an Ack whose `of` is NewKey after the commit; until then the agent keeps both keys.
    """

    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[str, Meta(max_length=128)]
    proof: Annotated[str, Meta(max_length=128)]


class Taken(Message, frozen=True):
    """Confirms that commands are in the agent's journal. They need not be sent again while the agent runs."""

    numbers: Annotated[tuple[NonNegativeInt, ...], Meta(max_length=256)]


class Progress(Message, frozen=True, omit_defaults=True):
    """Progress of a command, for display; the first one also says that the command has started."""

    number: NonNegativeInt
    percent: Annotated[int, Meta(ge=0, le=100)] = 0
    text: Annotated[str, Meta(max_length=500)] = ""


class Result(Message, frozen=True, omit_defaults=True):
    """The result of a command. The agent sends it again after every reconnection until it is acknowledged.

    `epoch`, `seq` and `hash` name the report that shows the host after the command; that report is sent before this
    message. The Ack (`of` is Result, `seq` is the command's number) comes when that report, or a later one, is applied.
    `text` is a sentence for the operator; `detail` holds the values that the command asked for.
    """

    number: NonNegativeInt
    outcome: ResultOutcome
    text: Text = ""
    detail: Annotated[dict[str, str], Meta(max_length=64)] = {}
    epoch: NonNegativeInt = 0
    seq: NonNegativeInt = 0
    hash: Annotated[str, Meta(max_length=64)] = ""


class DeviceLoad(Struct, frozen=True, gc=False):
    """The current load of one device. `drivers.inventory.Sample` defines the names and units of the values."""

    key: Name
    values: Annotated[dict[Word, float], Meta(max_length=64)]


class Samples(Message, frozen=True):
    """Current load of all devices of the host whose load could be read. Sent once a minute, and when Watch asks for it.

    Samples are never stored and never acknowledged, and under pressure the gateway drops them before anything else.
    """

    loads: Annotated[tuple[DeviceLoad, ...], Meta(max_length=4096)]


class ImageRef(Struct, frozen=True, omit_defaults=True):
    """An image that a command needs. The host of that command can fetch it at `IMAGE_PATH` + `id`."""

    id: Annotated[str, Meta(max_length=36)]
    size: NonNegativeInt
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]
    name: Annotated[str, Meta(max_length=255)] = ""
    properties: Annotated[dict[str, str], Meta(max_length=256)] = {}


class Wish(Struct, frozen=True, omit_defaults=True):
    """The wanted state of a driver on a host. It overrides the host's own configuration.

    If `installed` is false, the driver does not run and its settings are deleted. `settings` None means those of the
    host's own file.
    """

    generation: NonNegativeInt
    installed: bool = True
    enabled: bool = True
    settings: dict[str, object] | None = None

    @property
    def should_run(self) -> bool:
        """Whether the driver should run, because it is installed and enabled."""
        return self.installed and self.enabled


class Command(Message, frozen=True, omit_defaults=True):
    """An operation that the agent must do on its host, once per `id`. `number` orders the commands of all hosts.

    The agent must begin within `start_s` seconds after the arrival, or answer `refused`. After `end_s` seconds nobody
    waits for the result. `drivers.plan.Ask` describes the other fields. The agent answers an `op` that it does not know
    with `refused`.
    """

    number: NonNegativeInt
    id: Annotated[str, Meta(max_length=36)]
    op: Word
    start_s: float
    end_s: float
    driver: Annotated[str, Meta(max_length=64)] = ""
    key: Annotated[str, Meta(max_length=255)] = ""
    deployable: Annotated[str, Meta(max_length=255)] = ""
    handle: AttachHandle | None = None
    uuid: Annotated[str, Meta(max_length=36)] = ""
    consumer: Annotated[str, Meta(max_length=36)] = ""
    layout: Annotated[dict[str, str], Meta(max_length=64)] = {}
    image: ImageRef | None = None
    writer: NonNegativeInt = 0
    payload: Annotated[str, Meta(max_length=MAX_PAYLOAD_CHARS)] = ""
    """For `placement` only: `writer` is the writer's epoch for which the command was made, and `payload` is the input
    of `placement_sync.agent_writer`."""
    wish: Wish | None = None
    """For `configure` only: the wanted state of the `driver`."""


class Writer(Message, frozen=True):
    """The epoch of the present Placement writer.

    The gateway sends it to each agent whose Hello has `writes`, whenever the agent has not been sent this epoch yet:
    after the connection begins, and after every change of the writer.

    An agent writes to Placement only for a command with the highest epoch that it has received on its current
    connection, from this message or from a command, and only while the gateway answers its heartbeats.
    """

    epoch: NonNegativeInt


class Watch(Message, frozen=True):
    """Asks for Samples: at once, then every `every_s` seconds until `for_s` seconds have passed.

    A later Watch replaces an earlier one. `for_s` 0 asks for a single message. A Watch that only prolongs the present
    one need not be answered at once. Agents that are older than samples ignore it.
    """

    every_s: float
    for_s: float


class Welcome(Message, frozen=True):
    """First message of a gateway.

    `beat_s`: seconds between heartbeats. `epoch`: the highest epoch ever seen from this host; an agent whose own epoch
    is lower raises it above this one and reconnects. `applied_hash`: hash of the report last applied for this host, ''
    if none or unknown. `max_bytes`: maximum size of a message. `jitter_s`: seconds over which the agent spreads its
    report. A further Welcome on the same connection replaces `applied_hash` and `jitter_s`: with '' the gateway asks
    for the report again. Agents older than that drop it.
    """

    beat_s: float
    epoch: NonNegativeInt
    applied_hash: str
    max_bytes: int
    jitter_s: float = 0.0


class Ack(Message, frozen=True):
    """Acknowledges a message; `of` is Report, Beat, NewKey or Result.

    All except a Beat's are sent after a commit, so that the acknowledged content cannot be lost.
    """

    seq: NonNegativeInt
    of: str = "Report"


class Refuse(Message, frozen=True):
    """Sent before the gateway closes the connection. `code` is for programs, `reason` for people."""

    code: Word
    reason: Text


class Probe(Message, frozen=True):
    """Asks for an Alive with the same nonce, because another connection with this agent's key has been opened."""

    nonce: Nonce


class CertificateAnnouncement(Struct, frozen=True):
    """Says that the certificate `fingerprint` of the agents' listener replaces the certificate `replaces`.

    Both are accepted until `both_until` (seconds since 1970), afterwards only the new one. `number` orders
    announcements. `signature` is that of the announcement key, in base64url (`agents.certificates`).
    """

    number: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    replaces: Fingerprint
    fingerprint: Fingerprint
    both_until: Annotated[int, Meta(ge=0, le=253_402_300_799)]  # the end of the year 9999
    signature: Annotated[str, Meta(max_length=128)]


class Certificates(Message, frozen=True):
    """The public half of the announcement key, and all announcements of certificates.

    The gateway sends it after Welcome if such a key is configured, and again when there are further announcements. The
    agent keeps them in its journal, and then sends Hello again, with the newest certificate. An agent that has no
    announcement key yet keeps this one for ever; later it ignores any other. Agents older than that drop the message.
    """

    announcement_key: Annotated[str, Meta(max_length=64)]
    announcements: Annotated[tuple[CertificateAnnouncement, ...], Meta(max_length=MAX_ANNOUNCEMENTS)] = ()


class Rotate(Message, frozen=True):
    """Asks the agent to make and store a new key and to send it as NewKey, because an operator has asked for one."""


FromAgent = Hello | Report | Beat | Alive | NewKey | Taken | Progress | Result | Samples
FromGateway = Welcome | Ack | Refuse | Probe | Rotate | Command | Writer | Watch | Certificates

_encode_json = msgspec.json.Encoder().encode
_agent_decoder = msgspec.json.Decoder(FromAgent)
_gateway_decoder = msgspec.json.Decoder(FromGateway)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_known_types = {
    "from_agent": {kind.__name__ for kind in get_args(FromAgent)},
    "from_gateway": {kind.__name__ for kind in get_args(FromGateway)},
}


class UnknownMessage(Struct, frozen=True):
    """A message of a type that this release does not know; the receiver counts and drops it."""

    type: str


class MalformedMessageError(AgentsError):
    """Raised for bytes that are not a valid message. The text can be sent as the reason of a Refuse."""


def encode_message(message: Message) -> str:
    """Encode a message as the JSON text of one frame. Nothing is validated: msgspec checks values only when it decodes
    them."""
    return _encode_json(message).decode()


def decode_from_agent(data: bytes | str) -> FromAgent | UnknownMessage:
    """Decode and validate a message of an agent. Return UnknownMessage for an unknown type.

    Raise MalformedMessageError if it is not JSON, or if a field is missing or breaks a limit.
    """
    try:
        message: FromAgent = _agent_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        return _unknown_message_or_raise(data, error, "from_agent")
    return message


def decode_from_gateway(data: bytes | str) -> FromGateway | UnknownMessage:
    """Decode and validate a message of a gateway. Return UnknownMessage for an unknown type.

    Raise MalformedMessageError if it is not JSON, or if a field is missing or breaks a limit.
    """
    try:
        message: FromGateway = _gateway_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        return _unknown_message_or_raise(data, error, "from_gateway")
    return message


def _unknown_message_or_raise(data: bytes | str, error: Exception, sender: str) -> UnknownMessage:
    """Return UnknownMessage if the type of `data` is none of those that `sender` (a key of `_known_types`) can send.

    Otherwise raise MalformedMessageError with the text of `error`.
    """
    try:
        name: Any = msgspec.json.decode(_fields_decoder.decode(data).get("type", msgspec.Raw(b"null")))
    except (msgspec.DecodeError, RecursionError):
        name = None
    if isinstance(name, str) and name not in _known_types[sender]:
        return UnknownMessage(name[:64])
    raise MalformedMessageError(str(error)[:500]) from None


def count_unknown_fields(data: bytes | str, message: Message | UnknownMessage) -> int:
    """Return how many top-level fields of `data` this release ignored. It decodes the whole text again.

    Call it only for peers that also offer a wire version unknown to this release.
    """
    if isinstance(message, UnknownMessage):
        return 0
    known = {*message.__struct_fields__, "type"}
    return sum(1 for name in _fields_decoder.decode(data) if name not in known)


def hash_report_content(drivers: tuple[DriverReport, ...], boot_id: str = "") -> str:
    """Return the hash of a report's content, 40 hexadecimal digits. It does not depend on the order of the drivers."""
    ordered = sorted(drivers, key=lambda d: d.driver)
    return hashlib.blake2b(_encode_json(ordered) + boot_id.encode(), digest_size=20).hexdigest()
