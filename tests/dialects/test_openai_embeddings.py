"""Embeddings: meaning of bodies, and the exact bytes of answers."""

import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from parley.dialects import vectors
from parley.dialects.openai import embeddings
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm.pooling import classify
from parley.dialects.vllm.pooling import embeddings as pooling
from parley.errors import BadRequest, Unsupported
from parley.types import (
    ChatPrompt,
    ChoiceDone,
    PoolingOptions,
    PromptAccepted,
    PromptVector,
    TextPrompt,
    TokensPrompt,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=512)
USAGE = Usage(prompt_tokens=3)
FIRST, SECOND = struct.pack("<2f", 0.5, -0.25), struct.pack("<2f", 0.1, 1.0)


def read(input_value: Any = "Hi", **members: Any) -> embeddings.EmbeddingReply:
    return embeddings.read_embedding_request(
        json.dumps({"model": "m", "input": input_value} | members).encode(), CONTEXT
    )


def answer_body(reply: embeddings.EmbeddingReply) -> bytes:
    """Return the body after the second input has finished before the first."""
    usage = Usage(prompt_tokens=1)
    reply.add_events(
        [PromptAccepted(0, [1]), PromptAccepted(1, [2, 3]), PromptVector(1, SECOND), ChoiceDone(1, "stop", usage)]
    )
    reply.add_events([PromptVector(0, FIRST), ChoiceDone(0, "stop", usage)])
    return reply.render_body(USAGE)


@pytest.mark.parametrize(
    ("input_value", "neutral"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokensPrompt([1, 2])]),
        ([[1, 2], [3]], [TokensPrompt([1, 2]), TokensPrompt([3])]),
        (["a"] * 2048, [TextPrompt("a")] * 2048),
    ],
)
def test_openai_embeddings_reads_four_input_forms(input_value, neutral):
    assert read(input_value).request.prompts == neutral


@pytest.mark.parametrize(
    ("input_value", "field"),
    [
        (None, "input"),
        ("", "input"),
        ([], "input"),
        (5, "input"),
        ([[]], "input[0]"),
        (["a", ""], "input[1]"),
        (["a", 1], "input[1]"),
        ([1, -1], "input[1]"),
        ([True], "input[0]"),
        ([[1], "a"], "input[1]"),
        (["a"] * 2049, "input"),
    ],
)
def test_openai_embeddings_error_names_wrong_input(input_value, field):
    with pytest.raises(BadRequest) as caught:
        read(input_value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("members", "field", "sentence"),
    [
        ({"encoding_format": "md5"}, "encoding_format", "'float', 'base64'"),
        ({"encoding_format": 5}, "encoding_format", "string"),
        ({"dimensions": 0}, "dimensions", "at least 1"),
        ({"dimensions": "8"}, "dimensions", "integer"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
        ({"embed_dtype": "int8"}, "embed_dtype", "float16"),
        ({"endianness": "middle"}, "endianness", "big"),
        ({"normalize": 1}, "normalize", "boolean"),
        ({"input": None, "messages": []}, "messages", "empty"),
    ],
)
def test_openai_embeddings_error_names_wrong_member(members, field, sentence):
    with pytest.raises(BadRequest) as caught:
        read(**members)
    assert caught.value.field == field and sentence in caught.value.message


def test_openai_embeddings_refuses_mm_processor_kwargs():
    with pytest.raises(Unsupported):
        read(mm_processor_kwargs={"a": 1})


def test_openai_embeddings_members_reach_the_request():
    request = read(dimensions=4, truncate_prompt_tokens=9, normalize=False, cache_salt="s", user="u").request
    assert (
        request.pooling == PoolingOptions(4, False)
        and request.max_prompt_tokens == 9
        and request.cache_salt == "s"
        and not request.stream
    )
    assert read(truncate_prompt_tokens=-1).request.max_prompt_tokens == 512
    assert (request.kept_side, read(truncation_side="left").request.kept_side) == ("head", "tail")
    assert read(padding="do_not_pad").request == read().request and read(priority=3).request.priority == 3
    assert read(prompt_name="query").request.pooling == PoolingOptions(prompt="query")
    assert read(use_activation=True).request.pooling == PoolingOptions(normalize=True)
    assert read(add_special_tokens=False).request.prompts == [TextPrompt("Hi", add_special_tokens=False)]
    (chat,) = read(None, messages=[{"role": "user", "content": "a"}]).request.prompts
    assert isinstance(chat, ChatPrompt) and not chat.add_generation_prompt


def test_embeddings_of_images_are_refused_if_the_model_reads_text_only():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(
        BadRequest, match=r"'messages\[0\].content\[0\].type' is 'image_url', but this model reads text only"
    ):
        read(None, messages=[{"role": "user", "content": [part]}])


def test_classification_of_images_is_refused_even_if_the_model_reads_them():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    context = replace(CONTEXT, headers={b"content-type": b"application/json"})
    with pytest.raises(
        BadRequest, match=r"'messages\[0\].content\[0\].type' is 'image_url', but this route reads text "
    ):
        classify.read_classification(body, context)


def test_embeddings_refuse_padding_to_the_context_length():
    with pytest.raises(Unsupported, match="Padding to the context length is"):
        read(padding="max_length")
    for wrong in (True, "longest"):
        with pytest.raises(BadRequest) as caught:
            read(padding=wrong)
        assert caught.value.field == "padding"


def test_openai_embeddings_writes_floats_in_input_order():
    assert answer_body(read(["a", "b"])) == (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.5,-0.25]},'
        b'{"object":"embedding","index":1,"embedding":[0.10000000149011612,1.0]}],"model":"m",'
        b'"usage":{"prompt_tokens":3,"total_tokens":3}}'
    )


def test_openai_embeddings_writes_base64():
    assert b'"index":0,"embedding":"AAAAPwAAgL4="}' in answer_body(read(["a", "b"], encoding_format="base64"))


def test_openai_embeddings_describes_bytes_in_header():
    reply = read(["a", "b"], encoding_format="bytes", endianness="big", model="Zwölf")
    assert answer_body(reply) == struct.pack(">4f", 0.5, -0.25, *struct.unpack("<2f", SECOND))
    ((name, value),) = reply.answer_headers(None)
    metadata = json.loads(value)
    assert reply.content_type == b"application/octet-stream" and name == b"metadata" and metadata["model"] == "Zwölf"
    assert metadata["id"] == "embd-0f" and metadata["usage"]["prompt_tokens"] == 3
    assert metadata["data"][1] == {
        "index": 1,
        "embed_dtype": "float32",
        "endianness": "big",
        "start": 8,
        "end": 16,
        "shape": [2],
    }
    reply = read(["a", "b"], encoding_format="bytes_only", embed_dtype="float16")
    assert answer_body(reply) == struct.pack("<4e", 0.5, -0.25, 0.1, 1.0) and not reply.answer_headers(None)


def test_vllm_pooling_returns_one_vector_per_input():
    context = RequestContext("0f", 1700000000, "fp_1", headers={b"content-type": b"application/json"})
    reply = pooling.read_pooling_request(b'{"input":"a","task":"embed"}', context)
    reply.add_events([PromptVector(0, FIRST)])
    assert reply.render_body(USAGE).startswith(
        b'{"id":"pooling-0f","object":"list","created":1700000000,"model":"",'
        b'"data":[{"index":0,"object":"pooling","data":[0.5,-0.25]}],"usage":{"prompt_tokens":3,'
    )
    for body in (b'{"input":"a","task":"classify"}', b'{"data":{},"task":"embed"}'):
        with pytest.raises(Unsupported):
            pooling.read_pooling_request(body, context)
    with pytest.raises(Unsupported, match=r"^No IOProcessor plugin installed\.$"):
        pooling.read_pooling_request(b'{"data":{},"task":"plugin"}', context)


@pytest.mark.parametrize(("dtype", "name"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_fp8_vectors_round_to_nearest(dtype, name):
    torch = pytest.importorskip("torch")
    exact_values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float()
    exact_values = exact_values[exact_values.isfinite()].sort().values
    floats = torch.cat(
        [exact_values, (exact_values[1:] + exact_values[:-1]) / 2, torch.randn(1000) / 9, torch.tensor([1e9, -1e9])]
    )
    converted = vectors.encode_vector(floats.numpy().tobytes(), dtype)
    assert converted == floats.to(getattr(torch, name)).view(torch.uint8).numpy().tobytes()


def test_bfloat16_vectors_round_to_nearest():
    torch = pytest.importorskip("torch")
    floats = torch.randn(1000)
    converted = vectors.encode_vector(floats.numpy().tobytes(), "bfloat16")
    assert converted == floats.bfloat16().view(torch.int16).numpy().tobytes()
    assert vectors.encode_vector(struct.pack("<2f", 1e9, -1e9), "float16") == struct.pack(
        "<2e", float("inf"), -float("inf")
    )


def test_openai_embeddings_read_several_conversations():
    """In ``messages`` as well as in ``input``, where a list of conversations is neither texts nor token ids."""
    turns = [[{"role": "user", "content": text}] for text in "ab"]
    for members in ({"input_value": None, "messages": turns}, {"input_value": turns}):
        request = read(**members).request
        assert [prompt.messages[0].content for prompt in request.prompts] == ["a", "b"]
        assert not any(prompt.add_generation_prompt for prompt in request.prompts)
    (prompt,) = read(turns[0]).request.prompts
    assert isinstance(prompt, ChatPrompt) and prompt.messages[0].content == "a"
    for members, path in (
        ({"messages": [turns[0], []]}, r"messages\[1\]"),
        ({"messages": [turns[0], "a"]}, r"messages\[1\]"),
        ({"messages": [turns[0], [{"content": "a"}]]}, "role"),
        ({"input_value": [[1], turns[0]]}, "input"),
    ):
        with pytest.raises(BadRequest, match=path):
            read(**{"input_value": None} | members)
