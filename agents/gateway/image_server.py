"""ASGI application that serves images for programming devices at `/ws/agent/image/<id>`.

A host may fetch an image only while an open command of that host names it. The agent authenticates as it does for a
connection (`authentication`): a signed challenge in `Authorization`. The application runs on the event loop and uses
the database and the disk in its own threads. It is mounted on both listeners.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

from django.db import InterfaceError, OperationalError, connection

from accelerators.images import store
from accelerators.models import Command
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.runtime import database_outage
from agents import authentication, credentials, key_revocation, wire
from agents.authentication import Challenges, ConnectionRejectedError, IssuedNonce
from agents.gateway.rejections import RefusalCounter
from agents.gateway.upgrade_request import client_address

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""Bytes that are read and sent at a time."""
MAX_TRANSFERS = 64
"""Maximum number of images that are sent at the same time; further requests get a 503."""
LOOKUP_TIMEOUT_S = 8.0
"""Seconds to wait for the database and the file before the request is refused with a 503."""
STALL_TIMEOUT_S = 60.0
"""Seconds after which the transfer to an agent that reads nothing is ended."""
IMAGE_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ResultT = TypeVar("ResultT")


class ImageServer:
    """The ASGI application. `challenges` and `refusals` are those of the process's gateway."""

    def __init__(self, challenges: Challenges, refusals: RefusalCounter) -> None:
        self._challenges, self._refusals = challenges, refusals
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="imagery")
        self.transfer_count = 0

    async def __call__(self, scope: Any, receive: Any, send: Any, fingerprints: Iterable[str] = ("",)) -> None:
        """Serve one GET; `fingerprints` are those of the certificates that the agent may have pinned.

        A refused request gets a JSON error and is recorded, unless only its method was wrong: 401 for the credential,
        403 if this host may not have the image, 404 if there is no such image, 405 for the method, 503 if MAX_TRANSFERS
        run or the database does not answer.
        """
        host = ""
        try:
            if scope["method"] != "GET":
                raise ConnectionRejectedError(405, "method", "only GET is allowed")
            if self.transfer_count >= MAX_TRANSFERS:
                raise ConnectionRejectedError(503, "busy", "too many images are being fetched: try again later")
            credential = authentication.read_credential(scope)
            host = credential.host
            _, nonce = authentication.verify_credential(credential, self._challenges, fingerprints)
            self.transfer_count += 1
            try:
                file, size = await self._open_image(credential, nonce, scope["path"].removeprefix(wire.IMAGE_PATH))
                try:
                    await self._send_file(file, size, receive, send)
                finally:
                    await self._run_in_thread(file.close)
            finally:
                self.transfer_count -= 1
        except ConnectionRejectedError as refused:
            if refused.status != 405:
                self._refusals.add(
                    refused.proven_host, refused.code, refused.reason, claimed=host, address=client_address(scope)
                )
            headers, body = authentication.build_denial(refused)
            await send({"type": "http.response.start", "status": refused.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _open_image(
        self, credential: credentials.Credential, nonce: IssuedNonce, image_id: str
    ) -> tuple[BinaryIO, int]:
        """Open the image in a thread, if the credential's host may have it; return the file and its size in bytes.

        Raise ConnectionRejectedError, also a 503 if the database is down or slower than LOOKUP_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await self._run_in_thread(lambda: _open_image_for_agent(credential, nonce, image_id))
        except (TimeoutError, OperationalError, InterfaceError) as error:
            database_outage.log_outage(error)
            raise ConnectionRejectedError(503, "database", "the database does not answer: try again later") from None

    async def _send_file(self, file: BinaryIO, size: int, receive: Any, send: Any) -> None:
        """Send the file in chunks as fast as the agent reads.

        Stop when it disconnects, or reads nothing for STALL_TIMEOUT_S. Raise OSError if the file ends early.
        """
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            remaining = size
            while remaining and not disconnect.done():
                chunk = await self._run_in_thread(lambda: file.read(min(CHUNK_BYTES, size)))
                if not chunk:
                    raise OSError("the image's file has become shorter")
                remaining -= len(chunk)
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": chunk, "more_body": remaining > 0})
        except TimeoutError:
            log.info("an agent stopped reading the image that it requested: its connection is closed")
        finally:
            disconnect.cancel()
            with suppress(asyncio.CancelledError):
                await disconnect

    async def _run_in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in one of this application's four threads and return its result, or raise its exception."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def _wait_for_disconnect(receive: Any) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _open_image_for_agent(
    credential: credentials.Credential, nonce: IssuedNonce, image_id: str
) -> tuple[BinaryIO, int]:
    """Open an image for the host that a verified credential belongs to; return the file and its size in bytes.

    Raise ConnectionRejectedError: 401 if the nonce is not accepted; 403 if the key is barred or not enrolled for this
    host, or if no unanswered command of the host names the image; 404 if the id is not a uuid or the file is gone. Its
    `proven_host` is the host of the key. Raise database errors. For a thread: it closes the thread's database
    connection.
    """
    try:
        (lookup,) = authentication.find_enrolled([(credential.public_key, False, nonce)])
        if not lookup.is_accepted:
            raise authentication.reject_nonce()
        identity = lookup.agent
        with authentication.naming_proven_host(identity.host if identity else ""):
            if identity is None or identity.host != credential.host:
                raise ConnectionRejectedError(
                    403, "not-enrolled", f"this key does not belong to host {credential.host!r}"
                )
            if identity.barred:
                reason = key_revocation.explain_bar(identity.barred, identity.barred_reason, identity.host)
                raise ConnectionRejectedError(403, identity.barred, reason)
            if not IMAGE_ID.fullmatch(image_id):
                raise ConnectionRejectedError(404, "no-image", "the path must end in the uuid of an image")
            unanswered_commands = Command.objects.filter(COMMAND_IS_OPEN, host=identity.host_id, answered_at=None)
            if not unanswered_commands.filter(arguments__image__id=image_id).exists():
                raise ConnectionRejectedError(
                    403, "not-ordered", f"no open command of host {identity.host!r} names image {image_id}"
                )
            try:
                path = store.get_image_path(image_id)
                return path.open("rb"), path.stat().st_size
            except OSError:
                raise ConnectionRejectedError(
                    404, "no-image", f"image {image_id} is no longer stored: order the command again"
                ) from None
    finally:
        connection.close()
