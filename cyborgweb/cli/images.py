"""Commands for the images that devices are programmed with: upload, list and remove."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import click

from cyborgweb.cli import options
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

IMAGE_COLUMNS = ("uuid", "source", "size", "name", "properties")
CHUNK_BYTES = 1_048_576


@dataclass
class FileWithProgress:
    """A file of `size` bytes that is being sent; every read advances the progress bar `bar`, which may be None."""

    file: IO[bytes]
    size: int
    bar: Any

    def __len__(self) -> int:
        """Return the size of the whole file in bytes."""
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        """Yield the rest of the file in chunks of CHUNK_BYTES; each advances the progress bar."""
        return iter(lambda: self.read(CHUNK_BYTES), b"")

    def read(self, number: int = -1) -> bytes:
        """Return at most `number` bytes of the file, by default all that are left, and advance the progress bar."""
        chunk = self.file.read(number)
        if self.bar:
            self.bar.update(len(chunk))
        return chunk

    def readline(self, number: int = -1) -> bytes:
        """Return at most `number` bytes of the file, without regard to line ends, because an upload has no lines.

        WSGI requires this method.
        """
        return self.read(number)


def _check_properties(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> Sequence[str]:
    """Return the values unchanged. Raises BadParameter if one of them is not KEY=VALUE."""
    if wrong := next((text for text in values if "=" not in text), ""):
        raise click.BadParameter(f"{wrong}: write KEY=VALUE.")
    return values


@verb_command("image-upload", "image-upload shell.bin --property accel:function_id=AFU-1")
@click.argument("file")
@click.option("--name", help="Name of the image; by default the name of the file.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_check_properties,
    help="A property of the image, such as accel:function_id=AFU-1; can be repeated.",
)
@options.request_dry_run_option
@pass_cli_context
def image_upload(cli_context: CliContext, file: str, name: str | None, properties: Sequence[str]) -> None:
    """Store a file as an image, and print its uuid. Devices can then be programmed with it."""
    path = Path(file)
    try:
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            bar = click.progressbar(length=size, label="upload", file=sys.stderr) if sys.stderr.isatty() else None
            with bar or nullcontext():
                query = {"name": path.name if name is None else name, "property": properties}
                image = cli_context.api.upload("images/", FileWithProgress(opened, size, bar), **query)
    except OSError as error:
        raise CliError(ExitCode.REFUSED, f"{path} cannot be read: {error.strerror}.") from None
    if cli_context.output.format == "table" and not cli_context.output.columns:
        click.echo(image["uuid"])
    else:
        print_row(image, cli_context.output)


@verb_command("image-list", "image-list --json")
@options.limit_option
@options.watch_option
@pass_cli_context
def image_list(cli_context: CliContext, limit: int) -> None:
    """List the stored images: those that were uploaded, and copies of images in Glance."""
    cli_context.print_list(lambda: cli_context.fetch_rows("images/", limit), IMAGE_COLUMNS, "No images.")


@verb_command("image-remove", "image-remove 77ab0d1e-0a53-4a0c-8f0e-1c2d3e4f5a6b --yes")
@click.argument("image", type=click.UUID)
@options.yes_option
@options.request_dry_run_option
@pass_cli_context
def image_remove(cli_context: CliContext, image: UUID, yes: bool) -> None:
    """Delete a stored image. Refused while a command that has not ended needs it."""
    options.confirm(f"Remove the image {image}?", yes)
    cli_context.api.delete(f"images/{image}/")
    print_row({"removed": str(image)}, cli_context.output)
