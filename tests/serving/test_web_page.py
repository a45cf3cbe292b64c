"""The web page: its headers, its files, who gets them, and what its status page may show."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

from support.http_client import RunningServer

from parley.dialects.mounts import API_MOUNTS, DOCUMENT_PATH, dedicated_mounts
from parley.serving.web_pages.activity_history import KEPT_SAMPLES, SAMPLE_FIELDS, ActivityHistory
from parley.ui import CONTENT_TYPES, PAGE_NAMES, page_files

KEY, OTHER_KEY, ADMIN_KEY = "sk-right-key-0123456789", "sk-other-key-0123456789", "sk-admin-key-0123456789"
HTML = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s+["']([^"']+)["']""")
FOREIGN = re.compile(r"""["'(](?:https?:)?//(?!www\.w3\.org/)""")


class Elements(HTMLParser):
    """The elements of a page: names and attributes, and the text in scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        if self._inside and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def pages() -> dict[str, str]:
    names = PAGE_NAMES | {"/cluster": "cluster.html"}  # the latter at the coordinator's status port
    return {path: page_files()[name].body.decode() for path, name in names.items()}


async def test_web_page_has_security_headers_and_is_cached(serve):
    server = await serve()
    answer = await server.get("/ui")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-cache"
    again = await server.call("GET", "/ui", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"") and again.headers["etag"] == answer.headers["etag"]
    assert "content-length" not in again.headers
    head = await server.call("HEAD", "/ui")
    assert head.status == 200 and int(head.headers["content-length"]) == len(answer.body)


async def test_a_trailing_slash_leads_to_the_page_whose_links_are_relative(serve):
    answer = await (await serve()).get("/ui/")
    assert (answer.status, answer.headers["location"], answer.body) == (308, "../ui", b"")


async def test_every_file_is_served_with_its_type(serve):
    server = await serve()
    for name, file in page_files().items():
        answer = await server.get(f"/ui/{name}")
        assert (answer.status, answer.body) == (200, file.body), name
        assert answer.headers["content-type"].encode() == CONTENT_TYPES[name.rpartition(".")[2]]
    for name in ("nothing.js", "../__init__.py", "..%2f__init__.py", "apis", "/etc/passwd"):
        assert (await server.get(f"/ui/{name}")).status == 404, name


def test_pages_load_nothing_but_their_own_files():
    for path, text in pages().items():
        found = Elements(text)
        assert not found.inline, path
        assert not re.search(r"<[^>]+\s(on\w+|style)\s*=", text), path
        links = [
            attributes[name] for _, attributes in found.elements for name in ("src", "href") if attributes.get(name)
        ]
        for link in links:
            target = urlsplit(urljoin(path, link)).path
            known = target in PAGE_NAMES or target == DOCUMENT_PATH or target.removeprefix("/ui/") in page_files()
            assert known and "//" not in link, (path, link)
    for name, file in page_files().items():
        text = file.body.decode()
        assert not FOREIGN.search(text), name
        for wrong in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert wrong not in text, name
        folder = name.rpartition("/")[0]
        for imported in IMPORT.findall(text) if name.endswith(".js") else ():
            parts = f"{folder}/{imported}".split("/")
            path: list[str] = []
            for part in parts:
                if part == "..":
                    path.pop()
                elif part not in (".", ""):
                    path.append(part)
            assert "/".join(path) in page_files(), (name, imported)


async def test_accept_header_selects_the_api_at_shared_paths(serve):
    server, plain = await serve(), await serve(ui=False)
    for path in ("/", "/docs"):
        page = await server.call("GET", path, headers=HTML)
        assert page.status == 200 and page.body == page_files()[PAGE_NAMES[path]].body
        for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
            with_page, without = [
                await running_server.call("GET", path, headers=headers) for running_server in (server, plain)
            ]
            assert (with_page.status, with_page.body) == (without.status, without.body)
            assert "content-security-policy" not in with_page.headers


async def test_no_page_without_the_option_or_at_the_port_of_one_api(serve):
    for server in (await serve(ui=False), await serve(surfaces=dedicated_mounts("tgi"))):
        for path in ("/ui", "/ui/status", "/ui/activity", "/ui/base.css"):
            assert (await server.get(path)).status == 404
        assert b"<script" not in (await server.call("GET", "/", headers=HTML)).body


async def test_pages_need_no_key_and_everything_else_does(serve):
    server = await serve(api_keys=(KEY,))
    for path in PAGE_NAMES:
        assert (await server.call("GET", path, headers=HTML)).status == 200, path
    for name in page_files():
        assert (await server.get(f"/ui/{name}")).status == 200, name
    for path in ("/", "/docs", "/ui/activity", "/uix", "/UI", "//ui", "/v1/../ui"):
        assert (await server.get(path)).status == 401, path
    for method in ("POST", "OPTIONS", "PUT"):
        assert (await server.call(method, "/", headers=HTML)).status == 401, method
    for path in ("/v1/models", "/ui/activity", "/metrics", "/openapi.json"):
        assert (await server.call("GET", path, headers=HTML)).status == 401, path
    assert (await server.get("/ui/activity", authorization=f"Bearer {KEY}")).status == 200


async def requests_seen(server: RunningServer, key: str) -> list[dict[str, object]]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return (await server.call("GET", "/ui/activity", headers=headers)).json["requests"]


async def test_a_key_sees_its_own_requests_and_an_administrator_all(serve):
    server = await serve(tick=0.02, api_keys=(KEY, OTHER_KEY), admin_keys=(ADMIN_KEY,))
    secret = "nobody else may read this"
    body = {"model": "tiny", "messages": [{"role": "user", "content": secret}], "max_tokens": 500}
    asking = asyncio.create_task(server.call("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {KEY}"}))
    await server.until(lambda: any(request.progress.output_tokens for request in server.service.open_requests))
    (own,), others, (seen,) = [await requests_seen(server, key) for key in (KEY, OTHER_KEY, ADMIN_KEY)]
    assert others == []
    assert (own["api"], own["model"], own["started"]) == ("openai", "tiny", True)
    assert own["prompt_tokens"] > 0 and own["output_tokens"] > 0 and own["seconds"] > 0
    assert seen["id"] == own["id"] and seen["key"] == "key-1"
    for key in (KEY, ADMIN_KEY):
        page = await server.get("/ui/activity", authorization=f"Bearer {key}")
        assert secret.encode() not in page.body and KEY.encode() not in page.body
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await server.wait_until_idle()
    assert await requests_seen(server, ADMIN_KEY) == []


async def test_samples_count_what_happened_between_them(serve):
    server = await serve()
    history = ActivityHistory()
    history.take_sample(server.service.models)
    await server.control()
    await server.wait_until_idle()
    history.take_sample(server.service.models)
    times, rows = history.samples_since(0.0)["tiny"]
    before, after = [dict(zip(SAMPLE_FIELDS, row, strict=True)) for row in rows]
    assert after["generated_tokens"] - before["generated_tokens"] == 8 and after["finished"] - before["finished"] == 1
    assert before["ttft_mean"] != before["ttft_mean"]  # NaN: there was no token
    assert 0 < after["ttft_mean"] <= after["ttft_p95"] * (1 + 1e-9) and after["tpot_mean"] > 0
    assert history.samples_since(times[0])["tiny"][0] == times[1:]
    for _ in range(KEPT_SAMPLES + 5):
        history.take_sample(server.service.models)
    assert len(history.samples_since(0.0)["tiny"][0]) == KEPT_SAMPLES


async def test_activity_refuses_a_time_that_is_none(serve):
    server = await serve()
    answer = await server.get("/ui/activity?since=yesterday")
    assert answer.status == 400 and "yesterday" in answer.error["message"]


def test_the_page_of_apis_lists_every_document():
    text = page_files()["documents.js"].body.decode()
    listed = re.findall(r'^  \["([^"]*)", "', text, re.MULTILINE)
    documents = {mount.prefix + DOCUMENT_PATH for mount in API_MOUNTS}
    assert sorted(f"/{prefix}{DOCUMENT_PATH}".replace("//", "/") for prefix in listed) == sorted(documents)
