"""Lines of the log: whatever somebody logs, the lines behind it are written."""

import json
import logging
import threading

import pytest

from parley.web.logs import Inlet, Json, Plain


@pytest.mark.parametrize("form", [Plain, Json])
def test_a_line_that_cannot_be_formatted_is_not_the_last(form: type[logging.Formatter], capfd) -> None:
    inlet = Inlet(form())
    threading.Thread(target=inlet.write, daemon=True).start()
    for message, *args in (("half of a pair: %s", "\udcff"), ("%d", "no number"), ("the last",)):
        inlet.handle(logging.LogRecord("parley.x", logging.WARNING, "", 0, message, tuple(args), None))
    inlet.wait()
    first, second, last = capfd.readouterr().err.splitlines()
    assert "half of a pair: \\udcff" in first and "parley.x" in second and "the last" in last
    if form is Json:
        assert [json.loads(line)["level"] for line in (first, second, last)] == ["warning"] * 3
