"""Options of ``parley serve`` about the model: where it comes from, and how it is read."""

from __future__ import annotations

from parley.settings.option_kinds import (
    adapter_kind,
    choice_kind,
    family_kind,
    integer_kind,
    json_object_kind,
    named_model_kind,
    pattern_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import Option

# The names of number types, those of vLLM included.
DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp16": "float16",
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
}

# Engine options that each of several models may set for itself.
PER_MODEL_OPTIONS = (
    "revision", "tokenizer", "chat-template", "hf-overrides", "mmproj", "dtype", "quantization", "device",
    "max-model-len", "kv-memory", "kv-staging", "kv-dtype", "state-cache", "max-batch", "step-ms", "step-tokens",
    "threads", "prefix-cache", "pack-cache", "lowering", "speculate", "speculate-tokens", "lora", "max-loras",
    "max-lora-rank", "media-cache", "tool-parser", "reasoning-parser", "trust-marks", "kv-events", "kv-events-replay",
    "kv-events-topic",
)  # fmt: skip

MODEL_OPTIONS: list[Option] = [
    Option(
        "model",
        named_model_kind("MODEL", PER_MODEL_OPTIONS),
        "Folder in Hugging Face format, a GGUF file, or a name on the Hugging Face hub (`owner/name`, and for GGUF "
        "`owner/name:QUANT` or `owner/name/FILE.gguf`) or its address (`hf.co/owner/name`). `--model NAME=MODEL` "
        "serves several: each with names (`chat,assistant=./m`) and, after commas, options of its own "
        "(`chat=./m,threads=1`).",
        section="model",
        unset_text="the built-in parley-demo",
        repeatable=True,
        separator=";",
        configurable=True,
        positional=True,
    ),
    Option(
        "name",
        text_kind("NAME"),
        "Name of the first model in the API.",
        section="model",
        unset_text="from MODEL",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "revision",
        text_kind("REV"),
        "Branch, tag or commit of MODEL on the hub, as in `owner/name@REV`.",
        section="model",
        unset_text="main",
        configurable=True,
    ),
    Option(
        "tokenizer",
        text_kind("FOLDER|REPO"),
        "Folder or name on the hub (`owner/name` or `owner/name@REV`) whose tokenizer and chat template to use.",
        section="model",
        unset_text="from MODEL",
        configurable=True,
    ),
    Option(
        "chat-template",
        text_kind("FILE|TEXT"),
        "Jinja file with the chat template, or the template itself, which has a brace or a line break.",
        section="model",
        unset_text="from the tokenizer",
        configurable=True,
    ),
    Option(
        "hf-overrides",
        json_object_kind(),
        "Members of config.json that replace those of MODEL; objects within it are merged.",
        section="model",
        unset_text="none",
        configurable=True,
    ),
    Option(
        "mmproj",
        text_kind("FILE"),
        "llama.cpp's file with the image or audio encoder of MODEL, a GGUF file; `none`: text only.",
        section="model",
        unset_text="the only mmproj file beside MODEL",
        configurable=True,
    ),
    Option(
        "dtype",
        choice_kind(*DTYPE_NAMES),
        "Number type to compute with; auto uses fp32 if the model was saved in it. On the CPU, fp16 is computed in "
        "bf16, which rounds weights saved in fp16 from 11 to 8 bits; fp32 does not.",
        "bf16",
        section="model",
        configurable=True,
    ),
    Option(
        "quantization",
        choice_kind("none", "int8", "int4"),
        "Quantize plain weights while loading; none keeps them as they are, int4 uses int8 for the head. Of a "
        "quantized checkpoint, only a plain head becomes int8.",
        "none",
        section="model",
        configurable=True,
    ),
    Option(
        "device",
        pattern_kind(r"auto|cpu|cuda(:\d{1,3})?", "DEVICE", "auto, cpu, cuda or cuda:N"),
        "cpu, cuda, cuda:N, or auto: cuda if torch can use a GPU of compute capability 8.0 or newer, else cpu.",
        "cpu",
        section="model",
        configurable=True,
    ),
    Option(
        "max-model-len",
        integer_kind(1),
        "Maximum length of prompt plus output, in tokens.",
        section="model",
        unset_text="from the model",
        configurable=True,
    ),
    Option(
        "tool-parser",
        family_kind("calls"),
        "Model family whose tool calls are parsed and written; auto: by the chat template, none: calls stay text.",
        "auto",
        section="model",
        configurable=True,
    ),
    Option(
        "reasoning-parser",
        family_kind("thoughts"),
        "Model family whose marks separate reasoning from the answer; auto: by the chat template, none: it stays text.",
        "auto",
        section="model",
        configurable=True,
    ),
    Option(
        "trust-marks",
        switch_kind(),
        "Special tokens that clients write in conversations stay special tokens, so the writer of a message or of a "
        "tool's result can end that turn and begin one of the system. Otherwise they are text.",
        False,
        section="model",
        configurable=True,
    ),
    Option(
        "lora",
        adapter_kind(),
        "LoRA adapter of the first model, in PEFT's format, with its name in the API.",
        section="model",
        repeatable=True,
        configurable=True,
    ),
]
