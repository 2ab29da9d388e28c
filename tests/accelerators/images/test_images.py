"""Test images: uploads, downloads from Glance, commands that wait for an image, and the removal of unused copies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from keystoneauth1.session import Session
from keystoneauth1.token_endpoint import Token

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.images import download, store
from accelerators.models import Command, Device, Event, Image
from cyborgweb.settings.keys import Keys
from drivers.configuration import ConfigurationError
from placement_sync.glance import GlanceClient as Client
from tests.support.glance import FakeGlance, glance
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.filterwarnings("ignore:The .service_type. parameter")]
OPERATOR = Caller("rita", "u1", frozenset({"admin"}), "p1")
IMAGE_CONTENT = bytes(range(256)) * 5120
OrderCommand = Callable[..., Command]


@pytest.fixture(autouse=True)
def _state_folder(settings: object, tmp_path: Path) -> Iterator[None]:
    settings.KEYS = Keys(state_dir=str(tmp_path), image_max_bytes=4 * 1024 * 1024)  # type: ignore[attr-defined]
    with download.IMAGE_SERVICE.replaced("glance", None):
        yield


@pytest.fixture
def cloud() -> Iterator[FakeGlance]:
    with glance() as known:
        session = Session(Token(known.url, "secret"))
        with download.IMAGE_SERVICE.replaced("glance", Client(lambda: session, known.url)):
            yield known


@pytest.fixture
def wait(db: None) -> OrderCommand:
    """Return `wait(bitstream_id=… | function_id=…)`, which orders a program command that needs this image.

    Each command is for a new device on a new host.
    """

    def make(**wanted: str) -> Command:
        with conductor.writing():
            n = Device.objects.count() + 1
            apply_report(get_or_create_host(f"cmp{n}"), make_driver_report(make_card(n, acts="program")))
            device = Device.objects.latest("id")
            return command_queue.place_commands([CommandOrder("program", device.uuid, arguments={"wanted": wanted})])[0]

    return make


def upload_image(content: bytes = IMAGE_CONTENT, **properties: str) -> Image:
    return store.store_upload(
        iter([content[:9], content[9:]]), len(content), "shell", properties, OPERATOR, EventSource.API
    )


def get_state_and_image_or_text(command: Command) -> tuple[str, str]:
    """Return the state of a command, and the id of its image; without an image, its text or progress message."""
    command.refresh_from_db()
    return command.state, command.arguments.get("image", {}).get("id") or command.text or command.progress


def test_an_uploaded_image_is_stored_with_its_checksum_and_upload_and_removal_make_events() -> None:
    image = upload_image(**{"accel:function_id": "AFU-1"})
    assert store.get_image_path(image.uuid).read_bytes() == IMAGE_CONTENT and store.has_complete_file(image)
    assert store.get_image_path(image.uuid).stat().st_mode & 0o777 == 0o600
    assert image.sha256 == hashlib.sha256(IMAGE_CONTENT).hexdigest()
    store.delete_image(image.uuid, OPERATOR, EventSource.API)
    assert not Image.objects.exists() and not [*store.get_image_directory().iterdir()]
    assert [*Event.objects.order_by("id").values_list("action", "actor")] == [
        ("image.added", "rita"),
        ("image.removed", "rita"),
    ]


@pytest.mark.parametrize(
    ("size", "chunks", "name", "properties", "says"),
    [
        (0, [], "", {}, "1 to 4194304 bytes"),
        (5_000_000, [], "", {}, "CYBORG_IMAGE_MAX_BYTES"),
        (4, [b"abc"], "", {}, "4 bytes were announced, 3 came"),
        (4, [b"abc", b"abc"], "", {}, "4 bytes were announced, 6 came"),
        (3, [b"abc"], "x" * 256, {}, "at most 255"),
        (3, [b"abc"], "", {"": "v"}, "write KEY=VALUE"),
        (3, [b"abc"], "", {"k": "v" * 1025}, "write KEY=VALUE"),
        (3, [b"abc"], "", {f"k{n}": "" for n in range(65)}, "at most 64"),
    ],
)
def test_refused_uploads_leave_no_row_and_no_file(
    size: int, chunks: list[bytes], name: str, properties: dict[str, str], says: str
) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        store.store_upload(chunks, size, name, properties, OPERATOR, EventSource.API)
    assert refused.value.reason == RefusalReason.INVALID
    assert not Image.objects.exists() and not [*store.get_image_directory().iterdir()]


def test_an_upload_to_a_full_disk_is_refused_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(RefusedError, match="No space left on device") as refused:
        upload_image()
    assert refused.value.reason == RefusalReason.UNAVAILABLE and not [*store.get_image_directory().iterdir()]


def test_waiting_commands_get_uploaded_images_by_id_or_by_function(wait: OrderCommand) -> None:
    image = upload_image(**{"accel:function_id": "AFU-1"})
    by_id, by_function = wait(bitstream_id=str(image.uuid)), wait(function_id="AFU-1")
    unknown, no_id = wait(function_id="AFU-2"), wait(bitstream_id="nope")
    download.run()
    assert get_state_and_image_or_text(by_id) == get_state_and_image_or_text(by_function) == ("queued", str(image.uuid))
    assert by_id.arguments["image"] == store.to_image_ref(image)
    assert [unknown.answered_at, no_id.answered_at].count(None) == 2
    assert "no image with accel:function_id=AFU-2 is uploaded" in get_state_and_image_or_text(unknown)[1]
    assert "'nope' is not the id of an image" in get_state_and_image_or_text(no_id)[1]
    upload_image(**{"accel:function_id": "AFU-1"})
    several = wait(function_id="AFU-1")
    download.run()
    assert "several images have accel:function_id=AFU-1" in get_state_and_image_or_text(several)[1]


def test_uploads_whose_file_is_gone_do_not_hide_the_complete_image_of_a_function(wait: OrderCommand) -> None:
    gone = [upload_image(f"image {n}, ten bytes".encode(), **{"accel:function_id": "AFU-1"}) for n in range(3)]
    complete = upload_image(**{"accel:function_id": "AFU-1"})
    for image in gone:
        store.get_image_path(image.uuid).unlink()
    by_function = wait(function_id="AFU-1")
    download.run()
    assert get_state_and_image_or_text(by_function) == ("queued", str(complete.uuid))


def test_an_image_of_glance_is_downloaded_once_verified_and_kept(wait: OrderCommand, cloud: FakeGlance) -> None:
    uuid = cloud.add_image(
        IMAGE_CONTENT, **{"accel:function_id": "AFU-7", "accel:device": "fake", "direct_url": "swift://secret"}
    )
    by_id, by_function = wait(bitstream_id=uuid), wait(function_id="AFU-7")
    download.run()
    assert get_state_and_image_or_text(by_id) == get_state_and_image_or_text(by_function) == ("queued", uuid)
    assert by_id.arguments["image"]["properties"] == {"accel:function_id": "AFU-7", "accel:device": "fake"}
    assert (
        store.get_image_path(uuid).read_bytes() == IMAGE_CONTENT
        and Image.objects.get().sha256 == hashlib.sha256(IMAGE_CONTENT).hexdigest()
    )
    cloud.fails_with = 503
    later = wait(bitstream_id=uuid)
    download.run()
    assert get_state_and_image_or_text(later) == ("queued", uuid) and cloud.calls["file from 0"] == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"os_hash_value": "0" * 128}, "is damaged"),
        ({"size": 9, "os_hash_algo": None}, "is damaged"),
        ({"size": 5_000_000}, "4194304 are taken"),
        ({"status": "deactivated"}, "is deactivated in Glance"),
        ({"size": None}, "Glance has no bytes of image"),
    ],
)
def test_unusable_images_of_glance_end_the_command_as_refused(
    wait: OrderCommand, cloud: FakeGlance, more: dict[str, object], says: str
) -> None:
    command = wait(bitstream_id=cloud.add_image(IMAGE_CONTENT, **more))
    download.run()
    assert (
        says in get_state_and_image_or_text(command)[1]
        and command.outcome == "refused"
        and not [*store.get_image_directory().iterdir()]
    )


def test_images_that_glance_does_not_have_are_reported_to_the_waiting_command(
    wait: OrderCommand, cloud: FakeGlance
) -> None:
    for _ in range(2):
        cloud.add_image(IMAGE_CONTENT, **{"accel:function_id": "twice"})
    nowhere, twice, none = wait(bitstream_id=str(uuid4())), wait(function_id="twice"), wait(function_id="none")
    download.run()
    assert "Glance has no image" in get_state_and_image_or_text(nowhere)[1]
    assert "several images have accel:function_id=twice" in get_state_and_image_or_text(twice)[1]
    assert "no image has accel:function_id=none" in get_state_and_image_or_text(none)[1]

    def no_cloud() -> None:
        raise ConfigurationError("No cloud is configured")

    lonely = wait(bitstream_id=str(uuid4()))
    with download.IMAGE_SERVICE.replaced("glance", Client(no_cloud)):
        download.run()
    assert "No cloud is configured" in get_state_and_image_or_text(lonely)[1]


FOREIGN_VISIBILITIES = ("private", "shared", "community")


@pytest.mark.parametrize("ignores_filters", [False, True])
@pytest.mark.parametrize("visibility", FOREIGN_VISIBILITIES)
def test_a_private_image_of_another_project_neither_decides_nor_disturbs_a_function_id(
    wait: OrderCommand, cloud: FakeGlance, visibility: str, ignores_filters: bool
) -> None:
    cloud.ignores_filters = ignores_filters
    cloud.add_image(b"hostile", visibility=visibility, owner="mallory", **{"accel:function_id": "AFU-1"})
    official = cloud.add_image(IMAGE_CONTENT, **{"accel:function_id": "AFU-1"})
    cloud.add_image(b"hostile", visibility=visibility, owner="mallory", **{"accel:function_id": "AFU-2"})
    with_official, without = wait(function_id="AFU-1"), wait(function_id="AFU-2")
    download.run()
    assert get_state_and_image_or_text(with_official) == ("queued", official)
    assert "no image has accel:function_id=AFU-2" in get_state_and_image_or_text(without)[1]


def test_many_private_images_of_another_project_do_not_hide_the_public_one(
    wait: OrderCommand, cloud: FakeGlance
) -> None:
    for _ in range(30):
        cloud.add_image(b"hostile", visibility="private", owner="mallory", **{"accel:function_id": "AFU-1"})
    official = cloud.add_image(IMAGE_CONTENT, **{"accel:function_id": "AFU-1"})
    command = wait(function_id="AFU-1")
    download.run()
    assert get_state_and_image_or_text(command) == ("queued", official)


@pytest.mark.parametrize("visibility", ["private", "shared", "public"])
def test_the_images_of_configured_owners_count(wait: OrderCommand, visibility: str) -> None:
    with glance() as cloud:
        session = Session(Token(cloud.url, "secret"))
        ours = cloud.add_image(
            IMAGE_CONTENT, visibility=visibility, owner="bitstreams", **{"accel:function_id": "AFU-1"}
        )
        command = wait(function_id="AFU-1")
        client = Client(lambda: session, cloud.url, ("bitstreams", "others"))
        with download.IMAGE_SERVICE.replaced("glance", client):
            download.run()
            assert get_state_and_image_or_text(command) == ("queued", ours)
            cloud.add_image(IMAGE_CONTENT, **{"accel:function_id": "AFU-1"})
            several = wait(function_id="AFU-1")
            download.run()
            assert "several images have accel:function_id=AFU-1" in get_state_and_image_or_text(several)[1]


@pytest.mark.parametrize("visibility", FOREIGN_VISIBILITIES)
def test_a_private_image_named_by_id_decides_no_function_trait(
    wait: OrderCommand, cloud: FakeGlance, visibility: str
) -> None:
    properties = {"accel:function_id": "AFU-1", "accel:device": "fake"}
    uuid = cloud.add_image(IMAGE_CONTENT, visibility=visibility, owner="mallory", **properties)
    command = wait(bitstream_id=uuid)
    download.run()
    assert get_state_and_image_or_text(command) == ("queued", uuid)
    assert command.arguments["image"]["properties"] == {"accel:device": "fake"}


def test_commands_wait_while_glance_is_away_and_an_interrupted_download_is_resumed(
    wait: OrderCommand, cloud: FakeGlance
) -> None:
    uuid = cloud.add_image(IMAGE_CONTENT)
    command = wait(bitstream_id=uuid)
    cloud.fails_with = 503
    download.run()
    assert (
        get_state_and_image_or_text(command)[0] == "preparing"
        and "waiting for the image service: " in get_state_and_image_or_text(command)[1]
    )
    cloud.fails_with, cloud.cut = 0, 1024 * 1024
    download.run()
    assert (
        get_state_and_image_or_text(command)[0] == "preparing"
        and "fetching image" in get_state_and_image_or_text(command)[1]
    )
    cloud.cut = None
    download.run()
    assert get_state_and_image_or_text(command) == ("queued", uuid) and cloud.calls["file from 1048576"] == 1
    assert store.get_image_path(uuid).read_bytes() == IMAGE_CONTENT


def test_a_fetch_that_was_completed_after_its_run_had_ended_is_not_repeated(
    wait: OrderCommand, cloud: FakeGlance
) -> None:
    uuid = cloud.add_image(IMAGE_CONTENT)
    command = wait(bitstream_id=uuid)
    service = download.IMAGE_SERVICE.only()
    store.get_image_path(uuid).write_bytes(bytes(len(IMAGE_CONTENT)))
    download._fetch_image(service, service.image(uuid), time.monotonic() + 60)
    assert store.get_image_path(uuid).read_bytes() == IMAGE_CONTENT, "a file with the wrong digest is replaced"
    download.run()
    assert get_state_and_image_or_text(command) == ("queued", uuid)
    assert cloud.calls["file from 0"] == 1


def test_a_lookup_that_never_began_is_no_fault_of_the_service(
    wait: OrderCommand, cloud: FakeGlance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LOOKUP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(download, "MAX_PARALLEL_FETCHES", 0)
    command = wait(bitstream_id=cloud.add_image(IMAGE_CONTENT))
    missing = {("bitstream_id", "x"): [command.pk]}
    assert download._fetch_missing_images(missing, time.monotonic() + 1) is True
    assert "did not answer" not in get_state_and_image_or_text(command)[1]


def test_a_download_is_done_in_slices_and_the_next_slice_continues_it(
    wait: OrderCommand, cloud: FakeGlance, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = cloud.add_image(IMAGE_CONTENT)
    command = wait(bitstream_id=uuid)
    monkeypatch.setattr(download, "SLICE_S", 0.0)
    service = download.IMAGE_SERVICE.only()
    offer = service.image(uuid)
    assert download._fetch_image(service, offer, 0.0) == ("", 1024 * 1024)
    cloud.ranges = False
    assert download._fetch_image(service, offer, 0.0) == ("", 1024 * 1024)
    cloud.ranges = True
    monkeypatch.setattr(download, "SLICE_S", 25.0)
    download.run()
    assert get_state_and_image_or_text(command) == ("queued", uuid)


@pytest.mark.slow
@pytest.mark.parametrize("slow_answer", ["show", "list", "file"])
def test_a_run_ends_in_time_although_glance_answers_byte_by_byte(
    wait: OrderCommand, cloud: FakeGlance, monkeypatch: pytest.MonkeyPatch, slow_answer: str
) -> None:
    """The time-out of the session limits the time between two bytes; ten bytes a second never reach it."""
    monkeypatch.setattr(download, "SLICE_S", 1.0)
    monkeypatch.setattr(download, "ABANDON_AFTER_S", 0.5)
    uuid = cloud.add_image(IMAGE_CONTENT, **{"accel:function_id": "AFU-1"})
    command = wait(function_id="AFU-1") if slow_answer == "list" else wait(bitstream_id=uuid)
    cloud.drips = slow_answer
    began_at = time.monotonic()
    download.run()
    assert time.monotonic() - began_at < 4
    assert get_state_and_image_or_text(command)[0] == "preparing"
    assert get_state_and_image_or_text(command)[1].endswith("it did not answer in time")
    if slow_answer == "file":
        download.run()
        assert get_state_and_image_or_text(command)[1].endswith(
            f"An earlier transfer of image {uuid} has not ended yet."
        )
    cloud.drips = ""
    monkeypatch.setattr(download, "SLICE_S", 25.0)
    give_up_at = time.monotonic() + 10
    while get_state_and_image_or_text(command) != ("queued", uuid):
        assert time.monotonic() < give_up_at, get_state_and_image_or_text(command)
        download.run()
    assert store.get_image_path(uuid).read_bytes() == IMAGE_CONTENT


@pytest.mark.slow
def test_the_longest_unused_copies_are_dropped_first_and_uploads_never(
    wait: OrderCommand, cloud: FakeGlance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_COPIES", 2)
    own = upload_image()
    image_uuids = [cloud.add_image(IMAGE_CONTENT[:n]) for n in (1, 2, 3, 4)]
    opened = wait(bitstream_id=image_uuids[0])
    download.run()
    for uuid in image_uuids[1:]:
        command = wait(bitstream_id=uuid)
        download.run()
        command_queue.refuse_undelivered_commands([command.pk], "enough")
        with conductor.writing():
            Command.objects.filter(pk=command.pk).update(ended_at=command.created_at)
    kept_uuids = {str(uuid) for uuid in Image.objects.values_list("uuid", flat=True)}
    assert (
        kept_uuids
        == {str(own.uuid), image_uuids[0], image_uuids[3]}
        == {file.name for file in store.get_image_directory().iterdir()}
    )
    with pytest.raises(RefusedError, match=f"Command {opened.uuid}"):
        store.delete_image(UUID(image_uuids[0]), OPERATOR, EventSource.API)
    store.get_image_path(image_uuids[3]).unlink()
    again = wait(bitstream_id=image_uuids[3])
    download.run()
    assert get_state_and_image_or_text(again) == ("queued", image_uuids[3])
