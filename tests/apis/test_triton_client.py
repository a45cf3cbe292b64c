"""NVIDIA's client, ``tritonclient``, against a running server.

``TRITONCLIENT_PYTHON`` names an interpreter that has the client. The tests are skipped if it is unset and the client is
not installed here: the client depends on gevent and other packages that the other tests do not need.
"""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "clients"
OWN_PYTHON = sys.executable if importlib.util.find_spec("tritonclient") else ""
CLIENT_PYTHON = os.environ.get("TRITONCLIENT_PYTHON", OWN_PYTHON)


@pytest.mark.skipif(not CLIENT_PYTHON, reason="no interpreter has tritonclient; TRITONCLIENT_PYTHON may name one")
async def test_tritonclient_http_script_succeeds(serve):
    server = await serve()
    await run_script("triton_http.py", f"127.0.0.1:{server.port}")


@pytest.mark.skipif(not CLIENT_PYTHON, reason="no interpreter has tritonclient; TRITONCLIENT_PYTHON may name one")
async def test_tritonclient_grpc_script_succeeds(serve):
    rpc = pytest.importorskip("parley.serving.grpc.grpc_port", exc_type=ImportError)
    server = await serve(tick=0.001)
    port = rpc.TritonGrpcPort(server.service)
    (address,) = await port.start_server([("127.0.0.1", 0)])
    await run_script("triton_grpc.py", address)
    await server.wait_until_idle()
    await port.stop_server(0)


async def run_script(script: str, address: str) -> None:
    command = (CLIENT_PYTHON, str(SCRIPTS / script), address, "tiny")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0 and output.endswith(b"good\n"), output.decode()
