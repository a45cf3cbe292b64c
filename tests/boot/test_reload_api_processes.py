"""Keys and certificates are replaced while API processes answer: no request fails, and limits stay exact."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import ssl
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.api_process_server import ProcessServer, slow_model
from support.certificates import make_authority, make_certificate

from parley.settings.key_file import HashedKey, add_key, make_key

REPLACEMENTS = 60 if os.environ.get("PARLEY_NIGHTLY") else 4
COMPLETION = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}  # 8 tokens
STREAM = COMPLETION | {"max_tokens": 8000, "stream": True}
REQUESTS = 40  # that the limited key may send

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="the openssl command makes the certificates")


class ReloadedServer(ProcessServer):
    """An encrypted server, whose keys and certificate are replaced."""

    def __init__(self, work: Path, folder: Path, keys: list[HashedKey]):
        self.work, model = work, work / "tiny"
        make_authority(work, "ours")
        for name in ("old", "new"):
            make_certificate(work, name, "ours")
        self.context = ssl.create_default_context(cafile=work / "ours.pem")
        self.replace(keys, "old")
        flags = ["--api-key-file", str(work / "keys.toml"), "--tls-cert", str(work / "server.pem")]
        flags += ["--tls-key", str(work / "server.key"), "--api-processes", "2", "--quiet"]
        super().__init__(model, *slow_model(folder, model), *flags)

    @property
    def url(self) -> str:
        return self.wait_for_line(r"https://127\.0\.0\.1:\d+")[0]

    def replace(self, keys: list[HashedKey], certificate: str) -> None:
        written = self.work / "next.toml"
        for key in keys:
            add_key(written, key)
        written.rename(self.work / "keys.toml")
        for ending in ("key", "pem"):
            shutil.copy(self.work / f"{certificate}.{ending}", self.work / "next")
            (self.work / "next").rename(self.work / f"server.{ending}")

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(
            verify=self.context, base_url=self.url, timeout=30, headers={"authorization": f"Bearer {key}"}
        )

    def ask_with_new_connection(self, key: str) -> tuple[int, str]:
        """Returns the status of a request, and the name in the server's certificate."""
        with self.client(key) as client, client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
            certificate = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
            return answer.status_code, dict(pair for (pair,) in certificate["subject"])["commonName"]


def test_keys_and_certificates_are_replaced_under_long_streams(folder: Path, tmp_path: Path):
    (steady, steady_key), (limited, limited_key) = make_key("steady"), make_key("limited", tokens_per_day=REQUESTS * 8)
    replaced = threading.Event()

    def ask_until_replaced(server: ReloadedServer, key: str) -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not replaced.is_set():
            statuses[server.ask_with_new_connection(key)[0]] += 1
        return statuses

    with (
        ReloadedServer(tmp_path, folder, [steady_key, limited_key]) as server,
        ThreadPoolExecutor(8) as threads,
        contextlib.ExitStack() as open_streams,
    ):
        server.wait_until_ready()
        open_streams.callback(replaced.set)
        streams = []
        for _ in range(6):
            client = open_streams.enter_context(server.client(steady))
            answer = open_streams.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
            streams.append(answer.iter_lines())
        asking = [threads.submit(ask_until_replaced, server, key) for key in (steady, steady, limited, limited)]
        earlier = "no key"
        for number in range(REPLACEMENTS):
            key, hashed_key = make_key(f"passing-{number}")
            name = ("new", "old")[number % 2]
            server.replace([steady_key, limited_key, hashed_key], name)
            server.process.send_signal(signal.SIGHUP)

            def all_processes_have(key: str = key, earlier: str = earlier, name: str = name) -> bool:
                answers = [*threads.map(server.ask_with_new_connection, [key, earlier] * 4)]
                return answers == [(200, name), (401, name)] * 4

            assert server.wait_for(all_processes_have)
            assert all_processes_have()  # none goes back
            earlier = key
        for stream in streams:
            for _ in range(200):  # more than may have waited in buffers
                line = next(stream)
                assert "error" not in line and "[DONE]" not in line
        replaced.set()
        *of_steady, used, also_used = [task.result() for task in asking]
        assert all({*counts} == {200} for counts in of_steady)
        used += also_used
        assert {*used} <= {200, 429}
        statuses = [server.ask_with_new_connection(limited)[0] for _ in range(REQUESTS + 1 - used[200])]
        assert statuses == [200] * (REQUESTS - used[200]) + [429]
