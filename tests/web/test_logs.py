"""Log lines: neither a record that cannot be formatted nor a full disk stops the lines after it."""

import json
import logging
import os
import re
import subprocess
import threading
import warnings
from pathlib import Path

import pytest

from parley.child_process import python_command
from parley.log_lines import (
    FORMAT_VARIABLE,
    LEVEL_VARIABLE,
    JsonFormatter,
    TextFormatter,
    announce_to_children,
    set_up_child_logging,
)
from parley.web import banner
from parley.web.logs import QueueingHandler


@pytest.mark.parametrize("form", [TextFormatter, JsonFormatter])
def test_unformattable_log_line_does_not_stop_the_log(form: type[logging.Formatter], capfd) -> None:
    inlet = QueueingHandler(form())
    threading.Thread(target=inlet.run_writer, daemon=True).start()
    for message, *args in (("half of a pair: %s", "\udcff"), ("%d", "no number"), ("the last",)):
        inlet.handle(logging.LogRecord("parley.x", logging.WARNING, "", 0, message, tuple(args), None))
    inlet.wait_written()
    first, second, last = capfd.readouterr().err.splitlines()
    assert "half of a pair: \\udcff" in first and "parley.x" in second and "the last" in last
    if form is JsonFormatter:
        assert [json.loads(line)["level"] for line in (first, second, last)] == ["warning"] * 3


# A limit on the size of files behaves as a disk that becomes full: a write is cut short, and the next ones fail.
FULL_DISK = """
import logging, os, resource
from parley.log_lines import TextFormatter
from parley.web.logs import QueueingHandler

def write(*messages):
    records = (logging.LogRecord("parley.x", logging.INFO, "", 0, message, (), None) for message in messages)
    handler._write_lines(b"".join(map(handler._encode_record, records)))

handler = QueueingHandler(TextFormatter())
write("first")
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(2).st_size + 25, most))
write("second", "third")
write("fourth")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
write("fifth")
write("sixth")
"""


def test_lines_lost_to_a_full_disk_are_counted_and_later_lines_are_complete(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as file:
        subprocess.run(python_command("-c", FULL_DISK), env=os.environ, stderr=file, check=True)
    first, cut, warning, fifth, sixth = (tmp_path / "log").read_text().splitlines()
    assert first.endswith(" first") and cut.endswith(" secon") and fifth.endswith(" fifth") and sixth.endswith(" sixth")
    assert warning.endswith("warning 3 log lines are lost: they could not be written (File too large).")


@pytest.fixture
def root_logger(monkeypatch):
    """The root logger, restored afterwards together with the environment that tells children how to log."""
    root, own = logging.getLogger(), logging.getLogger("parley")
    before = root.handlers[:], root.level, own.level
    monkeypatch.setenv(FORMAT_VARIABLE, "text")
    monkeypatch.setenv(LEVEL_VARIABLE, "info")
    yield root
    root.handlers[:], root.level, own.level = before
    logging.captureWarnings(False)


def test_processes_of_a_server_log_in_its_format(root_logger, capsys):
    announce_to_children("json", "warning")
    root_logger.handlers.clear()
    set_up_child_logging()
    logging.getLogger("parley.engine").info("not logged")
    logging.getLogger("parley.engine").warning("no kernels: %s", "x")
    with warnings.catch_warnings(action="always"):
        warnings.warn("old", stacklevel=1)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("warning", "parley.engine", "no kernels: x")
    assert "old" in second["message"]


def test_lines_at_the_start_are_log_lines_if_those_are_json(root_logger, capsys, caplog):
    announce_to_children("json", "info")
    with caplog.at_level("INFO", logger="parley.server"):
        banner.print_line("parley 1\n  model    m\n")
        banner.print_failure("the port is taken.")
    assert capsys.readouterr().out == ""
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines == [("INFO", "parley 1"), ("INFO", "model    m"), ("ERROR", "the port is taken.")]


def test_text_lines_have_date_and_level():
    record = logging.LogRecord("parley.x", logging.ERROR, "", 0, "gone", (), None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d error gone", TextFormatter().format(record))
