"""A hub whose answers never end, or take forever, is given up with a sentence that says why."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib

import pytest
from cli.test_hub import COMMIT, FakeHub, run_in_process, serve_hub

from parley.hub.answer_watch import AnswerWatch, OpenSockets

SCRIPT = """
import json, sys
from parley import hub
from parley.hub import answer_limits, answer_watch
answer_limits.MAX_ANSWER_BYTES, answer_limits.RATE_SECONDS, answer_limits.MAX_PAGES = 1 << 20, 0.2, 3
reasons = {}
for name in sys.argv[1:]:
    answer_watch.HEAD_SECONDS = 0.3 if name in ("drip-head", "interim") else 60
    answer_limits.ANSWER_SECONDS = 0.2 if name in ("drip", "drip-chunk") else 60
    try:
        reasons[name] = str(hub.resolve_model(f"owner/{name}"))
    except hub.ModelMissing as error:
        reasons[name] = str(error)
print(json.dumps(reasons))
"""
REASONS = {
    "drip": "an answer takes over 0.2 seconds",
    "drip-head": "the head of an answer takes over 0.3 seconds",
    "drip-chunk": "an answer takes over 0.2 seconds",
    "interim": "the head of an answer takes over 0.3 seconds",
    "drip-file": "0 bytes of a file arrived, and at least",
    "endless": "an answer has over 1 MiB",
    "bomb": "an answer has over 1 MiB",
    "redirect": "an answer has over 1 MiB",
    "pages": "a list of files has over 3 pages",
    "wait": "it asks to wait for over 300 seconds",
    "slow-file": "bytes of a file arrived, and at least",
}


DRIPS = {
    "drip-head": (b"HTTP/1.1 200 OK\r\nx: ", b"a"),
    "interim": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "drip-chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"0"),
}


class EndlessHub(FakeHub):
    """Ends no answer about a model; the model's name says which one."""

    requested_paths: list[str]
    stopped = threading.Event()

    def _answer(self, body: bool) -> None:
        with contextlib.suppress(ConnectionError):
            kind = next(kind for kind in REASONS if f"owner/{kind}/" in self.path)
            if kind in DRIPS and "/revision/" in self.path:
                self._drip(DRIPS[kind])
            else:
                self._answer_kind(kind, body)

    def _answer_kind(self, kind: str, body: bool) -> None:
        if "/revision/" in self.path and kind in ("drip", "endless", "bomb", "redirect"):
            headers = {"Content-Encoding": "gzip"} if kind == "bomb" else {}
            self._begin(302 if kind == "redirect" else 200, headers | {"Location": "/elsewhere"})
            self._send_endlessly(kind)
        elif "/revision/" in self.path:
            data = json.dumps({"id": f"owner/{kind}", "sha": COMMIT, "siblings": []}).encode()
            self._send(200, {}, data, len(data))
        elif "/tree/" in self.path:
            data = json.dumps([{"type": "file", "path": "config.json", "size": 1 << 20, "oid": COMMIT}]).encode()
            link = f'<http://{self.headers["Host"]}{self.path}>; rel="next"'
            self._send(200, {"Link": link} if kind == "pages" else {}, data, len(data))
        elif not body:
            self._send(200, {"ETag": '"tag"', "X-Repo-Commit": COMMIT}, b"", 1 << 20)
        elif kind == "wait":
            self._send(429, {"Retry-After": "1000000"}, b"", 0)
        else:
            self._begin(200, {"ETag": '"tag"'})
            if kind == "drip-file":
                self._drip((b"", b"0"))
            self._send_endlessly("drip")

    def _drip(self, answer: tuple[bytes, bytes]) -> None:
        """Send a beginning, and then again and again what completes nothing."""
        beginning, part = answer
        self.wfile.write(beginning)
        while not self.stopped.is_set():
            self.wfile.write(part)
            time.sleep(0.01)

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Transfer-Encoding": "chunked"}).items():
            self.send_header(name, value)
        self.end_headers()

    def _send_endlessly(self, kind: str) -> None:
        part = b" " if kind == "drip" else b" " * (1 << 16)
        if kind == "bomb":
            part = zlib.compress(b" " * (2 << 20), wbits=31)
        while not self.stopped.is_set():
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            if kind == "drip":
                time.sleep(0.01)


@pytest.fixture(scope="module")
def reasons(tmp_path_factory):
    with serve_hub(EndlessHub) as server:
        home = tmp_path_factory.mktemp("home")
        try:
            yield json.loads(run_in_process(SCRIPT, home, server.server_port, *REASONS))
        finally:
            EndlessHub.stopped.set()


@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
def test_a_hub_without_end_is_given_up(reasons, kind, reason):
    assert reason in reasons[kind]


def test_a_check_ends_with_its_answer():
    watch, is_checked = AnswerWatch(OpenSockets()), threading.Event()

    def find_fault() -> str:
        watch.stop_timer()  # as the thread that reads does, at the end of an answer
        is_checked.set()
        return ""

    watch.start_checks(0.01, find_fault)
    timer = watch._timer
    assert is_checked.wait(30)
    timer.join(30)
    assert watch._timer is None
