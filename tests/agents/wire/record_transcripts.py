"""Record the messages between the real gateway and the real agent.

Use `python -m tests.agents.wire.record_transcripts STORY`.

It starts a PostgreSQL of its own, the gateway behind the product's WebSocket settings, and `agents.host.main` as a
process with the fake driver; then it plays a story. In `operators_day` the agent joins and reports, a device is
installed, programmed with an image, reset and asked for its health, a handle is attached and detached, samples are
watched, the agent is probed, its key is changed, and it is revoked. Every frame of both directions is written to
`transcripts/release_<version>_wire_<version>/<story>.jsonl`. Values that differ from run to run (uuids, times, hashes,
keys, nonces) are replaced by placeholders of the same type, so that a new recording differs only where the protocol
does. The first line has the JSON schema of all messages.

Run it once for each release, and again with `--overwrite` after an intended change of the protocol before that release
is out; `test_transcripts_recorded.py` fails until then. A recording of an earlier release is never made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import certificates, credentials
from tests.support.environment import without_settings

TRANSCRIPTS = Path(__file__).parent / "transcripts"
ROOT = Path(__file__).parents[3]
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
EPOCH = re.compile(r"\b1[78]\d{8}\b")
HEX = re.compile(r"\b[0-9a-f]{32,64}\b")
PLACEHOLDERS: dict[str, Any] = {
    "agent_version": "0.1.0",
    "boot_id": "boot-1",
    "epoch": 1_795_260_445,
    "public_key": "k" * 44,
    "signature": "s" * 88,
    "proof": "p" * 88,
    "nonce": "n" * 24,
    "beat_s": 0.2,
    "start_s": 30.0,
    "end_s": 60.0,
    "for_s": 30.0,
    "values": {"power_watts": 1.0},
    "log": "the last lines of the log",
    "report": "the report as text",
    "jitter_s": 0.0,
}
Line = dict[str, Any]


def recording_path(story: str) -> Path:
    """Return where this release's recording of a story belongs: the folder is named after release and wire version."""
    from agents import wire

    release, wire_version = metadata.version("cyborgweb"), wire.VERSIONS[0].rpartition(".")[2]
    return TRANSCRIPTS / f"release_{release}_wire_{wire_version}" / f"{story}.jsonl"


def message_schemas() -> dict[str, Any]:
    """Return the JSON schema of every message of both directions in this release."""
    from agents import wire

    def anything(_: object) -> dict[str, Any]:
        """Return the schema of a value that the wire does not look into."""
        return {"description": "anything"}

    return {
        "agent": msgspec.json.schema(wire.FromAgent, schema_hook=anything),
        "gateway": msgspec.json.schema(wire.FromGateway, schema_hook=anything),
    }


def replace_volatile_values(value: Any, name: str = "") -> Any:
    """Return a message with placeholders for the fields in PLACEHOLDERS, and for uuids, epochs and hashes in texts."""
    if name in PLACEHOLDERS and value:
        return PLACEHOLDERS[name]
    if isinstance(value, dict):
        return {key: replace_volatile_values(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [replace_volatile_values(one) for one in value]
    if isinstance(value, str):
        value = UUID.sub("00000000-0000-4000-8000-000000000000", value)
        value = EPOCH.sub(str(PLACEHOLDERS["epoch"]), value)
        return HEX.sub(lambda found: "7" * len(found[0]), value)
    return value


class Recorder:
    """An ASGI application around the gateway that keeps every frame."""

    def __init__(self, gateway: Any) -> None:
        self.gateway = gateway
        self.lines: list[Line] = []

    @property
    def serve_challenge(self) -> Any:
        """The gateway's HTTP application, as a test's web server asks for it."""
        return self.gateway.serve_challenge

    def probe(self) -> None:
        """Have the gateway ask whether the agent still holds its connection, as it does when a second one comes."""
        (session,) = self.gateway.sessions.by_host.values()
        asked = asyncio.run_coroutine_threadsafe(self.gateway.sessions.probe(session), session.task.get_loop())
        assert asked.result(20), "the agent did not answer the probe"

    def keep_frame(self, side: str, text: str) -> None:
        """Append a frame to the recording; `side` is its sender."""
        self.lines.append({"from": side, "message": json.loads(text)})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            from cyborgweb import asgi

            await asgi.HttpApplication(self.gateway, None)(scope, receive, send)  # type: ignore[arg-type]
            return

        async def heard() -> Any:
            event = await receive()
            if event["type"] == "websocket.receive":
                self.keep_frame("agent", event.get("text") or event["bytes"].decode())
            return event

        async def said(event: Any) -> None:
            if event["type"] == "websocket.send":
                self.keep_frame("gateway", event["text"])
            await send(event)

        await self.gateway(scope, heard, said)

    def wait_for_messages(self, kind: str, count: int = 1) -> None:
        """Wait until `count` messages of this kind have been recorded."""
        from tests.support.webserver import until

        until(lambda: sum(line["message"]["type"] == kind for line in self.lines) >= count)


def write_announcement(file: Path) -> str:
    """Write a file with one announcement of a certificate, always the same; return the announcement key."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    announcement = certificates.sign_announcement(key, 1, "7" * 64, "8" * 64, 1_895_260_445)
    file.write_text(certificates.encode_announcement(announcement))
    return credentials.encode_public_key(key.public_key())


def record_story(directory: Path, story: Callable[[Recorder], None]) -> list[Line]:
    """Run a story between the gateway and an agent that joins it; return the frames."""
    os.environ |= {"CYBORG_STATE_DIR": str(directory), "CYBORG_LEASE_FLUSH_S": "0.1", "CYBORG_BEAT_S": "0.2"}
    os.environ["CYBORG_AGENT_ANNOUNCEMENT_KEY"] = write_announcement(directory / "agent-announcements")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
    from cyborgweb.database.postgres import Postgres

    postgres = Postgres(directory / "postgres", os.environ.get("CYBORG_PG_BIN", ""), durable=False)
    postgres.start()
    try:
        postgres.ensure_database("cyborg")
        import django

        django.setup()
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", verbosity=0)
        from agents import authentication
        from agents.gateway.asgi_app import AgentGateway
        from cyborgweb.settings.keys import get_keys
        from tests.support.webserver import serving

        gateway = AgentGateway(get_keys())
        recorder = Recorder(gateway)
        with serving(recorder) as port:
            join = authentication.create_join_token(
                "cmp1", address=f"http://127.0.0.1:{port}", hours=1, created_by="recorder"
            )
            control = directory / "control.json"
            control.write_text('{"count": 2, "handles": 2, "install": ["power"], "handle_type": "MDEV"}')
            settings = directory / "agent.toml"
            settings.write_text(f'[fake_driver]\ncontrol_file = "{control}"\n')
            agent = {
                "CYBORG_AGENT_STATE_DIR": str(directory / "agent"),
                "CYBORG_HOST_NODE": "cmp1",
                "CYBORG_JOIN_TOKEN": join,
                "CYBORG_ENABLED_DRIVERS": "fake_driver",
                "CYBORG_DRIVER_SETTINGS": str(settings),
                "CYBORG_UEVENT_DEBOUNCE_MS": "20",
            }
            command = [sys.executable, "-m", "agents.host.main", "--die-with-parent"]
            process = subprocess.Popen(command, cwd=ROOT, env=without_settings(**agent))
            try:
                story(recorder)
            finally:
                process.terminate()
                process.wait(10)
        gateway.stop()
        connections.close_all()
        return recorder.lines
    finally:
        postgres.stop()


def operators_day(recorder: Recorder) -> None:
    """Play a story in which every type of message is sent; each step waits until the agent has answered."""
    from accelerators.commands import command_queue
    from accelerators.devices import lifecycle
    from accelerators.domain.caller import Caller
    from accelerators.domain.states import EventSource
    from accelerators.images import download, store
    from accelerators.models import AcceleratorRequest, Command, Deployable, Device, DeviceProfile, Host
    from accelerators.requests import binding
    from accelerators.workflows import command_endings
    from agents import jobs, key_revocation, telemetry
    from tests.support.webserver import until

    nova = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)

    def work() -> bool:
        """Run the jobs; return whether all commands have ended."""
        jobs.merge()
        download.run()
        while command_endings.end_answered_commands():
            pass
        return not Command.objects.filter(ended_at__isnull=True).exists()

    def ended() -> None:
        until(work)
        failed = Command.objects.exclude(outcome="succeeded").values_list("op", "text")
        assert not failed, list(failed)

    recorder.wait_for_messages("Report")
    until(lambda: work() and Device.objects.count() == 2)
    first, second = Device.objects.order_by("key")
    for device in (first, second):
        lifecycle.enable_device(device.uuid, nova)
        ended()
    image = store.store_upload([b"bits"], 4, "an image", {}, nova, EventSource.API)
    command_queue.order_device_command("program", second.uuid, nova, image=image.uuid)
    ended()
    for op in ("health", "reset"):
        command_queue.order_device_command(op, second.uuid, nova)
        ended()
    for op in ("rescan", "report", "logs"):
        command_queue.order_host_command(op, Host.objects.get().uuid, nova)
        ended()
    from accelerators import conductor

    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    (request,) = binding.create_requests("one", nova)
    provider = str(Deployable.objects.get(device=first).rp_uuid)
    binding.bind_requests([binding.BindSpec(request, "cmp1", provider, "aaaaaaaa-0000-4000-8000-000000000000")], nova)
    ended()
    assert AcceleratorRequest.objects.get().state == "Bound"
    binding.delete_requests([request], nova)
    ended()
    telemetry.request_periodic_loads([Host.objects.get().id], 1.0, 30.0)
    recorder.wait_for_messages("Samples")
    recorder.probe()
    key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")
    recorder.wait_for_messages("NewKey")
    until(lambda: any(line["message"].get("of") == "NewKey" for line in recorder.lines))
    key_revocation.revoke_agent(key_revocation.find_agent("cmp1"), "olga", "")
    recorder.wait_for_messages("Refuse")


def drop_repeated_messages(lines: list[Line]) -> list[Line]:
    """Return the lines with only the first of those whose number differs from run to run.

    These are heartbeats, their acknowledgements, watches and samples, and the progress of each command.
    """
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for line in lines:
        message = line["message"]
        kind = message["type"]
        if kind in ("Beat", "Samples", "Watch") or message.get("of") == "Beat":
            once: tuple[Any, ...] = (kind, message.get("of"))
        elif kind == "Progress":
            once = (kind, message["number"])
        else:
            once = (len(seen),)
        if once not in seen:
            seen.add(once)
            kept.append(line)
    return kept


STORIES = {"operators_day": operators_day}
"""The stories that can be recorded, by name. Do not change a recorded story, because its recording is played with it:
add a new story for the messages of a later release."""


def main() -> None:
    """Record one story and write its file."""
    parser = argparse.ArgumentParser(prog="record_transcripts", description="Record this release's protocol.")
    parser.add_argument("story", choices=STORIES)
    parser.add_argument("--overwrite", action="store_true", help="replace one of a release that is not out yet")
    arguments = parser.parse_args()
    path = recording_path(arguments.story)
    if path.exists() and not arguments.overwrite:
        parser.error(f"{path} exists: raise the version in pyproject.toml, or give --overwrite if it is not out yet")
    head = {"release": metadata.version("cyborgweb"), "recorded": True, "schema": message_schemas()}
    with tempfile.TemporaryDirectory(prefix="cyborg-record-") as directory:
        lines = drop_repeated_messages(record_story(Path(directory), STORIES[arguments.story]))
    told = [head, *({"from": line["from"], "message": replace_volatile_values(line["message"])} for line in lines)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in told))
    sys.stdout.write(f"{len(lines)} messages in {path}\n")


if __name__ == "__main__":
    main()
