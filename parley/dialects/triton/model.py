"""The model as clients see it: its input and output tensors, metadata and configuration.

Names are those of the two backends that serve language models under this API, vLLM's and TensorRT-LLM's; where they
clash, vLLM's meaning applies. One backend takes sampling options as request parameters, the other as tensors; here they
may come as either (``loose``), with any numeric type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VERSION = "1"
BACKEND = "vllm"


@dataclass(frozen=True, slots=True)
class Input:
    """An input tensor. ``many``: any number of elements rather than one."""

    name: str
    datatype: str
    many: bool = False
    optional: bool = True
    loose: bool = False

    @property
    def dims(self) -> list[int]:
        """The declared shape."""
        return [-1] if self.many else [1]


@dataclass(frozen=True, slots=True)
class Output:
    """An output tensor. ``asked_by``: the input that enables it; requesting the output by name does so as well."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (-1,)
    asked_by: str = ""


_INPUTS = (
    Input("text_input", "BYTES", optional=False),
    Input("stream", "BOOL"),
    Input("sampling_parameters", "BYTES"),
    Input("exclude_input_in_output", "BOOL"),
    Input("return_finish_reason", "BOOL"),
    Input("return_stop_reason", "BOOL"),
    Input("return_cumulative_logprob", "BOOL"),
    Input("return_logprobs", "BOOL"),
    Input("return_num_input_tokens", "BOOL"),
    Input("return_num_output_tokens", "BOOL"),
    Input("embedding_request", "BYTES"),
    # TensorRT-LLM's inputs
    Input("max_tokens", "INT32", loose=True),
    Input("num_return_sequences", "INT32", loose=True),
    Input("bad_words", "BYTES", many=True),
    Input("stop_words", "BYTES", many=True),
    Input("end_id", "INT32", loose=True),
    Input("pad_id", "INT32", loose=True),
    Input("top_k", "INT32", loose=True),
    Input("top_p", "FP32", loose=True),
    Input("temperature", "FP32", loose=True),
    Input("length_penalty", "FP32", loose=True),
    Input("repetition_penalty", "FP32", loose=True),
    Input("presence_penalty", "FP32", loose=True),
    Input("frequency_penalty", "FP32", loose=True),
    Input("min_tokens", "INT32", loose=True),
    Input("min_length", "INT32", loose=True),
    Input("seed", "UINT64", loose=True),
    Input("random_seed", "UINT64", loose=True),
    Input("beam_width", "INT32", loose=True),
    Input("return_log_probs", "BOOL"),
    # declared only so that a request which uses one is refused by name
    Input("image", "BYTES", many=True),
    Input("image_url", "BYTES", many=True),
    Input("decoder_text_input", "BYTES"),
    Input("return_context_logits", "BOOL"),
    Input("return_generation_logits", "BOOL"),
    Input("return_perf_metrics", "BOOL"),
    Input("prompt_embedding_table", "FP16", many=True),
    Input("prompt_table_extra_id", "UINT64", many=True),
    Input("prompt_vocab_size", "INT32", loose=True),
    Input("embedding_bias_words", "BYTES", many=True),
    Input("embedding_bias_weights", "FP32", many=True),
    Input("lora_task_id", "UINT64", loose=True),
    Input("lora_weights", "FP16", many=True),
    Input("lora_config", "INT32", many=True),
    Input("guided_decoding_guide_type", "BYTES"),
    Input("guided_decoding_guide", "BYTES"),
    Input("num_draft_tokens", "INT32", loose=True),
    Input("use_draft_logits", "BOOL"),
    Input("tensorrt_llm_model_name", "BYTES"),
    Input("tensorrt_llm_draft_model_name", "BYTES"),
)
_OUTPUTS = (
    Output("text_output", "BYTES"),
    Output("finish_reason", "BYTES", asked_by="return_finish_reason"),
    Output("stop_reason", "BYTES", asked_by="return_stop_reason"),
    Output("cumulative_logprob", "FP32", asked_by="return_cumulative_logprob"),
    Output("logprobs", "BYTES", asked_by="return_logprobs"),
    Output("num_input_tokens", "UINT32", dims=(1,), asked_by="return_num_input_tokens"),
    Output("num_output_tokens", "UINT32", asked_by="return_num_output_tokens"),
    Output("cum_log_probs", "FP32", asked_by="return_log_probs"),
    Output("output_log_probs", "FP32", dims=(-1, -1), asked_by="return_log_probs"),
)
INPUTS = {tensor.name: tensor for tensor in _INPUTS}
OUTPUTS = {tensor.name: tensor for tensor in _OUTPUTS}


def metadata(name: str) -> dict[str, Any]:
    """Return the model's metadata."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": BACKEND,
        "inputs": [{"name": t.name, "datatype": t.datatype, "shape": t.dims} for t in _INPUTS],
        "outputs": [{"name": t.name, "datatype": t.datatype, "shape": list(t.dims)} for t in _OUTPUTS],
    }


def config(name: str) -> dict[str, Any]:
    """Return the model's configuration with every default filled in."""
    return {
        "name": name,
        "platform": "",
        "backend": BACKEND,
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {
                "name": t.name,
                "data_type": _kind(t.datatype),
                "format": "FORMAT_NONE",
                "dims": t.dims,
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": t.optional,
                "is_non_linear_format_io": False,
            }
            for t in _INPUTS
        ],
        "output": [
            {
                "name": t.name,
                "data_type": _kind(t.datatype),
                "dims": list(t.dims),
                "label_filename": "",
                "is_shape_tensor": False,
                "is_non_linear_format_io": False,
            }
            for t in _OUTPUTS
        ],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "instance_group": [],
        "default_model_filename": "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": True},
    }


def _kind(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
