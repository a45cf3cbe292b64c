"""MindIE's service plane through a running server: documented examples, limits of the configuration file, and a server
that replaces MindIE on all of its planes."""

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.certificates import make_authority, make_certificate
from support.free_ports import free_port
from support.loop_clock import pass_time
from test_examples import member_paths

from parley import hub
from parley.dialects import mindie
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces.chat import read_mindie_chat
from parley.dialects.mounts import SERVER_MOUNT, ApiMount
from parley.dialects.request_context import RequestContext
from parley.types import ChatPrompt, Media, MediaPath, Message, PlacedMedia

STRICT, STRICT_OLD = MindieRules("strict", vllm=False), MindieRules("strict-old", vllm=False)
LAST_MEMBERS = '"best_of": 1, "n": 1, "logprobs": false, "top_logprobs":null }'
SAMPLING_MEMBERS = (
    '"stream": %s, "presence_penalty": 1.03, "frequency_penalty": 1.0, "repetition_penalty": 1.0, "temperature": 0.5, '
    '"top_p": 0.95, "top_k": %d, "seed": null, "stop": ["stop1", "stop2"], "stop_token_ids": [2, 13], '
    '"include_stop_str_in_output": false, "skip_special_tokens": true, "ignore_eos": false, "max_tokens": 20, '
)
USER_MESSAGE = '{ "model": "tiny", "messages": [{ "role": "user", "content": "You are a helpful assistant." }], '
SINGLE_TURN = USER_MESSAGE + SAMPLING_MEMBERS + LAST_MEMBERS
FIRST_TURN = (
    '{ "model": "tiny", "messages": [ {"role": "system", "content": "You are a helpful customer support assistant."}, '
    '{"role": "user", "content": "Hi, can you tell me what is the best city in China? Just tell me the answer."}%s ], '
)
SECOND_TURN = (
    ', {"role": "assistant", "content": "The best city in China is subjective and depends on personal preferences, but '
    "**Shanghai** is often considered one of the most vibrant and dynamic cities in the country. It is a global "
    'financial hub, known for its modern skyline, cultural diversity, and international influence."}, {"role": "user", '
    '"content": "What is the best thing in this city?"}'
)
THINKING = '"chat_template_kwargs": {"enable_thinking": false} }'
IMAGE_CHAT = (
    '{ "model": "tiny", "messages": [{ "role": "user", "content": [ {"type": "text", "text": "My name is Olivier and '
    'I"}, {"type": "image_url", "image_url": "/xxxx/test.png"} ] }], ' + SAMPLING_MEMBERS % ("false", 0) +
    '"best_of": null, "n": null, "logprobs": false, "top_logprobs":null }'
)  # fmt: skip
USAGE = {
    "usage",
    *(f"usage.{name}" for name in (
        "prompt_tokens", "prompt_tokens_details", "prompt_tokens_details.cached_tokens", "completion_tokens",
        "total_tokens", "batch_size", "queue_wait_time",
    )),
}  # fmt: skip
ENVELOPE = {"id", "object", "created", "model", "choices", "choices.index", "choices.finish_reason"}
MESSAGE = {"choices.message", "choices.message.role", "choices.message.content"}
DELTA = {"choices.delta", "choices.delta.role", "choices.delta.content"}
TIMES = {"prefill_time", "decode_time_arr"}
OPTIONAL_MEMBERS = {"choices.message.tool_calls", "choices.logprobs"}


def service_plane(rules: MindieRules) -> tuple[ApiMount, ...]:
    return (ApiMount("", mindie.service_dialect(rules)), SERVER_MOUNT)


async def post_chat(running_server: Any, body: str) -> Any:
    return await running_server.call(
        "POST", "/v1/chat/completions", body.encode(), {"content-type": "application/json"}
    )


async def test_mindie_documented_chats_get_the_documented_members(serve):
    single = SINGLE_TURN % ("false", 0)
    sampling = SAMPLING_MEMBERS % ("false", 1)
    rounds = [
        FIRST_TURN % "" + sampling + THINKING,
        FIRST_TURN % SECOND_TURN + sampling + '"best_of": null, ' + THINKING,
    ]
    for rules, bodies, expected in (
        (STRICT_OLD, [single], MESSAGE),
        (STRICT, [single, *rounds], MESSAGE | OPTIONAL_MEMBERS),
    ):
        running_server = await serve(surfaces=service_plane(rules))
        for body in bodies:
            answer = await post_chat(running_server, body)
            assert answer.status == 200, answer.body
            assert member_paths(answer.json) == ENVELOPE | USAGE | TIMES | expected
            usage = answer.json["usage"]
            count = usage["completion_tokens"]
            assert len(usage["batch_size"]) == len(usage["queue_wait_time"]) == count
            assert len(answer.json["decode_time_arr"]) == count - 1
        answer = await post_chat(running_server, IMAGE_CHAT)
        assert (answer.status, list(answer.json)) == (422, ["error", "error_type"])


@pytest.mark.parametrize("stream", [False, True])
def test_mindie_documented_chat_with_an_image_is_read_by_models_that_see(stream):
    context = RequestContext("0f", 1, "fp", media_limits={"image": 1})
    body = IMAGE_CHAT.replace('"stream": false', f'"stream": {"true" if stream else "false"}')
    request = read_mindie_chat(STRICT, body.encode(), context).request
    item = Media("image", MediaPath("/xxxx/test.png"), "messages[0].content[1].image_url")
    assert request.stream is stream
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [Message("user", "My name is Olivier and I", media=[PlacedMedia(24, item)])]


async def test_mindie_documented_stream_has_the_documented_frames(serve):
    for full in (False, True):
        running_server = await serve(surfaces=service_plane(MindieRules("strict-old", vllm=False, full_text=full)))
        answer = await post_chat(running_server, SINGLE_TURN % ("true", 0))
        assert answer.headers["content-type"] == "text/event-stream"
        *pieces, last = answer.events
        assert pieces and all(member_paths(piece) == ENVELOPE | DELTA for piece in pieces)
        assert member_paths(last) == ENVELOPE | DELTA | USAGE | ({"full_text"} if full else set())
        assert list(last)[-2:] == ["usage", "choices"] and last["choices"][0]["finish_reason"] == "length"
        texts = [event["choices"][0]["delta"]["content"] for event in answer.events]
        assert last["full_text"] == texts[-1] and texts[1].startswith(texts[0]) if full else texts[1] != texts[0]


async def test_mindie_sampling_limits_depend_on_the_vllm_flavour(serve):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for vllm, temperature_status, top_k_status in ((True, 200, 422), (False, 422, 200)):
        running_server = await serve(surfaces=service_plane(MindieRules("strict", vllm=vllm)))
        assert (
            await running_server.post("/v1/chat/completions", body | {"temperature": 3})
        ).status == temperature_status
        assert (await running_server.post("/v1/chat/completions", body | {"top_k": 0})).status == top_k_status
        assert (
            await running_server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2})
        ).status == 200


async def test_mindie_unknown_model_is_422_in_a_body_and_404_in_a_path(serve):
    running_server = await serve(surfaces=service_plane(MindieRules("strict")))
    answer = await running_server.post("/v1/completions", {"model": "x", "prompt": "a"})
    assert answer.json == {
        "error": "Not found given model, please check modelName in config file.",
        "error_type": "Input Validation Error",
    }
    assert answer.status == 422
    assert (await running_server.get("/v1/models/x")).status == 404
    assert (await running_server.get("/v1/models/tiny")).json["owned_by"] == "MindIE Server"
    assert (await running_server.get("/v1/models")).body.startswith(b'{\n    "data": [\n')


async def test_mindie_serves_embeddings_only_in_the_extended_profile(serve):
    running_server = await serve(surfaces=service_plane(MindieRules("extended")))
    body = (await running_server.post("/v1/embeddings", {"model": "tiny", "input": ["a", "b"]})).json
    assert [vector["index"] for vector in body["data"]] == [0, 1]
    wrong = await running_server.post("/v1/embeddings", {"model": "tiny"})
    assert (wrong.status, list(wrong.json)) == (422, ["error", "error_type"])
    running_server = await serve(surfaces=service_plane(STRICT))
    assert (await running_server.post("/v1/embeddings", {"model": "tiny", "input": "a"})).status == 404


async def test_mindie_max_prompt_rejects_or_truncates_and_max_output_cuts(serve):
    def body(length: int, **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": [70] * length, **more}

    running_server = await serve(surfaces=service_plane(STRICT), max_prompt=5, max_output=7)
    answer = await running_server.post("/v1/completions", body(5))
    assert answer.json["usage"]["completion_tokens"] == 7
    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert (await running_server.post("/v1/completions", body(5, max_tokens=3))).json["usage"]["completion_tokens"] == 3
    refused = await running_server.post("/v1/completions", body(6))
    assert refused.status == 424 and refused.json["error"].endswith("be greater than 5,the input ids length is 6")
    for overlong, kept_tokens in (("tail", [3, 4, 5, 6, 7]), ("head", [1, 2, 3, 4, 5])):
        seen: list[list[int]] = []
        running_server = await serve(
            surfaces=service_plane(MindieRules("strict", truncation=overlong)),
            max_prompt=5,
            reply=lambda work, index, seen=seen: seen.append(work.token_ids) or [70],
        )
        answer = await running_server.post("/v1/completions", {"model": "tiny", "prompt": [1, 2, 3, 4, 5, 6, 7]})
        assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] == 5 and seen == [kept_tokens]
        long = await running_server.post(
            "/v1/completions", {"model": "tiny", "prompt": "a b " * 20_000, "max_tokens": 1}
        )
        assert long.json["usage"]["prompt_tokens"] == 5


async def test_mindie_strict_refusal_of_any_long_prompt_names_its_length(serve):
    """Clients match on the text, which must not depend on how far the prompt exceeds the limit."""
    running_server = await serve(surfaces=service_plane(STRICT), max_prompt=50)
    for words in (100, 60_000):
        for path, member in (("/generate", "prompt"), ("/generate_stream", "inputs"), ("/infer", "inputs")):
            answer = await running_server.post(path, {member: "word " * words})
            text = "This model's maximum input ids length cannot be greater than 50,the input ids length is "
            found = re.fullmatch(f"Failed to enqueue inferRequest. {text}([0-9]+)", answer.json["error"])
            assert answer.status == 424 and found and int(found[1]) >= words, answer.body


async def test_mindie_openai_routes_report_exceeded_time_limits(serve):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3000}
    for limit in ("timeout", "token_timeout"):
        running_server = await serve(surfaces=service_plane(STRICT), tick=0.01, **{limit: 60})
        calls = [
            asyncio.create_task(running_server.post("/v1/completions", body | {"stream": stream}))
            for stream in (False, True)
        ]
        await running_server.until(lambda server=running_server: server.engine.stats.generated_tokens > 20)
        running_server.engine.step_gate.clear()
        await pass_time(60)
        whole, stream = await asyncio.gather(*calls)
        assert (whole.status, whole.json["error_type"]) == (500, "Incomplete Generation")
        # a started stream ends with the bare text
        assert stream.status == 200 and not stream.body.endswith(b"\n\n") and b"[DONE]" not in stream.body
        running_server.engine.step_gate.set()
        await running_server.wait_until_idle()


# -- a server that replaces MindIE


@pytest.fixture
def built_in_model() -> Path:
    model_folder = hub.find_model(hub.BUILT_IN)
    assert model_folder is not None
    return model_folder


def write_config(root: Path, model: Path, instance: str = "StandardMock", **server: Any) -> Path:
    file = root / "conf" / "config.json"
    file.parent.mkdir(exist_ok=True)
    model_ = {"modelName": "qwen", "modelWeightPath": str(model), "modelInstanceType": instance}
    deploy = {"maxSeqLen": 256, "ModelConfig": [model_]}
    file.write_text(json.dumps({"ServerConfig": server, "BackendConfig": {"ModelDeployConfig": deploy}}))
    return file


def start_server(*flags: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "parley", "serve", *map(str, flags)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.skipif(not shutil.which("openssl"), reason="the openssl command makes the certificates")
def test_mindie_config_file_starts_all_planes_over_mutual_tls(tmp_path, built_in_model):
    root = tmp_path / "mindie"
    for folder in ("security/ca", "security/certs", "security/keys"):
        (root / folder).mkdir(parents=True)
    make_authority(tmp_path, "ours")
    make_certificate(tmp_path, "server", "ours")
    make_certificate(tmp_path, "friend", "ours")
    for name, place in (("ours", "ca/ca.pem"), ("server", "certs/server.pem")):
        shutil.copy(tmp_path / f"{name}.pem", root / "security" / place)
    shutil.copy(tmp_path / "server.key", root / "security" / "keys" / "server.key.pem")
    ports = {name: free_port() for name in ("port", "managementPort", "metricsPort")}
    process = start_server(
        "--mindie-config", write_config(root, built_in_model, ipAddress="127.0.0.1", someThing=1, **ports)
    )
    lines: list[str] = []
    ready = threading.Event()

    def collect_lines() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready in"):
                ready.set()

    collector = threading.Thread(target=collect_lines, daemon=True)
    collector.start()
    try:
        assert ready.wait(60), lines
        tls_context = ssl.create_default_context(cafile=tmp_path / "ours.pem")
        tls_context.load_cert_chain(tmp_path / "friend.pem", tmp_path / "friend.key")

        def call(port: str, path: str, body: Any = None) -> tuple[int, bytes]:
            data = None if body is None else json.dumps(body).encode()
            url = f"https://127.0.0.1:{ports[port]}{path}"
            try:
                with urllib.request.urlopen(url, data, timeout=30, context=tls_context) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()

        text = {"model": "qwen", "prompt": "a", "max_tokens": 3}
        status, body = call("port", "/v1/completions", text)
        assert status == 200 and json.loads(body)["model"] == "qwen"
        assert call("managementPort", "/health/timed-5") == (200, b'{"status":"healthy"}')
        assert b'generation_tokens_total{model_name="qwen"} 4\n' in call("metricsPort", "/metrics")[1]
        assert call("port", "/stopService")[0] == 404 and call("metricsPort", "/stopService")[0] == 404
        assert json.loads(call("managementPort", "/info")[1])["models"][0]["max_total_tokens"] == 256
        assert call("managementPort", "/stopService") == (200, b"")
        assert process.wait(30) == 0
        assert any("without effect here: ServerConfig.someThing" in line for line in lines)
        assert not any(":8000" in line for line in lines)
    finally:
        process.kill()
        with process:  # waits and closes the pipe
            collector.join(5)


@pytest.mark.parametrize(
    ("server", "text"),
    [
        ({"port": 5}, "ServerConfig.port: 5 is not a whole number from 1024 to 65535."),
        (
            {"httpsEnabled": True},
            r"cannot encrypt 127.0.0.1 port \d+: .*security/certs/server.pem cannot be read: No such",
        ),
        ({}, "cannot listen on 127.0.0.1 port {}: Address already in use."),
    ],
)
def test_mindie_config_start_failure_names_its_cause(tmp_path, built_in_model, server, text):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server_config = {"httpsEnabled": False, "ipAddress": "127.0.0.1", "port": port} | server
        process = start_server("--mindie-config", write_config(tmp_path, built_in_model, **server_config))
        output, _ = process.communicate(timeout=60)
    assert process.returncode in (1, 2) and re.search(text.format(port) if "{}" in text else text, output), output


def test_mindie_config_rejects_a_missing_weight_folder(tmp_path):
    process = start_server("--mindie-config", write_config(tmp_path, tmp_path / "none", "Standard"))
    output, _ = process.communicate(timeout=60)
    assert (
        process.returncode == 2 and "ModelConfig[0].modelWeightPath" in output and "there is no such folder" in output
    )
