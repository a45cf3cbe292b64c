"""The options of ``parley serve`` that concern its engine: which belong to vLLM, or to a server that runs already, and
which of vLLM's own flags parley sets itself.
"""

from __future__ import annotations

from parley.settings.options import ConfigError, ResolvedOptions

# Options of parley's own engine, which vLLM has flags of its own for, or no counterpart.
OWN_ENGINE_OPTIONS = (
    "quantization", "device", "kv-staging", "kv-dtype", "state-cache", "step-ms", "step-tokens", "threads",
    "pack-cache", "lowering", "speculate", "speculate-tokens", "media-cache", "in-process", "scripted-engine",
    "cost-model", "kv-events", "kv-events-replay", "kv-events-topic", "kv-events-form", "kv-events-buffer",
    "kv-events-hwm",
)  # fmt: skip
VLLM_OPTIONS = ("engine-python", "engine-args", "exact")
# Options of an engine that a server that runs already has been started with.
SERVER_OPTIONS = (
    *OWN_ENGINE_OPTIONS, *VLLM_OPTIONS, "dtype", "kv-memory", "prefix-cache", "lora", "lora-root", "max-loras",
    "max-lora-rank", "hf-overrides",
)  # fmt: skip

# vLLM's flags that follow from options of parley.
FLAGS_BY_OPTION = {
    "--model": "MODEL",
    "--revision": "--revision",
    "--tokenizer": "--tokenizer",
    "--tokenizer-revision": "--tokenizer REPO@REV",
    "--hf-overrides": "--hf-overrides",
    "--dtype": "--dtype",
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-batch",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--enable-lora": "--lora or --lora-root",
    "--lora-modules": "--lora",
    "--max-loras": "--max-loras",
    "--max-lora-rank": "--max-lora-rank",
    "--served-model-name": "--name",
    "--host": "--host",
    "--port": "--port",
    "--api-key": "--api-key",
}
# vLLM's flags that have one value here, because requests depend on it.
FIXED_FLAGS = {
    "--scheduling-policy": "requests have priorities",
    "--max-logprobs": "requests have their own limit",
    "--logprobs-mode": "log-probabilities are those of the model",
    "--generation-config": "the API process knows the model's defaults",
    "--seed": "every request has its own seed",
    "--structured-outputs-config": "grammars are written for one backend",
    "--disable-log-stats": "outputs carry the times that statistics need",
}


def is_server_address(engine: str) -> bool:
    """Whether the value of --engine is the address of a server."""
    return "://" in engine


def check_engine_options(config: ResolvedOptions) -> None:
    """Check that all options belong to the engine that serves. Raises ConfigError."""
    engine = config["engine"]
    if not is_server_address(engine) and config.is_set("engine-key-file"):
        raise ConfigError("engine-key-file needs --engine with the address of a server.")
    if is_server_address(engine):
        _refuse_options(config, SERVER_OPTIONS, f"the server at {engine}, which runs already")
    elif engine == "vllm":
        hint = "; with --engine vllm, write vLLM's own flags after --"
        _refuse_options(config, OWN_ENGINE_OPTIONS, "parley's own engine", hint)
        check_flags(config["engine-args"] or [], several_models=len(config["model"] or []) > 1)
    else:
        if foreign := [name for name in VLLM_OPTIONS if config.is_set(name)]:
            raise ConfigError(f"{foreign[0]} needs --engine vllm.")
        return
    if config["role"] == "flex":
        raise ConfigError("--role flex needs parley's own engine: vLLM does not divide its time by a share of prefill.")


def _refuse_options(config: ResolvedOptions, names: tuple[str, ...], owner: str, hint: str = "") -> None:
    """Raise ConfigError if one of these options is set, for all models or for one."""
    if foreign := [name for name in names if config.is_set(name)]:
        raise ConfigError(f"{foreign[0]} belongs to {owner}{hint}.")
    for named_model in config["model"] or []:
        if foreign := [name for name in names if name in named_model.options]:
            raise ConfigError(f"--model {named_model.model}: {foreign[0]} belongs to {owner}.")


def check_flags(words: list[str], *, several_models: bool) -> None:
    """Check vLLM's own flags. Raises ConfigError for those that parley sets."""
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    if "--help" in flags or "-h" in words:
        raise ConfigError(
            "`vllm serve --help` lists the flags that may follow --; parley starts vLLM without printing it."
        )
    for flag in flags:
        if flag in FLAGS_BY_OPTION:
            raise ConfigError(f"{flag}: parley passes this to vLLM itself; use {FLAGS_BY_OPTION[flag]} before --.")
        if flag in FIXED_FLAGS:
            raise ConfigError(f"{flag} cannot be changed: {FIXED_FLAGS[flag]}.")
    if words and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]}: only vLLM's flags may follow --.")
    if several_models and "--gpu-memory-utilization" not in flags and "--kv-cache-memory-bytes" not in flags:
        raise ConfigError(
            "Each model has a vLLM of its own, which takes nearly all memory of a GPU; divide it between them with "
            "--gpu-memory-utilization after --."
        )
