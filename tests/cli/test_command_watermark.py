"""The watermark command, which detects watermarks in texts."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("data", [b"", b"A text that nobody marked.", "Ein Text über nichts.".encode()])
def test_watermark_command_exits_with_1_for_unmarked_text(parley, data, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(data)
    done = parley("watermark", "--file", str(file))
    assert done.returncode == 1 and done.stdout.startswith("not marked: ") and not done.stderr


def test_watermark_command_refuses_files_that_are_not_text(parley, tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff\xfe\x00")
    for path, reason in ((file, "UTF-8"), (tmp_path / "nothing", "cannot be read"), (tmp_path, "cannot be read")):
        done = parley("watermark", "--file", str(path))
        assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr
    assert (
        "no usable model" in parley("watermark", str(tmp_path)).stderr
        or parley("watermark", str(tmp_path)).returncode == 2
    )
