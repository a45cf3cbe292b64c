"""The options of serve with vLLM as the engine."""

from __future__ import annotations

import pytest

from parley.cli.serve import offered_models
from parley.serving.server_options import OfferedModel
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import ConfigError, resolve_options
from parley.types import AttachedSettings, VLLMSettings

VLLM = ("--engine", "vllm")


def offers(*flags: str) -> list[OfferedModel]:
    return offered_models(resolve_options(SERVE_OPTIONS, flags, {}))


def test_options_reach_vllm():
    flags = "m --engine-python /v/python --max-batch 3 --max-model-len 99 --kv-memory 1MiB --no-prefix-cache"
    flags += " --lora a=./a --max-lora-rank 64 --exact --engine-timeout 9 --dtype auto"
    (offer,) = offers(*VLLM, *flags.split(), "--", "--tensor-parallel-size", "4", "--port-of-vllm=5")
    assert offer.engine == "vllm" and offer.names == ("m",)
    assert offer.settings == VLLMSettings(
        model="m", dtype="auto", max_model_len=99, max_batch=3, prefix_cache=False, kv_memory=1 << 20,
        adapters={"a": "./a"}, max_rank=64, loads_adapters=True, engine_timeout=9, python="/v/python",
        arguments=["--tensor-parallel-size", "4", "--port-of-vllm=5"], exact=True,
    )  # fmt: skip
    (plain,) = offers(*VLLM)
    assert not plain.settings.loads_adapters and plain.settings.max_rank == 0 and plain.settings.arguments == []


def test_flags_of_vllm_may_come_from_a_variable_or_a_file(tmp_path):
    file = tmp_path / "parley.toml"
    file.write_text('engine = "vllm"\nengine-args = ["--quantization", "a b"]\n')
    (offer,) = offers("--config", str(file))
    assert offer.settings.arguments == ["--quantization", "a b"]
    variables = {"PARLEY_ENGINE": "vllm", "PARLEY_ENGINE_ARGS": "--quantization 'a b'"}
    (offer,) = offered_models(resolve_options(SERVE_OPTIONS, [], variables))
    assert offer.settings.arguments == ["--quantization", "a b"]
    with pytest.raises(ConfigError, match="engine-args"):
        offers(*VLLM, "--engine-args", "'open")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--quantization int8", "quantization belongs to parley's own engine"),
        ("--model a=./m,threads=1", "threads belongs to parley's own engine"),
        ("--role flex", "--role flex needs parley's own engine"),
        ("-- --max-num-seqs 3", "use --max-batch before --"),
        ("-- --max_model_len=3", "use --max-model-len before --"),
        ("-- --scheduling-policy fcfs", "--scheduling-policy cannot be changed: requests have priorities"),
        ("-- --help", "`vllm serve --help` lists the flags that may follow --"),
        ("-- other", "other: only vLLM's flags may follow --"),
        ("--model a=./a --model b=./b", "--gpu-memory-utilization"),
    ],
)
def test_refuses_what_vllm_cannot_take(flags, message):
    with pytest.raises(ConfigError, match=message):
        offers(*VLLM, *flags.split())


@pytest.mark.parametrize("flags", ["--engine-python p", "--exact", "-- --tensor-parallel-size 4"])
def test_refuses_options_of_vllm_with_the_own_engine(flags):
    with pytest.raises(ConfigError, match="needs --engine vllm"):
        offers(*flags.split())


def test_several_models_may_divide_a_gpu():
    flags = "--model a=./a --model b=./b -- --gpu-memory-utilization 0.4"
    assert [offer.engine for offer in offers(*VLLM, *flags.split())] == ["vllm", "vllm"]


SERVER = "http://engine:8000"


def test_a_server_that_runs_already_is_an_engine(tmp_path):
    (tmp_path / "key").write_text("# of the cluster\nsesame\n")
    flags = f"m --max-batch 3 --max-model-len 99 --engine-timeout 9 --engine-key-file {tmp_path / 'key'}"
    (offer,) = offers("--engine", SERVER + "/vllm/", *flags.split())
    assert offer.engine == "attached" and offer.settings == AttachedSettings(
        model="m", max_batch=3, max_model_len=99, engine_timeout=9, url=SERVER + "/vllm", key="sesame"
    )
    assert offer.settings.weight_folders == ()


@pytest.mark.parametrize(
    ("engine", "flags", "message"),
    [
        (SERVER, "--kv-memory 1GiB", "kv-memory belongs to the server at http://engine:8000, which runs already"),
        (SERVER, "--model a=./m,threads=1", "threads belongs to the server"),
        (SERVER, "--exact", "exact belongs to the server"),
        (SERVER, "--lora a=./a", "lora belongs to the server"),
        (SERVER, "--role flex", "--role flex needs parley's own engine"),
        (SERVER, "--engine-key-file /does/not/exist", "--engine-key-file: /does/not/exist cannot be read"),
        ("vllm", "--engine-key-file f", "engine-key-file needs --engine with the address of a server"),
        ("parley", "--engine-key-file f", "engine-key-file needs --engine with the address of a server"),
    ],
)
def test_refuses_what_a_server_that_runs_already_cannot_take(engine, flags, message):
    with pytest.raises(ConfigError, match=message):
        offers("--engine", engine, *flags.split())


@pytest.mark.parametrize("engine", ["vlm", "engine:8000", "http://", "http://u:p@engine", "http://engine:x", "ftp://a"])
def test_refuses_what_is_no_address_of_a_server(engine):
    with pytest.raises(ConfigError, match="parley, vllm, http://HOST:PORT"):
        offers("--engine", engine)
