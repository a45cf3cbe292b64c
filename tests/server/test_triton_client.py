"""NVIDIA's own client against the server, in the environment that has it.

``TRITONCLIENT_PYTHON`` names the interpreter of such an environment; without it, and without the client here, this is
skipped: the client brings gevent and more, which are no business of the other tests.
"""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "clients" / "triton_http.py"
HERE = sys.executable if importlib.util.find_spec("tritonclient") else ""
PYTHON = os.environ.get("TRITONCLIENT_PYTHON", HERE)


@pytest.mark.skipif(not PYTHON, reason="no interpreter has tritonclient; TRITONCLIENT_PYTHON may name one")
async def test_everything_that_the_client_can_do(serve):
    served = await serve()
    command = (PYTHON, str(SCRIPT), f"127.0.0.1:{served.port}", "tiny")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0 and output.endswith(b"good\n"), output.decode()
