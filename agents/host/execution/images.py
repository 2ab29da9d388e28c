"""Fetch bitstreams and firmware from the gateway, check them, and delete them after use.

An image gets its final file name only when its size and SHA-256 are those in the command, so no other content reaches a
device.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agents import credentials, wire
from agents.host.connection import http
from agents.host.connection.identity import Keyring
from drivers.errors import DriverError, Failed, Invalid
from drivers.plan import Image

CHALLENGE_TIMEOUT_S = 10.0
"""Time-out in seconds for the challenge of a download."""
BUSY_RETRY_S = 120.0
"""How long, in seconds, a download is retried while the gateway is busy (503)."""
MIN_RETRY_PAUSE_S = 1.0
"""Shortest pause in seconds between two such retries; the gateway's Retry-After can make it longer."""
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
_ID_PATTERN = re.compile(r"[A-Za-z0-9-]{1,36}")


class ImageCache:
    """The directory of downloaded images.

    Each download is authenticated like a connection: signed with the current key, in the journal's epoch (`epoch()`).
    `get_gateway()` returns the gateway with the certificates that are accepted now.
    """

    def __init__(
        self,
        directory: Path,
        get_gateway: Callable[[], http.GatewayEndpoint],
        keys: Keyring,
        epoch: Callable[[], int],
    ) -> None:
        self._directory, self._get_gateway, self._keys, self._epoch = directory, get_gateway, keys, epoch
        self._download_lock = asyncio.Lock()
        self._user_counts: Counter[str] = Counter()

    def delete_all(self) -> None:
        """Delete all images; errors are ignored. Call it only while no command uses an image."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def to_driver_image(self, ref: wire.ImageRef) -> Image:
        """Describe the image as drivers get it, with the path of its local file, whether that file exists or not."""
        return Image(str(self._directory / ref.sha256), ref.size, ref.sha256, ref.name, dict(ref.properties))

    @asynccontextmanager
    async def provide_image(
        self, ref: wire.ImageRef, progress: Callable[[int], None], end_by: float
    ) -> AsyncIterator[Image]:
        """Download the image if it is not there yet, and yield it; delete its file when the last user leaves.

        One image is downloaded at a time; `progress` gets percent. Raises Invalid when the command's reference or the
        image's content is wrong, Failed when the image cannot be downloaded or stored, also when it is not there at
        `end_by` on the event loop's clock.
        """
        if not _SHA256_PATTERN.fullmatch(ref.sha256) or not _ID_PATTERN.fullmatch(ref.id):
            raise Invalid("the command's image has an id or a SHA-256 that this agent cannot use")
        image = self.to_driver_image(ref)
        self._user_counts[ref.sha256] += 1
        try:
            try:
                async with asyncio.timeout_at(end_by), self._download_lock:
                    if not os.path.exists(image.path):  # another command may have downloaded it
                        await self._download_image(ref, Path(image.path), progress)
            except TimeoutError:
                raise Failed(f"the image {ref.name} was not downloaded within the time limit of the command") from None
            yield image
        finally:
            self._user_counts[ref.sha256] -= 1
            if not self._user_counts[ref.sha256]:
                del self._user_counts[ref.sha256]
                with suppress(OSError):
                    os.unlink(image.path)

    async def _download_image(self, ref: wire.ImageRef, path: Path, progress: Callable[[int], None]) -> None:
        """Download the image to `path` if the disk has room for it.

        Raises Invalid when the image is too long or has another SHA-256, Failed for everything else: no room, an image
        that is too short, a refusal, the network or the disk.
        """
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if (free := shutil.disk_usage(self._directory).free) < ref.size:
                raise Failed(f"the image {ref.name} has {ref.size} bytes, and {self._directory} has room for {free}")
            await self._download_with_retry(ref, path, progress)
        except http.HttpStatusError as error:
            raise Failed(f"the image {ref.name} cannot be downloaded: {error}") from None
        except TimeoutError:
            raise Failed(f"the image {ref.name} cannot be downloaded: the gateway sends nothing") from None
        except (OSError, wire.MalformedMessageError) as error:
            raise Failed(f"the image {ref.name} cannot be downloaded: {error}") from None

    async def _download_with_retry(self, ref: wire.ImageRef, path: Path, progress: Callable[[int], None]) -> None:
        """Download the image; retry for BUSY_RETRY_S seconds while the gateway answers 503.

        A gateway is busy, for example, while many hosts connect at once. Raises as `_download_once`.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + BUSY_RETRY_S
        while True:
            try:
                return await self._download_once(ref, path, progress)
            except http.HttpStatusError as error:
                pause = max(error.retry_after, MIN_RETRY_PAUSE_S) * (1 + random.random() / 2)
                if error.status != 503 or clock() + pause > deadline:
                    raise
                await asyncio.sleep(pause)

    async def _download_once(self, ref: wire.ImageRef, path: Path, progress: Callable[[int], None]) -> None:
        """Try once to download the image into a temporary file, check size and SHA-256, and rename it to `path`.

        `progress` gets percent. Raises Invalid if the image is too long or has another SHA-256, Failed if it is too
        short, http.HttpStatusError if the gateway refuses (503: it is busy, try again later), OSError if the network or
        the disk fails, and wire.MalformedMessageError if the gateway's answer cannot be read.
        """
        known = self._get_gateway()
        challenge, gateway = await http.fetch_challenge(known, http.create_tls_context(known), CHALLENGE_TIMEOUT_S)
        context = http.create_tls_context(gateway)
        credential = self._keys.current_identity.create_credential(challenge, self._epoch(), gateway.fingerprint, "")
        unfinished = path.with_suffix(f".{ref.id}.new")
        digest, size = hashlib.sha256(), 0
        try:
            unfinished.unlink(missing_ok=True)
            with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:

                def write_piece(piece: bytes) -> None:
                    """Append a piece to the file and the digest, and report the progress. Raises Invalid when the image
                    is too long, and OSError."""
                    nonlocal size
                    size += len(piece)
                    if size > ref.size:
                        raise Invalid(
                            f"the image {ref.name} is longer than the {ref.size} bytes that the command names"
                        )
                    digest.update(piece)
                    file.write(piece)
                    progress(size * 100 // max(ref.size, 1))

                address = wire.IMAGE_PATH + ref.id
                await http.download_file(
                    gateway, context, address, credentials.encode_authorization(credential), write_piece
                )
            _verify_image(ref, size, digest.hexdigest())
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _verify_image(ref: wire.ImageRef, size: int, actual_sha256: str) -> None:
    """Raise Failed when the image is too short, Invalid when `actual_sha256` is not the command's."""
    problem: DriverError | None = None
    if size != ref.size:
        problem = Failed(f"the image {ref.name} ended after {size} of {ref.size} bytes")
    elif actual_sha256 != ref.sha256:
        problem = Invalid(f"the image {ref.name} has the SHA-256 {actual_sha256}, the command says {ref.sha256}")
    if problem:
        raise problem
