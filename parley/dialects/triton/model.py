"""The model as clients see it: its input and output tensors, metadata and configuration.

Names are those of the two backends that serve language models under this API, vLLM's and TensorRT-LLM's; where they
clash, vLLM's meaning applies. One backend takes sampling options as request parameters, the other as tensors; here they
may come as either (``loose``), with any numeric type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODEL_VERSION = "1"
BACKEND = "vllm"


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input tensor. ``is_list``: any number of elements rather than one. ``any_number_type``: any type of numbers is
    accepted."""

    name: str
    datatype: str
    is_list: bool = False
    optional: bool = True
    any_number_type: bool = False

    @property
    def declared_shape(self) -> list[int]:
        """The declared shape."""
        return [-1] if self.is_list else [1]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output tensor. ``asked_by``: the input that enables it; requesting the output by name does so as well."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (-1,)
    asked_by: str = ""


_INPUTS = (
    InputTensor("text_input", "BYTES", optional=False),
    InputTensor("stream", "BOOL"),
    InputTensor("sampling_parameters", "BYTES"),
    InputTensor("exclude_input_in_output", "BOOL"),
    InputTensor("return_finish_reason", "BOOL"),
    InputTensor("return_stop_reason", "BOOL"),
    InputTensor("return_cumulative_logprob", "BOOL"),
    InputTensor("return_logprobs", "BOOL"),
    InputTensor("return_num_input_tokens", "BOOL"),
    InputTensor("return_num_output_tokens", "BOOL"),
    InputTensor("embedding_request", "BYTES"),
    # TensorRT-LLM's inputs
    InputTensor("max_tokens", "INT32", any_number_type=True),
    InputTensor("num_return_sequences", "INT32", any_number_type=True),
    InputTensor("bad_words", "BYTES", is_list=True),
    InputTensor("stop_words", "BYTES", is_list=True),
    InputTensor("end_id", "INT32", any_number_type=True),
    InputTensor("pad_id", "INT32", any_number_type=True),
    InputTensor("top_k", "INT32", any_number_type=True),
    InputTensor("top_p", "FP32", any_number_type=True),
    InputTensor("temperature", "FP32", any_number_type=True),
    InputTensor("length_penalty", "FP32", any_number_type=True),
    InputTensor("repetition_penalty", "FP32", any_number_type=True),
    InputTensor("presence_penalty", "FP32", any_number_type=True),
    InputTensor("frequency_penalty", "FP32", any_number_type=True),
    InputTensor("min_tokens", "INT32", any_number_type=True),
    InputTensor("min_length", "INT32", any_number_type=True),
    InputTensor("seed", "UINT64", any_number_type=True),
    InputTensor("random_seed", "UINT64", any_number_type=True),
    InputTensor("beam_width", "INT32", any_number_type=True),
    InputTensor("return_log_probs", "BOOL"),
    # for models that read images; others refuse them by name
    InputTensor("image", "BYTES", is_list=True),
    InputTensor("image_url", "BYTES", is_list=True),
    # declared only so that a request which uses one is refused by name
    InputTensor("decoder_text_input", "BYTES"),
    InputTensor("return_context_logits", "BOOL"),
    InputTensor("return_generation_logits", "BOOL"),
    InputTensor("return_perf_metrics", "BOOL"),
    InputTensor("prompt_embedding_table", "FP16", is_list=True),
    InputTensor("prompt_table_extra_id", "UINT64", is_list=True),
    InputTensor("prompt_vocab_size", "INT32", any_number_type=True),
    InputTensor("embedding_bias_words", "BYTES", is_list=True),
    InputTensor("embedding_bias_weights", "FP32", is_list=True),
    InputTensor("lora_task_id", "UINT64", any_number_type=True),
    InputTensor("lora_weights", "FP16", is_list=True),
    InputTensor("lora_config", "INT32", is_list=True),
    InputTensor("guided_decoding_guide_type", "BYTES"),
    InputTensor("guided_decoding_guide", "BYTES"),
    InputTensor("num_draft_tokens", "INT32", any_number_type=True),
    InputTensor("use_draft_logits", "BOOL"),
    InputTensor("tensorrt_llm_model_name", "BYTES"),
    InputTensor("tensorrt_llm_draft_model_name", "BYTES"),
)
_OUTPUTS = (
    OutputTensor("text_output", "BYTES"),
    OutputTensor("finish_reason", "BYTES", asked_by="return_finish_reason"),
    OutputTensor("stop_reason", "BYTES", asked_by="return_stop_reason"),
    OutputTensor("cumulative_logprob", "FP32", asked_by="return_cumulative_logprob"),
    OutputTensor("logprobs", "BYTES", asked_by="return_logprobs"),
    OutputTensor("num_input_tokens", "UINT32", dims=(1,), asked_by="return_num_input_tokens"),
    OutputTensor("num_output_tokens", "UINT32", asked_by="return_num_output_tokens"),
    OutputTensor("cum_log_probs", "FP32", asked_by="return_log_probs"),
    OutputTensor("output_log_probs", "FP32", dims=(-1, -1), asked_by="return_log_probs"),
)
INPUTS = {tensor.name: tensor for tensor in _INPUTS}
OUTPUTS = {tensor.name: tensor for tensor in _OUTPUTS}


def describe_bridge_model(name: str) -> dict[str, Any]:
    """Return the model's metadata."""
    return {
        "name": name,
        "versions": [MODEL_VERSION],
        "platform": BACKEND,
        "inputs": [
            {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.declared_shape} for tensor in _INPUTS
        ],
        "outputs": [
            {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.dims)} for tensor in _OUTPUTS
        ],
    }


def model_configuration(name: str) -> dict[str, Any]:
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
                "name": tensor.name,
                "data_type": _config_type(tensor.datatype),
                "format": "FORMAT_NONE",
                "dims": tensor.declared_shape,
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": tensor.optional,
                "is_non_linear_format_io": False,
            }
            for tensor in _INPUTS
        ],
        "output": [
            {
                "name": tensor.name,
                "data_type": _config_type(tensor.datatype),
                "dims": list(tensor.dims),
                "label_filename": "",
                "is_shape_tensor": False,
                "is_non_linear_format_io": False,
            }
            for tensor in _OUTPUTS
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


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
