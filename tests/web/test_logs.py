"""Log lines: a record that cannot be formatted must not stop the lines after it."""

import json
import logging
import threading

import pytest

from parley.web.logs import JsonFormatter, QueueingHandler, TextFormatter


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
