"""Ports of API processes: encrypted, behind a proxy, with several models, traced; and none of their usage is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.api_process_server import LONG, ProcessServer, slow_model
from support.certificates import make_authority, make_certificate
from support.grpc_client import answer_text, build_infer_request
from support.otlp_receivers import Collector, grpc_collector

from parley.dialects.triton.rpc.messages import INFERENCE_SCHEMA

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class EncryptedServer(ProcessServer):
    """A server with encrypted ports and two models, "tiny" and "other". ``folder``: of its files; ``spans``: those that
    it exports."""

    folder: Path
    spans: Collector

    @property
    def url(self) -> str:
        return self.wait_for_line(r"https://127\.0\.0\.1:\d+")[0]

    def client(self, *, http2: bool = False, path: str = "", uds: str | None = None) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.folder / "ours.pem"))
        transport = httpx.HTTPTransport(verify=context, http2=http2, uds=uds)
        return httpx.Client(transport=transport, base_url=self.url + path, timeout=30)

    def wait_until_idle(self) -> bool:
        with self.client() as client:
            return self.wait_for(
                lambda: (
                    not (state := client.get("/ui/activity").json())["requests"]
                    and not any(model["slots"][0] for model in state["models"])
                )
            )


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncryptedServer]:
    work = tmp_path_factory.mktemp("ports")
    make_authority(work, "ours")
    make_certificate(work, "server", "ours")
    flags = [*slow_model(folder, work / "tiny"), "--model", f"other={work / 'tiny'}", "--api-processes", "2"]
    flags += ["--tls-cert", str(work / "server.pem"), "--tls-key", str(work / "server.key"), "--root-path", "/llm"]
    flags += ["--trusted-proxy", "127.0.0.1", "--listen", f"tgi=unix:{work / 'socket'}", "--grpc-port", "0"]
    with grpc_collector() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        flags += ["--otlp-traces-endpoint", collector.endpoint, "--usage-db", str(work / "usage.db")]
        with EncryptedServer(work / "tiny", *flags) as running:
            running.folder, running.spans = work, collector
            running.wait_until_ready()
            yield running


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("path", ["", "/llm"])
def test_requests_are_answered_and_passed_over_tls_below_a_root_path(server: EncryptedServer, http2: bool, path: str):
    name = f"proxied-{http2}{path.replace('/', '-')}"
    proxied = {"x-forwarded-for": "9.9.9.9, 8.8.8.8", "x-request-id": name}
    completion = {"model": "other", "prompt": "abc", "max_tokens": 3}
    with server.client(http2=http2, path=path) as client:
        listed = client.get("/v1/models", headers=proxied)
        assert listed.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        assert [model["id"] for model in listed.json()["data"]] == ["tiny", "other"]
        assert client.post("/v1/completions", json=completion, headers=proxied).json()["model"] == "other"
        with client.stream("POST", "/v1/completions", json=completion | {"stream": True}, headers=proxied) as answer:
            assert [*answer.iter_lines()][-2] == "data: [DONE]"
        passed = client.post("/v1/responses", json={"model": "other", "input": "a", "max_output_tokens": 16})
        assert passed.json()["model"] == "other"
        assert client.get("/llm/v1/models/no").status_code == 404

    def logged() -> list[str]:
        return [line for line in server.lines if f" {name} " in line]

    assert server.wait_for(lambda: len(logged()) == 3)
    assert all("client=8.8.8.8" in line for line in logged())


def test_a_unix_socket_is_shared(server: EncryptedServer):
    with server.client(uds=str(server.folder / "socket")) as client:
        answer = client.post("/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 3}})
        assert answer.json()["generated_text"]
        assert client.get("/info").json()["model_id"] == "tiny"


def test_grpc_serves_the_same_models(server: EncryptedServer):
    address = server.wait_for_line(r"gRPC\s+(127\.0\.0\.1:\d+)")[1]
    credentials = grpc.ssl_channel_credentials((server.folder / "ours.pem").read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        answer: Any = INFERENCE_SCHEMA("ModelInferResponse").FromString
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", response_deserializer=answer)
        request = build_infer_request("abc", "other", max_tokens=3)
        assert answer_text(infer(request.SerializeToString(), timeout=20))


def test_spans_of_answered_and_passed_requests_are_one_trace(server: EncryptedServer):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}, headers=headers)
        client.post("/v1/responses", json={"input": "abc", "max_output_tokens": 16}, headers=headers)

    def received() -> list[tuple[str, str]]:
        spans = [span for span in server.spans.spans if span.trace_id == TRACE]
        names = {span.span_id: span.name for span in spans} | {PARENT: "client"}
        return sorted((names.get(span.parent_id, ""), span.name) for span in spans)

    server.wait_for(lambda: len(received()) >= 12)
    calls = (("POST /v1/completions", "text_completion tiny"), ("POST /v1/responses", "chat tiny"))
    phases = ("decode", "prefill", "prepare", "queue")
    expected = [("client", request) for request, _ in calls]
    expected += [*calls, *((call, phase) for _, call in calls for phase in phases)]
    assert received() == sorted(expected)


@pytest.mark.parametrize("http2", [False, True])
def test_clients_that_leave_free_their_slots(server: EncryptedServer, http2: bool):
    response = {"model": "other", "input": "a", "stream": True, "max_output_tokens": 4000, "ignore_eos": True}
    with server.client(http2=http2) as client:
        for path, body in (("/v1/completions", LONG), ("/v1/responses", response)):
            with client.stream("POST", path, json=body) as answer:
                next(answer.iter_lines())
    assert server.wait_until_idle()


def test_usage_of_requests_that_are_cut_off_is_kept(server: EncryptedServer):
    def use() -> None:
        with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
            for _ in answer.iter_lines():
                started.release()

    def count_requests() -> int:
        database = sqlite3.connect(server.folder / "usage.db")
        with closing(database):
            return int(database.execute("SELECT sum(requests) FROM usage").fetchone()[0] or 0)

    assert server.wait_until_idle()
    with server.client() as client:
        client.get("/v1/usage").raise_for_status()  # everything before it is in the file
    before, started = count_requests(), threading.Semaphore(0)
    clients = [threading.Thread(target=use) for _ in range(8)]
    for open_client in clients:
        open_client.start()
    for _ in range(30 * len(clients)):  # several tokens of each
        assert started.acquire(timeout=20)
    processes = server.api_processes
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_line("Shutting down")
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)  # ends at once
    time.sleep(1)  # the processes report when the engine has been closed for a while
    for process in processes:
        os.kill(process, signal.SIGCONT)
    server.wait_for_end()
    for open_client in clients:
        open_client.join()
    assert count_requests() == before + len(clients)
