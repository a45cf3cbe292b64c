"""Encrypted ports and clients of other makers: Node's HTTP/2, and every version of TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from pathlib import Path

import pytest
from support.certificates import make_authority, make_certificate
from support.running_instance import run_instance

from parley.serving.server_options import ServerOptions
from parley.web.tls.files import TlsFiles

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="the openssl command makes the certificates")


@pytest.fixture
def encrypted(tmp_path: Path) -> ServerOptions:
    """Options of an encrypted port, whose certificate is from the authority ``ours.pem``."""
    make_authority(tmp_path, "ours")
    make_certificate(tmp_path, "server", "ours")
    return ServerOptions(port=0, access_log=False, tls=TlsFiles(tmp_path / "server.pem", tmp_path / "server.key"))


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node")
async def test_node_speaks_http2_over_tls_and_reads_streams(encrypted, folder, tmp_path, monkeypatch):
    pytest.importorskip("h2")
    async with run_instance(folder, monkeypatch, encrypted) as (_, port):
        script = Path(__file__).with_name("http2_client.mjs")
        client = await asyncio.create_subprocess_exec(
            *("node", script, f"https://127.0.0.1:{port}", tmp_path / "ours.pem"), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await client.communicate()
    assert client.returncode == 0
    seen = json.loads(output)
    assert (seen["protocol"], seen["tls"]) == ("h2", "TLSv1.3")
    assert "tiny" in seen["models"]["text"]
    text = json.loads(seen["whole"]["text"])["choices"][0]["message"]["content"]
    assert text and len(seen["streamed"]) == 8
    for stream in seen["streamed"]:
        assert stream["status"] == 200 and stream["type"].startswith("text/event-stream") and stream["parts"] > 1
        events = [event.removeprefix("data: ") for event in stream["text"].split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        deltas = [choice["delta"] for event in events[:-2] for choice in json.loads(event)["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert seen["refused"]["status"] == 400 and "messages" in seen["refused"]["text"]


async def test_port_agrees_on_tls_1_2_and_later(encrypted, folder, tmp_path, monkeypatch):
    async def agreed_version(port: int, version: ssl.TLSVersion) -> str:
        context = ssl.create_default_context(cafile=tmp_path / "ours.pem")
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # else OpenSSL itself offers no version below 1.2
        context.minimum_version = context.maximum_version = version
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        agreed = writer.get_extra_info("ssl_object").version()
        writer.transport.abort()
        return str(agreed)

    async with run_instance(folder, monkeypatch, encrypted) as (_, port):
        assert await agreed_version(port, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        assert await agreed_version(port, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises((ssl.SSLError, ConnectionError)):
            await agreed_version(port, ssl.TLSVersion.TLSv1_1)
