"""Ollama through a running server: whole and streamed answers, names with tags, windows, discovery and errors."""

import asyncio
import json
import threading

import pytest
from support import tiny_models
from support.http_client import HELLO_CHAT, build_request
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from parley import hub
from parley.dialects.mounts import DEDICATED_APIS, dedicated_mounts
from parley.types import ParleySettings

HELLO = HELLO_CHAT["messages"]
PLAIN = {"think": False, "options": {"temperature": 0, "num_predict": 8}}
TURN = {"role": "user", "content": "word " * 12}


@pytest.fixture
async def server(serve):
    return await serve()


def read_lines(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_ollama_stream_and_whole_answer_have_the_same_content(server):
    for path, body in (("chat", {"messages": HELLO}), ("generate", {"prompt": "Hello", "raw": True})):
        for prefix in ("/api/", "/ollama/api/"):
            request = {"model": "tiny", **body, **PLAIN}
            *lines, last = read_lines(await server.post(prefix + path, request))
            whole = (await server.post(prefix + path, request | {"stream": False})).json
            texts = [line["message"]["content"] if path == "chat" else line["response"] for line in (*lines, last)]
            assert "".join(texts) == (whole["message"]["content"] if path == "chat" else whole["response"])
            assert not any(line["done"] for line in lines) and last["done"] and whole["done"]
            for answer in (last, whole):
                assert (answer["eval_count"], answer["done_reason"]) == (8, "length")
                assert answer["total_duration"] >= answer["eval_duration"] > 0 and answer["prompt_eval_count"]


async def test_ollama_sends_each_line_as_a_chunk(server):
    """The last text and the end of an answer come at the same time."""
    for path, body in (("chat", {"messages": HELLO}), ("generate", {"prompt": "Hello"})):
        connection = await server.connect()
        await connection.send(build_request("POST", f"/api/{path}", {"model": "tiny", **body, **PLAIN}))
        await connection.head()
        chunks = await connection.chunks()
        *parts, end = (json.loads(chunk)["done"] for chunk in chunks)
        assert end and parts and not any(parts)
        assert all(chunk.count(b"\n") == 1 for chunk in chunks)


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
PROGRAMS = (
    "http://localhost:3000",
    "https://127.0.0.1",
    "app://obsidian.md",
    "tauri://app.example",
    "vscode-webview://1a",
)
STRANGERS = ("https://evil.example", "null", "http://localhost.evil.example", "http://evil.example/app://x", "apps://x")


@pytest.mark.parametrize("root", ["", "/below"])
async def test_programs_of_this_machine_may_call_ollama_from_their_pages(serve, root):
    """Those that the original allows; other APIs and origins stay refused without the option cors-origin."""
    server = await serve(root_path=root)
    for path in ("/api/chat", "/ollama/api/chat", "/api/tags", "/v1/models"):
        method = "POST" if path.endswith("chat") else "GET"
        body = {"model": "tiny", "messages": HELLO, "stream": False, **PLAIN} if method == "POST" else None
        for origin in PROGRAMS + STRANGERS:
            is_allowed = origin in PROGRAMS and path != "/v1/models"
            allowed = origin if is_allowed else None
            answer = await server.call("OPTIONS", root + path, None, {"origin": origin, **PREFLIGHT})
            assert (answer.status == 200, answer.headers.get("access-control-allow-origin")) == (is_allowed, allowed)
            answer = await server.call(method, root + path, body, {"origin": origin})
            assert (answer.status, answer.headers.get("access-control-allow-origin")) == (
                200 if is_allowed else 403,
                allowed,
            )


async def test_ollamas_address_has_the_apis_of_openai_and_anthropic_at_v1(server):
    """As the original serves them; the address itself, and paths that nobody has, stay Ollama's."""
    for path, body in (
        ("/chat/completions", {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}),
        ("/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}),
        ("/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 16, "temperature": 0}),
        ("/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}),
        ("/messages", {"model": "nobody", "messages": HELLO, "max_tokens": 4}),
        ("/chat/completions", {"model": "nobody", "messages": HELLO}),
    ):
        here, there = [await server.post(f"{prefix}/v1{path}", body) for prefix in ("/ollama", "")]
        assert (here.status, here.json.keys()) == (there.status, there.json.keys())
        for member in ("choices", "content"):
            assert here.json.get(member) == there.json.get(member)
    assert (await server.get("/ollama/v1/models")).json["data"][0]["id"] == "tiny"
    claimed = await server.call("GET", "/ollama/v1/models", None, {"anthropic-version": "2023-06-01"})
    assert claimed.json["data"][0]["type"] == "model"
    assert (await server.get("/ollama/")).body == b"Ollama is running"
    assert (await server.get("/ollama/nothing")).body == b"404 page not found"
    assert DEDICATED_APIS["ollama"].name == "ollama"


async def test_ollama_context_continues_an_answer(server):
    first = (await server.post("/api/generate", {"model": "tiny", "prompt": "Hello", "stream": False, **PLAIN})).json
    body = {"model": "tiny", "prompt": "More", "stream": False, "context": first["context"], **PLAIN}
    second = (await server.post("/api/generate", body)).json
    assert second["context"][: len(first["context"])] == first["context"]
    wrong = await server.post("/api/generate", body | {"context": [10**6]})
    assert wrong.status == 400 and "out of vocabulary" in wrong.json["error"]


async def test_ollama_template_takes_the_place_of_the_models_own(server):
    body = {"model": "tiny", "prompt": "Hello", "stream": False, **PLAIN}
    raw = (await server.post("/api/generate", body | {"prompt": "S: Hello", "raw": True})).json
    templated = body | {"system": "S", "template": "{{ .System }}: {{ .Prompt }}{{ .Response }}<end>"}
    answer = (await server.post("/api/generate", templated)).json
    assert (answer["response"], answer["prompt_eval_count"]) == (raw["response"], raw["prompt_eval_count"])
    later = (await server.post("/api/generate", templated | {"context": answer["context"]})).json
    assert later["context"][: len(answer["context"])] == answer["context"]
    wrong = await server.post("/api/generate", body | {"template": "{{ range .Messages }}"})
    assert (wrong.status, wrong.json) == (400, {"error": "template: :1: unexpected EOF"})


async def test_ollama_takes_names_with_and_without_the_default_tag(serve):
    server = await serve(names=("org/tiny", "beta:latest"))
    for name in ("org/tiny", "org/tiny:latest", "beta", "beta:latest", "library/Beta", "hf.co/org/tiny"):
        body = {"model": name, "messages": HELLO, "stream": False, **PLAIN}
        assert (await server.post("/api/chat", body)).json["model"] == name
        assert (await server.post("/api/show", {"model": name})).status == 200
        assert (await server.post("/v1/chat/completions", {"model": name, "messages": HELLO})).status == 200
    names = [entry["name"] for entry in (await server.get("/api/tags")).json["models"]]
    assert sorted(names) == ["beta:latest", "org/tiny:latest"]
    for name in ("org/tiny:7b", "tiny"):
        answer = await server.post("/api/chat", {"model": name, "messages": HELLO})
        assert (answer.status, answer.json) == (404, {"error": f"model '{name}' not found"})


async def test_ollama_window_drops_whole_turns_and_never_a_part(server, caplog):
    system = {"role": "system", "content": "Be brief."}
    body = {"model": "tiny", "stream": False, "think": False}

    async def prompt_tokens(*messages, **options):
        answer = await server.post("/api/chat", body | {"messages": messages, "options": {"num_predict": 1, **options}})
        return answer.json.get("prompt_eval_count"), answer

    full, _ = await prompt_tokens(system, TURN, {"role": "assistant", "content": "x"}, TURN)
    short, _ = await prompt_tokens(system, TURN)
    cut, _ = await prompt_tokens(system, TURN, {"role": "assistant", "content": "x"}, TURN, num_ctx=full)
    assert cut == short < full
    assert "lost its 2 oldest messages" in caplog.text
    count, refused = await prompt_tokens(system, TURN, num_ctx=8)
    assert (count, refused.status) == (None, 400)
    assert refused.json["error"].startswith("the input length exceeds the context length: This request's maximum")
    messages = [system, TURN, {"role": "assistant", "content": "x"}, TURN]
    refused = await server.post(
        "/api/chat", body | {"messages": messages, "truncate": False, "options": {"num_ctx": full}}
    )
    assert refused.status == 400
    long, answer = await prompt_tokens(system, TURN, num_ctx=short + 5, num_predict=100)
    assert (long, answer.json["eval_count"], answer.json["done_reason"]) == (short, 5, "length")


async def test_ollama_port_is_recognized_by_its_clients(serve):
    server = await serve(surfaces=dedicated_mounts("ollama", "openai"))
    assert (await server.get("/")).body == b"Ollama is running"
    assert (await server.call("HEAD", "/")).status == (await server.call("HEAD", "/api/tags")).status == 200
    version = (await server.get("/api/version")).json["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)
    (model,) = (await server.get("/api/tags")).json["models"]
    running = await server.get("/api/ps")
    assert running.json["models"][0]["name"] == model["name"] == "tiny:latest"
    assert running.headers["content-type"] == "application/json; charset=utf-8"
    shown = (await server.post("/api/show", {"model": model["name"]})).json
    assert shown["model_info"][shown["model_info"]["general.architecture"] + ".context_length"] == 4096
    assert "completion" in shown["capabilities"]
    assert (await server.post("/api/pull", {"model": model["name"], "stream": False})).json == {"status": "success"}
    answer = await server.post("/v1/chat/completions", {"model": model["name"], "messages": HELLO, "max_tokens": 1})
    assert answer.status == 200


async def test_ollama_pull_downloads_where_the_operator_allows_it(serve, monkeypatch, tmp_path):
    pulled_names = []

    def download(name, report, **options):
        pulled_names.append(name)
        if name != "owner/model":
            raise hub.ModelMissing(f"{name} cannot be served: the hub knows no such model.")
        report("downloading", 0.5)
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            (tmp_path / file).write_bytes(b"{}")
        return tmp_path

    monkeypatch.setattr(hub.model_folder, "download_model", download)
    allowed, forbidden = await serve(pull=True), await serve()
    for name in ("owner/model", "hf.co/owner/model:latest"):
        assert read_lines(await allowed.post("/api/pull", {"model": name}))[-1] == {"status": "success"}
    assert (await allowed.post("/api/pull", {"model": "owner/model", "stream": False})).json == {"status": "success"}
    assert "knows no such model" in read_lines(await allowed.post("/api/pull", {"model": "owner/x"}))[-1]["error"]
    for name in (str(tmp_path), "../x", "a/b/c"):
        assert (
            "no name of a model on the hub" in read_lines(await allowed.post("/api/pull", {"model": name}))[-1]["error"]
        )
    assert set(pulled_names) == {"owner/model", "owner/x"}
    refused = await forbidden.post("/api/pull", {"model": "owner/model"})
    assert (refused.status, set(refused.json)) == (500, {"error"})


async def test_a_download_whose_client_left_still_delays_the_next_one(serve, monkeypatch, tmp_path):
    names, may_end = [], threading.Event()

    def download(name, report, **options):
        names.append(name)
        may_end.wait(30)
        raise hub.ModelMissing("The hub knows no such model.")

    monkeypatch.setattr(hub.model_folder, "download_model", download)
    server = await serve(pull=True)
    connection = await server.connect()
    await connection.send(build_request("POST", "/api/pull", {"model": "owner/first"}))
    await connection.reader.readuntil(b"\n")
    await server.until(lambda: names == ["owner/first"])
    connection.close()
    next_pull = asyncio.create_task(server.post("/api/pull", {"model": "owner/second"}))
    await asyncio.wait({next_pull}, timeout=0.3)
    assert names == ["owner/first"]
    may_end.set()
    assert "knows no such model" in read_lines(await next_pull)[-1]["error"]
    assert names == ["owner/first", "owner/second"]


async def test_ollama_words_errors_of_paths_and_models(server):
    missing, wrong_method = await server.get("/api/me"), await server.call("DELETE", "/api/tags")
    assert (missing.status, missing.body) == (404, b"404 page not found")
    assert (wrong_method.status, wrong_method.body) == (405, b"405 method not allowed")
    assert (await server.call("HEAD", "/api/blobs/sha256:00")).status == 404
    unknown = await server.post("/api/embed", {"model": "x", "input": "a"})
    assert (unknown.status, unknown.json["error"]) == (404, 'model "x" not found, try pulling it first')
    for path in ("/api/generate", "/ollama/api/chat"):
        answer = await server.post(path, b"{", **{"content-type": "application/x-www-form-urlencoded"})
        assert answer.status == 400 and list(answer.json) == ["error"]


async def test_ollama_load_requests_count_as_no_mistakes(server):
    for path, body in (("chat", {"messages": []}), ("generate", {"prompt": "", "keep_alive": 0})):
        assert (await server.post(f"/api/{path}", {"model": "tiny"} | body)).json["done"]
    assert server.model.metrics.invalid_requests.total_count == 0
    await server.wait_until_idle()


async def test_ollama_embeds_empty_texts_among_others_and_refuses_a_window_of_marks_alone(serve, tmp_path):
    """A tokenizer like BERT's puts a mark at either side of a text."""
    tiny_models.write_model(tmp_path, "qwen3")
    file = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("<|im_start|>", "<|im_end|>")]
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=marks)
    tokenizer.save(file)
    server = await serve(settings=ParleySettings(model=str(tmp_path), kv_memory=8 << 20, max_batch=4, threads=1))
    body = {"model": "tiny", "input": ["", "why is the sky blue?"]}
    whole = (await server.post("/api/embed", body)).json
    assert len(whole["embeddings"]) == 2 and whole["prompt_eval_count"] > 4
    for window, count in ((1, None), (2, None), (3, 5)):
        answer = await server.post("/api/embed", body | {"options": {"num_ctx": window}})
        if count is None:
            expected = {"error": "input after truncation exceeds maximum context length"}
            assert (answer.status, answer.json) == (400, expected)
        else:
            assert answer.json["prompt_eval_count"] == count
    refused = await server.post("/api/embed", body | {"truncate": False, "options": {"num_ctx": 3}})
    assert (refused.status, refused.json["error"]) == (400, "the input length exceeds the context length")
