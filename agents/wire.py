"""The messages between an agent and its gateway, their limits and their versions. Pure; shared by both ends.

JSON text frames over a WebSocket at `/ws/agent`. The wire version is the WebSocket subprotocol. Unknown fields are
ignored, unknown message types are dropped and counted: an agent one version older or newer works (promise C2).

How a connection begins: `agents.credentials`. After the upgrade the gateway speaks first (`Welcome`).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from drivers.inventory import AttachHandle, DriverReport, Name, Text, Word

VERSIONS = ("cyborg.agent.1",)
"""Subprotocols this release speaks, best first."""
MAX_MESSAGE = 1024 * 1024
"""Bytes of one message, the default of `CYBORG_MAX_MESSAGE_BYTES`."""
MAX_SAMPLES = 128 * 1024
"""Bytes of one Samples: a thousand devices."""
MAX_PAYLOAD = 512 * 1024
"""Characters of a command's payload."""
PATH = "/ws/agent"
CHALLENGE_PATH = "/ws/agent/challenge"
IMAGE_PATH = "/ws/agent/image/"

KEY_BARRED = "key-barred"
"""Code of the one 403 that a new key answers: the token is good, and this key is never to come back."""

Number = Annotated[int, Meta(ge=0, le=2**53)]
Nonce = Annotated[str, Meta(max_length=64)]
OFF = ("disabled", "absent")
"""The states of a driver that does not run."""
Outcome = Literal["succeeded", "failed", "refused", "unknown"]
"""`failed`: it was tried, and undone as far as that goes. `refused`: nothing was touched. `unknown`: interrupted."""


class Message(Struct, frozen=True, tag_field="type", tag=True):
    """Base of all messages: the JSON object's `type` is the class name."""


class Hello(Message, frozen=True):
    """First message of an agent: what it is. `drivers` are the enabled ones."""

    agent_version: Word
    boot_id: Annotated[str, Meta(max_length=64, pattern=r"^[^\x00]*$")]
    drivers: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()
    ops: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()
    """The commands it takes; none of an agent that is older than commands."""
    writes: Annotated[str, Meta(max_length=500)] | None = None
    """Why it cannot write to Placement by itself, '' when it can; None of an agent that knows nothing of that."""


class Report(Message, frozen=True, omit_defaults=True):
    """The complete inventory as this host sees it. (`epoch`, `seq`) orders reports; `hash` names the content.

    `drivers` were asked; one with an `error` has the devices it had before, as has a backend. `others` do not run: a
    conductor from before they were told would take them for drivers that answered and saw nothing. `urgent`: it shows a
    fault, and goes before the reports of others.
    """

    epoch: Number
    seq: Number
    hash: Annotated[str, Meta(min_length=32, max_length=64)]
    drivers: Annotated[tuple[DriverReport, ...], Meta(max_length=64)]
    others: Annotated[tuple[DriverReport, ...], Meta(max_length=64)] = ()
    urgent: bool = False

    @classmethod
    def of(cls, epoch: int, seq: int, digest: str, told: tuple[DriverReport, ...]) -> Report:
        """With everything that is told, in its place."""
        drivers = tuple(one for one in told if one.state not in OFF)
        others = tuple(one for one in told if one.state in OFF)
        return cls(epoch, seq, digest, drivers, others, shows_fault(drivers))

    @property
    def told(self) -> tuple[DriverReport, ...]:
        """Of all drivers."""
        return (*self.drivers, *self.others)


def shows_fault(drivers: tuple[DriverReport, ...]) -> bool:
    """Whether a driver or a part of it does not answer, or a device is not well."""
    return any(
        one.error
        or any(part.error for part in one.backends)
        or any(device.status in ("failed", "degraded") for device in one.devices)
        for one in drivers
    )


class Beat(Message, frozen=True):
    """A lease renewal: I live. Answered by Ack with the same `seq`."""

    seq: Number


class Alive(Message, frozen=True):
    """Answer to a Probe: this very connection is still held by a living agent."""

    nonce: Nonce


class NewKey(Message, frozen=True):
    """Answer to Rotate: the key that is to speak for this host from now on, in base64url.

    `signature` is the present key's, `proof` the new one's, both over `rotation_bytes`. Answered by Ack with `of`
    NewKey after its commit; until then the agent keeps both keys.
    """

    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[str, Meta(max_length=128)]
    proof: Annotated[str, Meta(max_length=128)]


class Taken(Message, frozen=True):
    """These commands are in the agent's journal: they need not be sent again while it runs."""

    numbers: Annotated[tuple[Number, ...], Meta(max_length=256)]


class Progress(Message, frozen=True, omit_defaults=True):
    """How far a command is; the first one says that it has begun. Shown, not stored for ever."""

    number: Number
    percent: Annotated[int, Meta(ge=0, le=100)] = 0
    text: Annotated[str, Meta(max_length=500)] = ""


class Result(Message, frozen=True, omit_defaults=True):
    """How a command ended. Sent again after every reconnection until its Ack (`of` Result, `seq` the number) comes.

    The report (`epoch`, `seq`, `hash`) shows the host as it is since then; it was sent before. The Ack is sent when
    that report, or a later one, is applied. `text` is a sentence for the operator; `detail` holds what was asked for.
    """

    number: Number
    outcome: Outcome
    text: Text = ""
    detail: Annotated[dict[str, str], Meta(max_length=64)] = {}
    epoch: Number = 0
    seq: Number = 0
    hash: Annotated[str, Meta(max_length=64)] = ""


class DeviceLoad(Struct, frozen=True, gc=False):
    """What one device has to do at this moment. Names and units of the values: `drivers.inventory.Sample`."""

    key: Name
    values: Annotated[dict[Word, float], Meta(max_length=64)]


class Samples(Message, frozen=True):
    """Load of the devices of this host, all that could be read. Never stored, never acknowledged, the first to be shed.

    Sent once a minute, and as `Watch` says.
    """

    loads: Annotated[tuple[DeviceLoad, ...], Meta(max_length=4096)]


class ImageRef(Struct, frozen=True, omit_defaults=True):
    """An image that the gateway hands out at `IMAGE_PATH` + its `id`, to the host whose command names it."""

    id: Annotated[str, Meta(max_length=36)]
    size: Number
    sha256: Annotated[str, Meta(min_length=64, max_length=64)]
    name: Annotated[str, Meta(max_length=255)] = ""
    properties: Annotated[dict[str, str], Meta(max_length=256)] = {}


class Wish(Struct, frozen=True, omit_defaults=True):
    """What is wanted of a driver on this host, over what the host's own configuration says.

    Not `installed`: it is not run, and its settings are forgotten. `settings` None: those of the host's own file.
    """

    generation: Number
    installed: bool = True
    enabled: bool = True
    settings: dict[str, object] | None = None

    @property
    def runs(self) -> bool:
        """Whether the driver is to run."""
        return self.installed and self.enabled


class Command(Message, frozen=True, omit_defaults=True):
    """Something to be done on the host, once for its `id`. `number` orders the commands of all hosts.

    `start_s`: begin within so many seconds of its arrival or answer `refused`; `end_s`: then nobody waits any more. For
    the rest see `drivers.plan.Ask`. An op that the agent does not know is answered `refused`.
    """

    number: Number
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
    writer: Number = 0
    payload: Annotated[str, Meta(max_length=MAX_PAYLOAD)] = ""
    """Of a `placement`: the epoch of the writer that it was placed for, and what `placement_sync.direct` is to do."""
    wish: Wish | None = None
    """Of a `configure`: what is wanted of the `driver`."""


class Writer(Message, frozen=True):
    """The epoch of whoever writes to Placement now. Told whenever it changes to agents that say `writes`.

    An agent writes only for a command of the highest epoch that it was told on the very connection it has now, by this
    message or by a command, and only while the gateway answers its beats.
    """

    epoch: Number


class Watch(Message, frozen=True):
    """Somebody looks at this host: send Samples at once, then every `every_s` seconds, until `for_s` have passed.

    The next one takes its place; `for_s` 0 asks for one look. One that has the same go on for longer need not be
    answered at once. Agents that are older than samples drop it.
    """

    every_s: float
    for_s: float


class Welcome(Message, frozen=True):
    """First message of a gateway. `applied_hash` is the content last applied for this host ('' when none).

    `epoch` is the highest epoch ever seen of this host: an agent below it moves its journal above it and reconnects.
    """

    beat_s: float
    epoch: Number
    applied_hash: str
    max_bytes: int
    jitter_s: float = 0.0


class Ack(Message, frozen=True):
    """`of` is Report, Beat, NewKey or Result. All but a Beat's are sent after a commit: it will not be lost."""

    seq: Number
    of: str = "Report"


class Refuse(Message, frozen=True):
    """Sent before the gateway closes: `code` for programs, `reason` for people."""

    code: Word
    reason: Text


class Probe(Message, frozen=True):
    """Another connection with this agent's key has come: who still holds this one answers Alive."""

    nonce: Nonce


class Rotate(Message, frozen=True):
    """An operator wants this agent to have a new key: make one, store it, tell it with NewKey."""


FromAgent = Hello | Report | Beat | Alive | NewKey | Taken | Progress | Result | Samples
FromGateway = Welcome | Ack | Refuse | Probe | Rotate | Command | Writer | Watch

_encode = msgspec.json.Encoder().encode
_from_agent = msgspec.json.Decoder(FromAgent)
_from_gateway = msgspec.json.Decoder(FromGateway)
_type_only = msgspec.json.Decoder(dict[str, msgspec.Raw])
_known = {
    "from_agent": {kind.__name__ for kind in get_args(FromAgent)},
    "from_gateway": {kind.__name__ for kind in get_args(FromGateway)},
}


class Unknown(Struct, frozen=True):
    """A message of a type this release does not know: to be counted and dropped."""

    type: str


class Malformed(ValueError):
    """Bytes that are not a message. The text is fit for a Refuse's reason."""


def encode(message: Message) -> str:
    """One text frame."""
    return _encode(message).decode()


def decode_from_agent(data: bytes | str) -> FromAgent | Unknown:
    """Typed and bounded, or Unknown, or raises Malformed."""
    try:
        message: FromAgent = _from_agent.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        return _unknown(data, error, "from_agent")
    return message


def decode_from_gateway(data: bytes | str) -> FromGateway | Unknown:
    """Typed and bounded, or Unknown, or raises Malformed."""
    try:
        message: FromGateway = _from_gateway.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        return _unknown(data, error, "from_gateway")
    return message


def _unknown(data: bytes | str, error: Exception, side: str) -> Unknown:
    try:
        name: Any = msgspec.json.decode(_type_only.decode(data).get("type", msgspec.Raw(b"null")))
    except (msgspec.DecodeError, RecursionError):
        name = None
    if isinstance(name, str) and name not in _known[side]:
        return Unknown(name[:64])
    raise Malformed(str(error)[:500]) from None


def unknown_fields(data: bytes | str, message: Message | Unknown) -> int:
    """How many top-level fields of `data` this release ignored. Asked only of peers that speak a newer version."""
    if isinstance(message, Unknown):
        return 0
    known = {*message.__struct_fields__, "type"}
    return sum(1 for name in _type_only.decode(data) if name not in known)


def content_hash(drivers: tuple[DriverReport, ...]) -> str:
    """Names the content of a report: equal content, equal hash, whatever the order drivers answered in."""
    ordered = sorted(drivers, key=lambda d: d.driver)
    return hashlib.blake2b(_encode(ordered), digest_size=20).hexdigest()
