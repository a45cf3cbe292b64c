"""A real Prometheus reads the metrics of a server and of a cluster under load: no panel of the dashboards is empty."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster_processes import METRICS, PREDICT, SECRET, Cluster
from support.free_ports import free_port_range

DEPLOY = Path(__file__).parents[2] / "deploy"
SECONDS = 90.0  # until all series of a load are there
QUESTION = {
    "model": "parley-demo",
    "messages": [{"role": "user", "content": "Count from 3 to 9."}],
    "max_tokens": 40,
    "stream": True,
}

pytestmark = pytest.mark.skipif(
    not os.environ.get("PARLEY_NIGHTLY") or shutil.which("prometheus") is None, reason="half a minute with Prometheus"
)


def dashboard_queries() -> list[str]:
    """Return the queries of all panels, for all values of their variables."""
    boards = [json.loads(file.read_text("utf-8")) for file in sorted((DEPLOY / "grafana").glob("*.json"))]
    targets = [target for board in boards for panel in board["panels"] for target in panel.get("targets", ())]
    return [re.sub(r"\$\w+", ".*", target["expr"].replace("$__rate_interval", "20s")) for target in targets]


@contextmanager
def constant_load(*urls: str) -> Iterator[None]:
    """Send requests to each address, two at a time, until the end of the block."""
    stopping = threading.Event()

    def send_requests(url: str) -> None:
        while not stopping.wait(0.1):
            body = json.dumps(QUESTION).encode()
            request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"parley-secret": SECRET})
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()

    threads = [threading.Thread(target=send_requests, args=(url,)) for url in urls * 2]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


@contextmanager
def prometheus(folder: Path, server: str, coordinator: str) -> Iterator[str]:
    """Run Prometheus with the rules of deploy/, which it evaluates each second; yield its address."""
    rules = (DEPLOY / "prometheus/rules.yml").read_text("utf-8")
    (folder / "rules.yml").write_text(rules.replace("interval: 15s", "interval: 1s"))
    jobs = [
        {
            "job_name": name,
            "static_configs": [{"targets": [target]}],
            "authorization": {"credentials": SECRET},
        }
        for name, target in (("parley", server), ("parley-coordinator", coordinator))
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port_range(1)}"
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=error"]
    process = subprocess.Popen(["prometheus", *words, f"--web.listen-address={address}"])
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def ask_prometheus(url: str, path: str, **members: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(members)}", timeout=10) as answer:
        return json.load(answer)["data"]


def test_no_panel_is_empty_under_load(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", DEPLOY / "prometheus/rules.yml"], check=True, capture_output=True)
    cluster = Cluster(tmp_path, "prefill", "decode", "mixed", separate="always")
    try:
        server, front = cluster.instances[2].url, cluster.coordinator.url
        host, port = front.removeprefix("http://").split(":")
        metrics = f"{host}:{int(port) - PREDICT + METRICS}"
        with prometheus(tmp_path, server.removeprefix("http://"), metrics) as url, constant_load(server, front):
            deadline, empty = time.monotonic() + SECONDS, dashboard_queries()
            while empty and time.monotonic() < deadline:
                time.sleep(2)
                empty = [query for query in empty if not ask_prometheus(url, "query", query=query)["result"]]
            assert not empty
            groups = ask_prometheus(url, "rules")["groups"]
            assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    finally:
        cluster.close()
