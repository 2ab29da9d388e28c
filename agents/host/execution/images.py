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

CHALLENGE_S = 10.0
"""Time-out in seconds for the challenge of a download."""
BUSY_S = 120.0
"""How long, in seconds, a download is retried while the gateway is busy (503)."""
PAUSE_S = 1.0
"""Shortest pause in seconds between two such retries; the gateway's Retry-After can make it longer."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9-]{1,36}")


class Images:
    """The directory of downloaded images.

    Each download is authenticated like a connection: signed with the current key, in the journal's epoch (`epoch()`).
    """

    def __init__(self, directory: Path, gateway: http.Gateway, keys: Keyring, epoch: Callable[[], int]) -> None:
        self._directory, self._gateway, self._keys, self._epoch = directory, gateway, keys, epoch
        self._one_at_a_time = asyncio.Lock()
        self._users: Counter[str] = Counter()

    def clear(self) -> None:
        """Delete all images. Call it only while no command uses one."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def here(self, ref: wire.ImageRef) -> Image:
        """Describe the image as drivers get it, with the path of its local file, whether that file exists or not."""
        return Image(str(self._directory / ref.sha256), ref.size, ref.sha256, ref.name, dict(ref.properties))

    @asynccontextmanager
    async def lent(self, ref: wire.ImageRef, progress: Callable[[int], None]) -> AsyncIterator[Image]:
        """Download the image if it is not there yet, and yield it; delete its file when the last user leaves.

        One image is downloaded at a time; `progress` gets percent. Raises Invalid when the command's reference or the
        image's content is wrong, Failed when the image cannot be downloaded or stored.
        """
        if not _SHA256.fullmatch(ref.sha256) or not _ID.fullmatch(ref.id):
            raise Invalid("the command's image has an id or a SHA-256 that this agent cannot use")
        image = self.here(ref)
        self._users[ref.sha256] += 1
        try:
            async with self._one_at_a_time:
                if not os.path.exists(image.path):  # another command may have downloaded it
                    await self._bring(ref, Path(image.path), progress)
            yield image
        finally:
            self._users[ref.sha256] -= 1
            if not self._users[ref.sha256]:
                del self._users[ref.sha256]
                with suppress(OSError):
                    os.unlink(image.path)

    async def _bring(self, ref: wire.ImageRef, path: Path, progress: Callable[[int], None]) -> None:
        """Download the image to `path` if the disk has room for it. Raises Invalid and Failed."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if (free := shutil.disk_usage(self._directory).free) < ref.size:
                raise Failed(f"the image {ref.name} has {ref.size} bytes, and {self._directory} has room for {free}")
            await self._fetch(ref, path, progress)
        except http.HttpStatusError as error:
            raise Failed(f"the image {ref.name} cannot be downloaded: {error}") from None
        except TimeoutError:
            raise Failed(f"the image {ref.name} cannot be downloaded: the gateway sends nothing") from None
        except (OSError, wire.MalformedMessageError) as error:
            raise Failed(f"the image {ref.name} cannot be downloaded: {error}") from None

    async def _fetch(self, ref: wire.ImageRef, path: Path, progress: Callable[[int], None]) -> None:
        """Download the image; retry for BUSY_RETRY_S seconds while the gateway answers 503.

        A gateway is busy, for example, while many hosts connect at once. Raises as `_download_once`.
        """
        clock = asyncio.get_running_loop().time
        give_up = clock() + BUSY_S
        while True:
            try:
                return await self._download(ref, path, progress)
            except http.HttpStatusError as error:
                pause = max(error.retry_after, PAUSE_S) * (1 + random.random() / 2)
                if error.status != 503 or clock() + pause > give_up:
                    raise
                await asyncio.sleep(pause)

    async def _download(self, ref: wire.ImageRef, path: Path, progress: Callable[[int], None]) -> None:
        """Download once into a temporary file, check size and SHA-256, and rename it to `path`.

        Raises Invalid, Failed, http.HttpStatusError, OSError and wire.MalformedMessageError.
        """
        context = http.tls(self._gateway)
        challenge, gateway = await http.challenge(self._gateway, context, CHALLENGE_S)
        credential = self._keys.current.credential(challenge, self._epoch(), self._gateway.fingerprint, "")
        unfinished = path.with_suffix(f".{ref.id}.new")
        digest, size = hashlib.sha256(), 0
        try:
            unfinished.unlink(missing_ok=True)
            with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:

                def take(piece: bytes) -> None:
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
                await http.download(gateway, context, address, credentials.authorization(credential), take)
            _check(ref, size, digest.hexdigest())
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _check(ref: wire.ImageRef, size: int, found: str) -> None:
    """Raise Failed when the image is too short, Invalid when `actual_sha256` is not the command's."""
    problem: DriverError | None = None
    if size != ref.size:
        problem = Failed(f"the image {ref.name} ended after {size} of {ref.size} bytes")
    elif found != ref.sha256:
        problem = Invalid(f"the image {ref.name} has the SHA-256 {found}, the command says {ref.sha256}")
    if problem:
        raise problem
