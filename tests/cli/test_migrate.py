"""Command lines of other servers become commands of parley, and their flags are explained where they do not belong."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.cli.main import main
from parley.cli.peers.foreign_flags import explain_foreign_flag
from parley.cli.peers.tables import peer_names, read_peer, read_peers
from parley.cli.peers.translate import CONVERSIONS, MODEL, has_counterpart, translate_command
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import resolve_options

PEERS = {name: read_peer(name) for name in peer_names()}


def translate(peer: str, command: str) -> str:
    return shlex.join(translate_command(PEERS[peer], shlex.split(command)).command())


@pytest.mark.parametrize(
    ("peer", "old", "new"),
    [
        ("vllm", "vllm serve m --max-model-len 8k --max_num_seqs=4", "m --max-model-len 8000 --max-batch 4"),
        ("vllm", "--model m --served-model-name a b", "m --name a --name b"),
        ("vllm", "m --no-enable-prefix-caching --seed 3", "m --no-prefix-cache"),
        ("vllm", "m --lora-modules a=./a b=./b", "m --lora a=./a --lora b=./b"),
        ("vllm", """m --lora-modules '{"name": "a", "path": "/a"}'""", "m --lora a=/a"),
        (
            "vllm",
            """m --limit-mm-per-prompt '{"image": 2, "video": {"count": 1}}'""",
            "m --media-limit image=2 --media-limit video=1",
        ),
        (
            "vllm",
            """m -sc '{"method": "ngram", "num_speculative_tokens": 4}'""",
            "m --speculate ngram --speculate-tokens 4",
        ),
        (
            "vllm",
            """m --allowed-origins '["https://a", "https://b"]'""",
            "m --cors-origin https://a --cors-origin https://b",
        ),
        ("vllm", "m --kv-cache-memory-bytes 1G", "m --kv-memory 1073741824"),
    ],
)
def test_flags_of_vllm_become_ours(peer, old, new):
    assert translate(peer, old) == f"parley serve {new} --host 0.0.0.0"


@pytest.mark.parametrize(
    ("peer", "old", "new"),
    [
        (
            "tgi",
            "docker run -e MAX_TOTAL_TOKENS=99 huggingface/text-generation-inference:3 --model-id a/b -p 80",
            "parley serve a/b --max-model-len 99 --port 80 --host 0.0.0.0",
        ),
        (
            "tgi",
            "docker run --gpus all -p 8080:80 -v /data:/data huggingface/text-generation-inference:3 --model-id a/b",
            "parley serve a/b --host 0.0.0.0 --port 8080",
        ),
        (
            "vllm",
            "docker run --publish=127.0.0.1:8001:8000/tcp vllm/vllm-openai:latest --model a/b",
            "parley serve a/b --host 0.0.0.0 --port 8001",
        ),
        (
            "triton",
            "docker run -p8000:8000 -p8001:8001 triton tritonserver --model-repository=/m",
            "parley serve MODEL --host 0.0.0.0 --grpc-port 8001",
        ),
        (
            "llama.cpp",
            "llama-server -m m.gguf -hfd a/b:Q8_0",
            "parley serve m.gguf --speculate draft=a/b:Q8_0 --port 8080",
        ),
        ("llama.cpp", "llama-server -m m.gguf --no-webui", "parley serve m.gguf --no-ui --port 8080"),
        (
            "tgi",
            "MODEL_ID=a/b text-generation-launcher --quantize bitsandbytes-nf4 --json-output",
            "parley serve a/b --quantization int4 --log-format json --host 0.0.0.0 --port 3000",
        ),
        (
            "tgi",
            "--model-id a/b --huggingface-hub-cache /data",
            "HF_HUB_CACHE=/data parley serve a/b --host 0.0.0.0 --port 3000",
        ),
        (
            "llama.cpp",
            "./llama-server -m m.gguf -t -1 -c 0 -np 2 --port 8000",
            "parley serve m.gguf --max-batch 2 --port 8000",
        ),
        (
            "llama.cpp",
            "LLAMA_ARG_CTX_SIZE=9 llama-server -hf a/b:Q8_0 -ctk q8_0 -ctv q8_0",
            "parley serve a/b:Q8_0 --max-model-len 9 --kv-dtype int8 --port 8080",
        ),
        (
            "sglang",
            "python -m sglang.launch_server --model-path m --tp 2 --disable-radix-cache",
            "parley serve m --no-prefix-cache --port 30000",
        ),
        (
            "triton",
            "tritonserver --model-repository=/m --http-port 80",
            "parley serve MODEL --port 80 --host 0.0.0.0 --grpc-port 8001",
        ),
        ("ollama", "OLLAMA_HOST=[::1]:99 ollama run hf.co/a/b:Q8_0", "parley serve a/b:Q8_0 --host ::1 --port 99"),
    ],
)
def test_commands_of_other_servers_become_ours(peer, old, new):
    assert translate(peer, old) == new


def test_flags_without_counterpart_are_reported_with_the_reason(capfd):
    old = "--model m --tensor-parallel-size 2 --enforce-eager --kv-cache-dtype fp8 --bogus 1 --max-num-seqs 4"
    assert main(["migrate", "vllm", "--", *old.split()]) == 0
    command, report = capfd.readouterr()
    assert command == "parley serve m --max-batch 4 --host 0.0.0.0\n"
    rows = dict(line.strip().split("  ", 1) for line in report.splitlines()[:6])
    assert rows["--tensor-parallel-size 2"].strip().startswith("no counterpart: parley's own engine")
    assert rows["--enforce-eager"].strip().startswith("no counterpart: PARLEY_CUDA_GRAPHS=off in the environment")
    assert rows["--kv-cache-dtype fp8"].strip().startswith("no counterpart: ")
    assert rows["--bogus 1"].strip().startswith("not translated: vLLM documents no --bogus")
    engine = "--engine vllm -- --tensor-parallel-size 2 --enforce-eager --kv-cache-dtype fp8"
    assert report.endswith(f"  parley serve m --max-batch 4 --host 0.0.0.0 {engine}\n")


@pytest.mark.parametrize("adapter", ["{}", '{"name": "a"}', "a"])
def test_an_adapter_without_name_or_folder_has_no_counterpart(capfd, adapter):
    assert main(["migrate", "vllm", "--", "--model", "m", "--lora-modules", adapter]) == 0
    assert "no counterpart: adapters have a name and a folder here: --lora NAME=FOLDER" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-model-len", "9" * 400),
        ("--mm-processor-cache-gb", "inf"),
        ("--kv-events-config", "[" * 100_000),
    ],
)
def test_a_value_that_cannot_be_read_has_no_counterpart(flag, value):
    (result,) = translate_command(PEERS["vllm"], [flag, value]).results
    assert (result.state, bool(result.reason)) == ("missing", True)


# Flags of these versions, as the servers' own lists have them; the newest first, which tables miss most easily.
NEWEST_FLAGS = {
    "vllm": "--offload-backend prefetch --mm-tensor-ipc torch --return-sampling-mask -dpl 2 -cc {} --master-port 1",
    "llama.cpp": "--lazy-mode on --spec-type ngram-mod -cms 64 -ag --reasoning-effort high --kv-offload -fitt 512",
    "sglang": "--enable-hierarchical-cache --hicache-ratio 2 --moe-runner-backend auto --enable-dp-lm-head",
    "ollama": "OLLAMA_VULKAN=1 OLLAMA_REMOTES=ollama.com",
}


@pytest.mark.parametrize("peer", NEWEST_FLAGS)
def test_each_flag_of_the_newest_servers_has_an_answer(peer):
    results = translate_command(PEERS[peer], NEWEST_FLAGS[peer].split()).results
    assert [
        result.original_words for result in results if result.state not in ("missing", "needless", "translated")
    ] == []
    assert [word for result in results for word in result.original_words] == NEWEST_FLAGS[peer].split()
    assert all(
        result.original_words[0].startswith(("-", "OLLAMA")) for result in results
    )  # each value belongs to its flag


@pytest.mark.parametrize(
    ("peer", "flag", "state", "reason"),
    [
        ("vllm", "--no-disable-custom-all-reduce", "missing", "it cannot be switched off: "),
        ("vllm", "--no-enforce-eager", "needless", "it is off unless a flag switches it on"),
        ("vllm", "--no-enable-prompt-embeds", "needless", "it is off unless a flag switches it on"),
        ("llama.cpp", "--no-perf", "missing", "it cannot be switched off: "),
        ("vllm", "--no-max-model-len", "unknown", "vLLM documents no --no-max-model-len"),
        ("vllm", "--no-such-thing", "unknown", "vLLM documents no --no-such-thing"),
    ],
)
def test_a_switch_that_is_switched_off_has_an_answer(peer, flag, state, reason):
    (result,) = translate_command(PEERS[peer], [flag]).results
    assert result.state == state and result.reason.startswith(reason)


def test_a_command_that_parley_would_refuse_is_an_error(capfd):
    assert main(["migrate", "tgi", "--", "--model-id", "m", "--max-batch-size", "many"]) == 1
    assert "would refuse this command: --max-batch: 'many' is not a whole number" in capfd.readouterr().err
    assert main(["migrate", "tgi", "--model-id", "m"]) == 2
    assert "Write -- before" in capfd.readouterr().err
    assert main(["migrate", "tgi"]) == 2


def test_every_row_leads_somewhere():
    for peer in PEERS.values():
        for row in peer.rows:
            assert has_counterpart(row) or row.missing_reason or row.needless_reason, (peer.name, row.name)
            assert row.conversion in CONVERSIONS, (peer.name, row.name)
            assert not row.needless_values or row.needless_reason, (peer.name, row.name)
            assert not row.passed_to_engine or peer.engine
        names = [name for row in peer.rows for name in (row.name, *row.aliases)]
        assert len(names) == len(set(names)), peer.name
        assert set(peer.defaults) <= {option.flag for option in SERVE_OPTIONS}


WORDS = st.sampled_from(["1", "0", "auto", "m", "-1", "a=b", "{}", '{"image": 1}', "[1]", "x,y", "8k", "=", ""])


@settings(max_examples=40)
@given(st.data())
def test_any_command_line_is_translated_without_an_error(data):
    peer = data.draw(st.sampled_from(list(PEERS.values())))
    flags = st.sampled_from([name for row in peer.rows for name in (row.name, *row.aliases)])
    words = data.draw(st.lists(st.one_of(flags, WORDS), max_size=8))
    translation = translate_command(peer, words)
    written = [word for result in translation.results for word in result.original_words]
    assert all(word in words for word in written)
    command = translation.command()
    assert "parley" in command and isinstance(translation.problem(), str)
    translation.engine_command()


def test_examples_are_accepted():
    for peer in PEERS.values():
        translation = translate_command(peer, shlex.split(peer.example))
        assert translation.problem() == ""
        words = translation.command()
        resolve_options(SERVE_OPTIONS, words[words.index("serve") + 1 :], {})
        assert peer.name == "triton" or MODEL not in words


def test_flags_of_other_servers_are_explained_by_serve(capfd):
    assert main(["serve", "--tensor-parallel-size", "2"]) == 2
    assert "It is vLLM and SGLang's: parley's own engine computes a model on one device" in capfd.readouterr().err
    assert main(["serve", "-c", "2"]) == 2
    assert "It is llama.cpp's --ctx-size: here it is --max-model-len" in capfd.readouterr().err
    assert explain_foreign_flag("--prot") == ""


def test_pages_are_generated_from_the_tables():
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "coming_from.py"))
    for peer in read_peers():
        page = script["page_path"](peer).read_text("utf-8")
        assert page == script["renewed_page"](peer), "docs/coming-from is old: make docs"
