"""How command-line options reach the server, and how a server process starts and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from support.cli_process import clean_environment

from parley.cli.serve import offered_models
from parley.cli.serve_config.server_options import PEER_PORT_ATTEMPTS, read_key_file, server_options
from parley.dialects.request_context import ApiOptions
from parley.serving.server_options import ListenAddress, MediaOptions, OfferedModel, ServerOptions
from parley.settings.config import SERVE_OPTIONS
from parley.settings.media_hosts import MediaHost
from parley.settings.options import ConfigError, resolve_options
from parley.types import CacheEventSettings


def options(*flags: str) -> ServerOptions:
    return server_options(resolve_options(SERVE_OPTIONS, flags, {}))


def models(*flags: str) -> list[OfferedModel]:
    return offered_models(resolve_options(SERVE_OPTIONS, flags, {}))


def test_serve_without_options_uses_the_servers_defaults():
    assert options() == ServerOptions(peer_port_attempts=PEER_PORT_ATTEMPTS)
    assert options("--peer-port", "1121").peer_port_attempts == 1
    assert [offer.names for offer in models()] == [("parley-demo",)]


def test_memory_for_bodies_suffices_for_the_largest():
    assert options().body_budget.limit == 256 << 20
    assert options("--body-limit", "1GiB", "--body-memory", "2GiB").body_budget.limit == 2 << 30
    with pytest.raises(ConfigError, match="body-memory must be at least body-limit"):
        options("--body-limit", "1GiB")


def test_options_that_are_refused_leave_no_engine_behind():
    command = [sys.executable, "-m", "parley", "serve", "--body-limit", "1GiB"]
    with subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, start_new_session=True) as process:
        _, message = process.communicate(timeout=120)
    assert process.returncode == 2 and b"body-memory must be at least body-limit" in message
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_serve_passes_every_option_to_the_server(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\n  second  \n\nthird priority\n")
    flags = "--host ::1 --port 1 --name a --name b,c --api-key first --max-queue 2 --drain 1m --body-limit 1MiB"
    flags += " --body-rate 2KiB"
    more = "--cors-origin * --allow-host h --ping 10s --tokenizer-info --in-process --quiet --log-format json"
    (tmp_path / "chiefs").write_text("chief\n")
    more += f" --api-key-file {keys} --admin-key-file {tmp_path / 'chiefs'} --share-prefixes"
    more += " --max-logprobs -1 --enable-force-include-usage --return-tokens-as-token-ids --enable-per-request-metrics"
    more += " --trust-request-mm-kwargs"
    parsed = options(*flags.split(), *more.split())
    assert parsed == ServerOptions(
        peer_port_attempts=PEER_PORT_ATTEMPTS,
        host="::1",
        port=1,
        api_keys=("first", "second", "third"),
        admin_keys=("chief",),
        priority_keys=("third",),
        key_files=(keys, tmp_path / "chiefs"),
        share_prefixes=True,
        max_queue=2,
        drain=60.0,
        body_limit=1 << 20,
        body_rate=2048,
        cors=("*",),
        hosts=("h",),
        ping_interval=10.0,
        tokenizer_info=True,
        api_options=ApiOptions(-1, True, True, True, False, True),
        access_log=False,
        log_format="json",
    )
    assert [offer.engine for offer in models(*flags.split(), *more.split())] == ["thread"]
    assert [offer.engine for offer in models("--scripted-engine")] == ["scripted"]
    assert [offer.engine for offer in models()] == ["process"]


def test_media_options_reach_the_server(tmp_path):
    flags = f"--media-hosts a.example,internal:b:9000 --media-path {tmp_path} --media-limit image=3,audio=0"
    flags += " --media-size video=1GiB --media-request-size 2GiB --media-memory 3GiB --media-body-limit 100MiB"
    flags += " --media-pixels 1000 --media-workers 2 --media-eager --media-feature-cache 1MiB --enable-mm-embeds"
    parsed = options(*flags.split())
    assert parsed.media == MediaOptions(
        hosts=(MediaHost("a.example"), MediaHost("b", 9000, internal=True)),
        folder=str(tmp_path),
        counts={"image": 3, "video": 2, "audio": 0},
        sizes={"image": 20 << 20, "video": 1 << 30, "audio": 25 << 20},
        request_size=2 << 30,
        memory=3 << 30,
        cache=1 << 20,
        pixels=1000,
        workers=2,
        eager=True,
        accepts_embeddings=True,
    )
    assert parsed.api_options == ApiOptions(enable_mm_embeds=True)
    assert parsed.media_body_limit == 100 << 20
    assert options("--body-memory", "50MiB").media_body_limit == 50 << 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--media-path", "missing"), "media-path: there is no folder missing."),
        (("--media-limit", "image=1,image=2"), "media-limit: image has more than one limit."),
        (
            ("--media-limit", "text=1"),
            "--media-limit: 'text=1' is not of the form KIND=N, for a kind of image, video or audio.",
        ),
        (("--media-size", "image=0"), "--media-size: 'image=0' is not of the form KIND=SIZE: '0' is not a size of"),
        (
            ("--media-hosts", "http://a.example/"),
            "--media-hosts: 'http://a.example/' is not a host such as example.com",
        ),
    ],
)
def test_refuses_media_options_that_make_no_sense(flags, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        options(*flags)


def test_serve_refuses_a_grpc_port_without_its_packages(monkeypatch):
    monkeypatch.setattr("parley.cli.serve_config.server_options.find_spec", lambda name: name)
    parsed = options("--grpc-port", "8001", "--listen", "grpc=[::]:8002,tgi=h:3")
    assert parsed.grpc == (ListenAddress("grpc", "127.0.0.1", 8001), ListenAddress("grpc", "::", 8002))
    assert parsed.listen == (ListenAddress("tgi", "h", 3),)
    monkeypatch.setattr("parley.cli.serve_config.server_options.find_spec", lambda name: None)
    assert options().grpc == ()
    for flags in (("--grpc-port", "8001"), ("--listen", "grpc=h:1")):
        with pytest.raises(ConfigError, match=r"parley-llm\[grpc\]"):
            options(*flags)


def test_served_name_defaults_to_the_models_name():
    assert models("owner/model")[0].names == ("owner/model",)
    assert models("/some/where/tiny/")[0].names == ("tiny",)
    assert models("--name", "a", "--name", "b,c", "owner/model")[0].names == ("a", "b", "c")


@pytest.mark.parametrize("content", ["", "\n# only a comment\n", None])
def test_rejects_a_key_file_without_keys(tmp_path, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_key_file(str(file), "api-key-file")


def test_serves_names_from_a_config_file_and_exits_on_ctrl_c(tiny, tmp_path):
    (tmp_path / "parley.toml").write_text(f'model = "{tiny}"\nname = ["one", "two"]\n[server]\nport = 0\n')
    command = [sys.executable, "-m", "parley", "serve", "--scripted-engine", "--config", str(tmp_path / "parley.toml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment()
    ) as process:
        lines = []
        while not lines or not lines[-1].startswith("ready in"):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        root = next(word for line in lines for word in line.split() if word.endswith("/v1"))
        with urllib.request.urlopen(f"{root}/models", timeout=30) as answer:
            models = json.loads(answer.read())
        assert [model["id"] for model in models["data"]] == ["one", "two"]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 0 and "Traceback" not in rest


def test_serve_exits_with_1_when_its_port_is_taken(parley, tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = parley("serve", str(tiny), "--scripted-engine", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert done.stderr.startswith("parley: cannot listen on 127.0.0.1 port") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("name", "kind"), [("nothing", "folder"), ("nothing.gguf", "file")])
def test_serve_exits_with_1_when_the_model_is_missing(parley, tmp_path, name, kind):
    done = parley("serve", str(tmp_path / name), "--port", "0")
    assert done.returncode == 1
    assert re.fullmatch(rf"parley: .* cannot be served: there is no such {kind}\.\n", done.stderr)


def test_several_models_have_their_own_names_and_options():
    flags = ["--model", "chat,assistant=./a,kv-memory=1GiB,threads=1", "--model", "./b=c,d,dtype=fp32"]
    first, second, third = models("--name", "main", "--threads", "2", "--dtype", "auto", *flags, "--model", "org/x")
    assert (first.names, first.settings.model) == (("chat", "assistant", "main"), "./a")
    assert (first.settings.kv_memory, first.settings.threads, first.settings.dtype) == (1 << 30, 1, "auto")
    assert (second.names, second.settings.model) == (("b=c,d",), "./b=c,d")
    assert (second.settings.threads, second.settings.dtype) == (2, "float32")
    assert (third.names, third.settings.model) == (("org/x",), "org/x")


def test_only_the_first_model_publishes_kv_events_unless_another_has_its_own_address():
    flags = ["--kv-events", "tcp://*:5557", "--kv-events-replay", "tcp://*:5558", "--kv-events-topic", "kv@a@m"]
    first, second, third = models(*flags, "--model", "./a", "--model", "./b", "--model", "./c,kv-events=ipc://c")
    assert first.settings.cache_events == CacheEventSettings(
        "tcp://*:5557", "tcp://*:5558", "kv@a@m", "map", 10_000, 100_000
    )
    assert second.settings.cache_events is None
    assert third.settings.cache_events == CacheEventSettings("ipc://c", "", "kv@a@m", "map", 10_000, 100_000)


def test_refuses_kv_events_without_their_package(monkeypatch):
    monkeypatch.setattr("parley.cli.serve.find_spec", lambda name: None if name == "zmq" else object())
    with pytest.raises(ConfigError, match=r"install it with: pip install 'parley-llm\[kv-events\]'"):
        models("--kv-events", "tcp://*:5557", "--model", "./a")


def test_reads_several_models_from_one_environment_variable():
    config = resolve_options(SERVE_OPTIONS, [], {"PARLEY_MODEL": "a,b=./x,threads=1; c=./y"})
    assert [offer.names for offer in offered_models(config)] == [("a", "b"), ("c",)]
    model_text = next(option for option in SERVE_OPTIONS if option.name == "model").format_value(config["model"])
    assert resolve_options(SERVE_OPTIONS, ["--model", model_text], {})["model"] == config["model"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "./a", "--kv-events", "tcp://*:1", "--no-prefix-cache"], "no events without a prefix cache"),
        (["--model", "./a", "--kv-events", "ipc://a", "--model", "./b,kv-events=ipc://a"], "ipc://a is given twice"),
        (["--model", "./a", "--kv-events", "5557"], "kv-events"),
        (["--model", "./a", "--kv-events", "tcp://*:1", "--cost-model", "costs.json"], "no events with cost-model"),
        (["--model", "a=./x", "--model", "b,a=./y"], "the name a is given to more than one"),
        (["./x", "--model", "x=./y"], "the name x is given to more than one"),
        (["--model", "a,a=./x"], "different names"),
        (["--model", "=./x"], "different names"),
        (["--model", "a="], "NAME=MODEL"),
        (["--model", "a=./x,thread=1"], "thread is not an option"),
        (["--model", "a=./x,threads=0"], "--model a: threads"),
        (["--model", "a=./x,port=1"], "port is not an option"),
    ],
)
def test_rejects_conflicting_options_of_several_models(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        models(*flags)


def test_key_file_gives_names_groups_and_priority(tmp_path):
    file = tmp_path / "keys"
    file.write_text("plain\nfast priority\nanns groups=red,blue name=ann priority\n")
    lines = read_key_file(str(file), "api-key-file")
    assert [line.has_priority for line in lines] == [False, True, True]
    assert [(line.name, line.groups) for line in lines] == [("", ()), ("", ()), ("ann", ("red", "blue"))]
    for words in (
        "other",
        "name=",
        "name",
        "name=a name=b",
        "groups=admins",
        "priority=1",
        "priority priority",
    ):
        file.write_text(f"key {words}\n")
        with pytest.raises(ConfigError, match="key 1 is wrong"):
            read_key_file(str(file), "api-key-file")
