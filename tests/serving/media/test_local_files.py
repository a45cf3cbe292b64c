"""Reading files of one folder: what is inside is read, and nothing else is, by whatever trick."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from parley.errors import BadMedia
from parley.serving.media.local_files import LocalMediaFolder
from parley.serving.server_options import MediaOptions

FIELD = "messages[0].content[0].image_url.url"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.png").write_bytes(b"image")
    (folder / "deep" / "er" / "ü b%20.png").write_bytes(b"deeper")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-other").mkdir()
    (tmp_path / "media-other" / "a.png").write_bytes(b"other")
    return folder


def read(folder: Path | None, path: object, limit: int = 100) -> bytes:
    options = MediaOptions(folder=None if folder is None else str(folder), sizes={"image": limit})
    return LocalMediaFolder(options).read_file(str(path), "image", FIELD)


def refusal(folder: Path | None, path: object, limit: int = 100) -> BadMedia:
    """Return the error of a read, after checking what holds for all of them."""
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(BadMedia) as raised:
        read(folder, path, limit)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    error = raised.value
    assert error.kind == "image" and error.field == FIELD and error.message.endswith(".")
    assert "/" not in error.message and "Errno" not in error.message
    return error


def test_reads_a_file_of_the_folder(folder: Path):
    assert read(folder, folder / "a.png") == b"image"
    assert read(Path(f"{folder}/"), f"/{folder}//./a.png") == b"image"
    assert read(folder, f"file://{folder}/a.png") == b"image"
    assert read(folder, f"file:{folder}/a.png") == b"image"
    assert read(folder, f"FILE://localhost{folder}/a.png") == b"image"
    assert read(folder, folder / "deep/er/ü b%20.png") == b"deeper"
    assert read(folder, f"file://{folder}/deep/er/%C3%BC%20b%2520.png") == b"deeper"
    assert read(Path("/"), folder / "a.png") == b"image"


def test_reads_an_empty_file_and_one_at_the_limit(folder: Path):
    (folder / "empty").touch()
    (folder / "full").write_bytes(b"a" * 100)
    assert read(folder, folder / "empty") == b""
    assert read(folder, folder / "full") == b"a" * 100


def test_reads_nothing_without_a_folder(folder: Path):
    assert refusal(None, folder / "a.png").reason == "forbidden_address"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "{folder}/../secret",
        "{folder}/deep/../../secret",
        "{folder}/deep/er/../../a.png",
        "{folder}-other/a.png",
        "{folder}",
        "{folder}/",
        "{folder}/a.png\0.jpg",
        "a.png",
        "./a.png",
        "~/a.png",
        "",
        "file://elsewhere{folder}/a.png",
        "file://{folder}/%2e%2e/secret",
        "file://{folder}/..%2fsecret",
        "file:a.png",
        "/" + "a/" * 3000,
    ],
)
def test_refuses_a_path_outside_the_folder(folder: Path, path: str):
    assert refusal(folder, path.format(folder=folder)).reason == "forbidden_address"


@pytest.mark.parametrize("path", ["missing.png", "a.png/b.png", "deep/missing/a.png", "\ud800.png", "n" * 300])
def test_reports_a_file_that_does_not_exist(folder: Path, path: str):
    assert refusal(folder, f"{folder}/{path}").reason == "not_found"


def test_follows_no_symbolic_link_below_the_folder(folder: Path):
    (folder / "link.png").symlink_to(folder.parent / "secret")
    (folder / "inside.png").symlink_to(folder / "a.png")
    (folder / "up").symlink_to(folder.parent)
    (folder / "proc").symlink_to("/proc/self")
    for path in ("link.png", "inside.png"):
        assert refusal(folder, folder / path).reason == "forbidden_address"
    for path in ("up/secret", "proc/environ", "proc/cwd/a"):
        assert refusal(folder, folder / path).reason == "not_found"


def test_the_folder_itself_may_be_a_symbolic_link(folder: Path):
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert read(link, link / "a.png") == b"image"


def test_opens_no_pipe_socket_device_or_folder(folder: Path):
    os.mkfifo(folder / "pipe.png")
    listener = socket.socket(socket.AF_UNIX)
    directory = os.open(folder, os.O_PATH)
    try:
        listener.bind(f"/proc/self/fd/{directory}/socket.png")  # the whole path may be too long for a socket
        for path in ("pipe.png", "socket.png", "deep"):
            assert refusal(folder, folder / path).reason == "forbidden_address"
        for path in ("/dev/zero", "/dev/tty", "/dev/null"):
            assert refusal(Path("/dev"), path).reason == "forbidden_address"
    finally:
        listener.close()
        os.close(directory)


def test_files_without_a_size_are_empty():
    assert read(Path("/proc"), f"/proc/{os.getpid()}/environ") == b""


def test_refuses_a_large_file_without_reading_it(folder: Path):
    with (folder / "huge.png").open("wb") as file:
        file.truncate(1 << 40)
    error = refusal(folder, folder / "huge.png")
    assert error.reason == "too_large" and error.detail == {"limit": 100, "size": 1 << 40}
    assert error.message == "The image is larger than the limit of 100 bytes."


def test_a_folder_that_is_swapped_for_a_link_is_not_followed(folder: Path):
    """A thread swaps a folder for a link to another place while files are read."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "b.png").write_bytes(b"secret")
    swapped, link = folder / "swapped", folder / "link"
    swapped.mkdir()
    (swapped / "b.png").write_bytes(b"image")
    link.symlink_to(outside)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            swapped.rename(folder / "aside")
            link.rename(swapped)
            swapped.rename(link)
            (folder / "aside").rename(swapped)

    thread = threading.Thread(target=swap)
    thread.start()
    contents = set()
    try:
        for _ in range(3000):
            try:
                contents.add(read(folder, swapped / "b.png"))
            except BadMedia as error:
                contents.add(error.reason)
    finally:
        ended.set()
        thread.join()
    assert contents <= {b"image", "not_found"}
