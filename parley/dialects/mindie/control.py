"""Tokenization and server information of MindIE's service port: ``/v1/tokenizer``, and metadata in Triton's format."""

from __future__ import annotations

from typing import Any

from parley.dialects.dialect import Answer, Head
from parley.dialects.facts import Facts
from parley.dialects.fields import decode
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import Words, encode, size
from parley.dialects.mindie.upkeep import known
from parley.dialects.wishes import Tokenize, Tokenized
from parley.types import Text

SERVER = "MindIE Server"
DATATYPE = "UINT32"
UNREAD = Words("Req body converts to json fail.")


def tokenize(rules: Rules, body: bytes) -> Tokenize:
    """Read a tokenize request. Raises BadRequest."""
    fields = decode(body, UNREAD)
    text, most = fields.raw("inputs"), rules.limit << 20
    if not isinstance(text, str):
        raise fields.fail("inputs", "Inputs in request body is invalid.")
    if not 0 < size(text) <= most:
        told = f"Inputs data length in [0, {most}], but the length of inputs is {size(text)}"
        raise fields.fail("inputs", told)
    return Tokenize("", Text(text), texts=fields.raw("do_decode") is not False)


def tokenized(made: Tokenized) -> bytes:
    """Return the tokens of a text as JSON."""
    return encode({"token_number": len(made.ids), "tokens": made.strings or []})


def server(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the server's metadata."""
    extensions = {
        "max_iter_times": rules.max_iter_times or head.context,
        "prefill_policy_type": rules.prefill_policy,
        "decode_policy_type": rules.decode_policy,
        "max_prefill_batch_size": rules.max_prefill_batch_size,
        "max_prefill_tokens": rules.max_prefill_tokens,
    }
    return _told({"name": SERVER, "version": facts.version, "extensions": extensions})


def metadata(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the metadata of the path's model. Raises UnknownModel."""

    def tensor(name: str) -> dict[str, Any]:
        return {"name": name, "shape": [-1], "datatype": DATATYPE}

    name = known(head, facts)
    return _told({"name": name, "platform": SERVER, "inputs": [tensor("input0")], "outputs": [tensor("output0")]})


def config(rules: Rules, body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the configuration of the path's model. Raises UnknownModel."""
    return _told(
        {
            "model_name": known(head, facts),
            "input_datatype": DATATYPE,
            "output_datatype": DATATYPE,
            "max_seq_len": rules.max_seq_len or head.context,
            "npu_mem_size": rules.npu_mem_size,
            "cpu_mem_size": rules.cpu_mem_size,
            "world_size": rules.world_size,
            "model_weight_path": rules.weights,
            "model_instance_type": rules.instance,
        }
    )


def _told(value: dict[str, Any]) -> Answer:
    return Answer(200, encode(value))
