"""Tokenization and server information of MindIE's service port: ``/v1/tokenizer``, and metadata in Triton's format."""

from __future__ import annotations

from typing import Any

from parley.dialects.admin_requests import TokenizeRequest, TokenizeResult
from parley.dialects.facts import ServerFacts
from parley.dialects.fields import decode_fields
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.management_ports import model_of_path
from parley.dialects.mindie.members.text_length import utf16_length
from parley.dialects.mindie.refusal_wording import MindieErrorWording
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.types import TextPrompt

SERVER_NAME = "MindIE Server"
DATATYPE = "UINT32"
TOKENIZER_WORDING = MindieErrorWording("Req body converts to json fail.")


def read_mindie_tokenize(rules: MindieRules, body: bytes, context: RequestContext | None = None) -> TokenizeRequest:
    """Read a text to tokenize. Raises BadRequest."""
    fields = decode_fields(body, TOKENIZER_WORDING)
    text, max_length = fields.raw_value("inputs"), rules.body_megabytes << 20
    if not isinstance(text, str):
        raise fields.member_error("inputs", "Inputs in request body is invalid.")
    if not 0 < utf16_length(text) <= max_length:
        message = f"Inputs data length in [0, {max_length}], but the length of inputs is {utf16_length(text)}"
        raise fields.member_error("inputs", message)
    return TokenizeRequest("", TextPrompt(text), with_texts=fields.raw_value("do_decode") is not False)


def write_mindie_tokens(result: TokenizeResult) -> bytes:
    """Return the tokens of a text as JSON."""
    return encode_json({"token_number": len(result.token_ids), "tokens": result.pieces or []})


def mindie_server_metadata(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the server's metadata."""
    extensions = {
        "max_iter_times": rules.max_iter_times or context.context_length,
        "prefill_policy_type": rules.prefill_policy,
        "decode_policy_type": rules.decode_policy,
        "max_prefill_batch_size": rules.max_prefill_batch_size,
        "max_prefill_tokens": rules.max_prefill_tokens,
    }
    return json_answer({"name": SERVER_NAME, "version": facts.version, "extensions": extensions})


def mindie_model_metadata(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the metadata of the path's model. Raises UnknownModel."""

    def describe_tensor(name: str) -> dict[str, Any]:
        return {"name": name, "shape": [-1], "datatype": DATATYPE}

    name = model_of_path(context, facts)
    return json_answer(
        {
            "name": name,
            "platform": SERVER_NAME,
            "inputs": [describe_tensor("input0")],
            "outputs": [describe_tensor("output0")],
        }
    )


def mindie_model_config(rules: MindieRules, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the configuration of the path's model. Raises UnknownModel."""
    return json_answer(
        {
            "model_name": model_of_path(context, facts),
            "input_datatype": DATATYPE,
            "output_datatype": DATATYPE,
            "max_seq_len": rules.max_seq_len or context.context_length,
            "npu_mem_size": rules.npu_mem_size,
            "cpu_mem_size": rules.cpu_mem_size,
            "world_size": rules.world_size,
            "model_weight_path": rules.model_folder_name,
            "model_instance_type": rules.instance_type,
        }
    )
