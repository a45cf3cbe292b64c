"""Keys and certificates are replaced while requests run: none of them fails, and every limit stays exact."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.api_keys import Clock
from support.certificates import make_authority, make_certificate
from support.http_client import Connection, build_request
from support.running_instance import run_instance

from parley.serving.server_options import ServerOptions
from parley.settings.key_file import HashedKey, add_key, make_key, read_key_table
from parley.web.tls.files import TlsFiles

KEY_REPLACEMENTS, CERTIFICATE_REPLACEMENTS = (100, 40) if os.environ.get("PARLEY_NIGHTLY") else (10, 4)
COMPLETION = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
STREAM = COMPLETION | {"max_tokens": 25 * CERTIFICATE_REPLACEMENTS, "ignore_eos": True, "stream": True}
BUDGET, WIDER_BUDGET = 60, 75  # requests per minute of one key


def write_keys(file: Path, keys: list[HashedKey]) -> None:
    """Replace a key file by a new one with other contents."""
    written = file.with_name("next.toml")
    written.unlink(missing_ok=True)
    for key in keys:
        add_key(written, key)
    written.rename(file)


async def test_key_file_is_replaced_under_load_with_exact_limits(folder, tmp_path, monkeypatch):
    file = tmp_path / "keys.toml"
    (steady, steady_key), (limited, limited_key) = make_key("steady"), make_key("limited", requests_per_minute=BUDGET)
    passing = [make_key(f"passing-{number}") for number in range(KEY_REPLACEMENTS)]
    write_keys(file, [steady_key, limited_key])
    options = ServerOptions(port=0, access_log=False, hashed_keys=read_key_table(file, "file"))

    def read_options() -> ServerOptions:
        return replace(options, hashed_keys=read_key_table(file, "file"))

    async with run_instance(folder, monkeypatch, options, read_options) as (instance, port):
        instance.registry.key_ledger.limiter = Clock().limiter()
        replaced = asyncio.Event()

        async def send(connection: Connection, key: str) -> int:
            authorization = {"authorization": f"Bearer {key}"}
            await connection.send(build_request("POST", "/v1/completions", COMPLETION, authorization))
            return (await connection.answer()).status

        async def send_until_replaced(key: str) -> Counter[int]:
            connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
            statuses: Counter[int] = Counter()
            while not replaced.is_set():
                statuses[await send(connection, key)] += 1
            connection.close()
            return statuses

        clients = [asyncio.create_task(send_until_replaced(key)) for key in [steady] * 4 + [limited] * 4]
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        earlier = "no key"
        for key, hashed_key in passing:
            write_keys(file, [steady_key, limited_key, hashed_key])
            os.kill(os.getpid(), signal.SIGHUP)
            while hashed_key not in (instance.options.hashed_keys or ()):
                await asyncio.sleep(0)
            assert [await send(connection, api_key) for api_key in (key, earlier)] == [200, 401]
            earlier = key
        replaced.set()
        counts = await asyncio.gather(*clients)
        assert {status for count in counts[:4] for status in count} == {200}
        used = sum(counts[4:], Counter())
        assert set(used) <= {200, 429} and used[200] <= BUDGET
        statuses = [await send(connection, limited) for _ in range(BUDGET + 1 - used[200])]
        assert statuses == [200] * (BUDGET - used[200]) + [429]
        write_keys(file, [steady_key, replace(limited_key, requests_per_minute=WIDER_BUDGET)])
        os.kill(os.getpid(), signal.SIGHUP)
        while len(instance.options.hashed_keys or ()) == 3:
            await asyncio.sleep(0)
        statuses = [await send(connection, limited) for _ in range(WIDER_BUDGET - BUDGET + 1)]
        assert statuses == [200] * (WIDER_BUDGET - BUDGET) + [429]
        connection.close()


@pytest.mark.skipif(not shutil.which("openssl"), reason="the openssl command makes the certificates")
async def test_certificates_are_replaced_under_load_without_a_failed_request(folder, tmp_path, monkeypatch):
    make_authority(tmp_path, "ours")
    for name in ("old", "new"):
        make_certificate(tmp_path, name, "ours")

    def install(name: str) -> None:
        for ending in ("key", "pem"):
            shutil.copy(tmp_path / f"{name}.{ending}", tmp_path / f"next.{ending}")
            (tmp_path / f"next.{ending}").rename(tmp_path / f"server.{ending}")

    install("old")
    tls = TlsFiles(tmp_path / "server.pem", tmp_path / "server.key")
    options = ServerOptions(port=0, access_log=False, tls=tls)
    trust = ssl.create_default_context(cafile=tmp_path / "ours.pem")
    async with run_instance(folder, monkeypatch, options) as (_, port):
        replaced = asyncio.Event()
        presented: Counter[str] = Counter()

        async def connect() -> Connection:
            connection = Connection(*await asyncio.open_connection("127.0.0.1", port, ssl=trust))
            subject = connection.writer.get_extra_info("peercert")["subject"]
            presented[dict(pair for (pair,) in subject)["commonName"]] += 1
            return connection

        async def connect_until_replaced() -> None:
            while not replaced.is_set():
                connection = await connect()
                for _ in range(2):
                    await connection.send(build_request("POST", "/v1/completions", COMPLETION))
                    assert (await connection.answer()).status == 200
                connection.close()

        stream = await connect()
        await stream.send(build_request("POST", "/v1/completions", STREAM))
        clients = [asyncio.create_task(connect_until_replaced()) for _ in range(4)]
        for number in range(CERTIFICATE_REPLACEMENTS):
            name = ("new", "old")[number % 2]
            install(name)
            os.kill(os.getpid(), signal.SIGHUP)
            before = presented[name]
            while presented[name] < before + 2:
                assert not any(client.done() for client in clients)
                await asyncio.sleep(0)
        replaced.set()
        await asyncio.gather(*clients)
        assert b'"finish_reason":"length"' in (await stream.answer()).body
        stream.close()
