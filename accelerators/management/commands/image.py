"""`manage.py image`: upload, list and remove the images that devices are programmed with; `--json` for scripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.images import store
from accelerators.management import shell
from accelerators.models import Image

EPILOG = """examples:
  manage.py image upload shell.bin --property accel:function_id=AFU-1
  manage.py image list --json
  manage.py image remove 6ed7c4e6-3f3a-4f0b-9d6b-1f0a3ab3e1a5

Devices can be programmed with these images, and with images in Glance, by their ids; those are copied when needed:
  manage.py command program DEVICE --image IMAGE --wait
"""
BAR_WIDTH = 30


class Command(shell.OperatorCommand):
    """Upload, list and remove images."""

    epilog = EPILOG
    help = "Upload, list and remove the images that devices are programmed with."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        upload = verbs.add_parser("upload", help="store a file as an image and print its uuid")
        upload.add_argument("file", metavar="FILE", type=Path)
        upload.add_argument("--name", help="name of the image; default: the name of the file")
        upload.add_argument(
            "--property",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="property of the image, such as accel:function_id=…; can be repeated",
        )
        verbs.add_parser("list", help="list the stored images")
        verbs.add_parser("remove", help="delete a stored image").add_argument("uuid", metavar="UUID", type=_parse_uuid)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            getattr(self, f"_{options['verb']}")(options)
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _upload(self, options: dict[str, Any]) -> None:
        path: Path = options["file"]
        pairs = [text.partition("=") for text in options["property"]]
        if wrong := next((key for key, sign, _ in pairs if not sign), ""):
            raise CommandError(f"--property {wrong}: write KEY=VALUE")
        properties = store.check_properties((key, value) for key, _, value in pairs)
        name = path.name if options["name"] is None else options["name"]
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                pieces = self._with_progress_bar(iter(lambda: file.read(store.CHUNK_BYTES), b""), size)
                image = store.store_upload(pieces, size, name, properties, shell.current_operator(), EventSource.PERSON)
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}") from None
        self.stdout.write(json.dumps(_image_to_dict(image)) if options["json"] else str(image.uuid))

    def _with_progress_bar(self, pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
        """Yield `pieces` unchanged, and show a progress bar on standard error if that is a terminal."""
        done_bytes, is_terminal = 0, self.stderr.isatty()
        for piece in pieces:
            yield piece
            done_bytes += len(piece)
            if is_terminal:
                filled = BAR_WIDTH * done_bytes // max(size, 1)
                self.stderr.write(
                    f"\r[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done_bytes >> 20} of {size >> 20} MiB", ending=""
                )
        if is_terminal:
            self.stderr.write("")

    def _list(self, options: dict[str, Any]) -> None:
        rows = [_image_to_dict(image) for image in Image.objects.all()]
        if options["json"]:
            self.stdout.write(json.dumps(rows))
            return
        for row in rows:
            words = " ".join(f"{key}={value}" for key, value in row["properties"].items())
            self.stdout.write(f"{row['uuid']}  {row['source']:6}  {row['size']:>12}  {row['name']}  {words}".rstrip())

    def _remove(self, options: dict[str, Any]) -> None:
        store.delete_image(options["uuid"], shell.current_operator(), EventSource.PERSON)
        self.stdout.write(json.dumps({"removed": str(options["uuid"])}) if options["json"] else "removed")


def _image_to_dict(image: Image) -> dict[str, Any]:
    row = store.to_image_ref(image)
    return {"uuid": row.pop("id"), **row, "source": image.source, "by": image.by}


def _parse_uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a uuid; `manage.py image list` shows the uuids") from None
