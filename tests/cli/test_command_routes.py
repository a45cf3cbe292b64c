"""The routes command lists exactly the routes that the server answers."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

PATH_VALUES = {"version": "1", "method": "ServerLive"}  # values of path parameters; all others take the model's name


def test_routes_lists_each_answered_route_once(parley, url):
    rows = [json.loads(line) for line in parley("routes", "--json").stdout.splitlines()]
    assert len({(row["method"], row["path"]) for row in rows}) == len(rows) > 10
    assert {row["api"] for row in rows} >= {"parley", "openai"}
    scopes = {row["path"]: row["scope"] for row in rows}
    assert [scopes[path] for path in ("/health", "/v1/models", "/dresult", "/reset_prefix_cache")] == [
        "open", "client", "cluster", "admin"
    ]  # fmt: skip
    for row in rows:
        path = re.sub(r"\{([^}]+)\}", lambda part: PATH_VALUES.get(part[1], "tiny"), row["path"])
        request = urllib.request.Request(url + path, b"{}" if row["method"] == "POST" else None, method=row["method"])
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            status = error.code
            error_body = error.read().decode()
            hidden = row["path"] == "/vllm/tokenizer_info"  # 404 unless an option enables it, as in vLLM
            assert hidden or ("Unknown request URL" not in error_body and "Not Found" not in error_body), row
        assert status != 405, row


def test_routes_lists_extra_listeners(parley):
    listed = parley("routes", "--json", "--listen", "tgi=[::1]:3000,triton=0.0.0.0:0").stdout.splitlines()
    rows = [json.loads(line) for line in listed]
    own = {(row["path"], row["api"]) for row in rows if row["surface"] == "tgi=[::1]:3000"}
    assert ("/generate", "tgi") in own and ("/health/live", "parley") in own
    assert not any(path.startswith("/v2/models") for path, _ in own)
    assert ("/v2", "triton") in {(row["path"], row["api"]) for row in rows if row["surface"] == "triton=0.0.0.0:0"}
    wrong = parley("routes", "--listen", "tgj=127.0.0.1:3000")
    assert wrong.returncode == 2 and "Did you mean tgi?" in wrong.stderr
    for form in ("tgi", "tgi=3000", "tgi=:3000", "tgi=a:65536", "TGI=a:1", "tgi=::1:80"):
        assert "NAME=HOST:PORT" in parley("routes", f"--listen={form}").stderr


def test_routes_table_has_a_line_for_each_route(parley):
    table = parley("routes").stdout.splitlines()
    assert len(table) == 1 + len(parley("routes", "--json").stdout.splitlines())
    assert table[0].split() == ["METHOD", "PATH", "API", "SCOPE", "SURFACE"]
