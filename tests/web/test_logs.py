"""Log lines: a record that cannot be formatted must not stop the lines after it."""

import json
import logging
import re
import threading
import warnings

import pytest

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
