"""For clients written in Python that need a model which follows a script (``scripted_server.py``).

Clients run in environments without this folder on their path, so they load this file with ``runpy``.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(os.environ["CLIENTS_SOURCE"])


@contextmanager
def serve_script(script: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Serve the model ``scripted``, and yield the server's URL. ``script``: as in ``scripted_server.py``."""
    server = subprocess.Popen(
        [os.environ["SERVER_PYTHON"], str(SOURCE / "scripted_server.py"), json.dumps(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE.parent), str(SOURCE.parents[1])))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


def tool_call(name: str, **arguments: object) -> str:
    """Return a call of a tool as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
