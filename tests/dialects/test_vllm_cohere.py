"""vLLM's Cohere embedding route: vector formats, truncation, and refusals."""

import base64
import json
import struct

import pytest

from parley.dialects.dialect import RequestContext
from parley.dialects.vllm.pooling import cohere
from parley.errors import BadRequest, UnknownPromptName, Unsupported
from parley.types import PoolingOptions, PromptVector, Text, Usage

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=100, headers={b"content-type": b"application/json"})
SIGNS = (0.5, -0.5, 0.0, -0.25, 1.0, -1.0, 2.0, -2.0, 0.125)  # nine values become nine bits, so two bytes


def read_embed(**body):
    return cohere.read_cohere_request(json.dumps(body).encode(), CONTEXT)


def answer_body(**body):
    reply = read_embed(**body)
    for place in reversed(range(len(reply.request.prompts))):
        reply.add_events([PromptVector(place, struct.pack("<9f", *SIGNS))])
    return reply.render_body(Usage(prompt_tokens=3))


def test_cohere_writes_embeddings():
    vector = b"[0.5,-0.5,0.0,-0.25,1.0,-1.0,2.0,-2.0,0.125]"
    assert answer_body(model="m", texts=["a", "b"]) == (
        b'{"id":"embd-0f","embeddings":{"float":[' + vector + b"," + vector + b']},"texts":["a","b"],'
        b'"meta":{"api_version":{"version":"2"},"billed_units":{"input_tokens":3,"image_tokens":0}},'
        b'"response_type":"embeddings_by_type"}'
    )


def test_cohere_writes_each_embedding_type():
    forms = json.loads(answer_body(texts=["a"], embedding_types=["base64", "ubinary", "binary", "base64"]))[
        "embeddings"
    ]
    assert list(forms) == ["base64", "ubinary", "binary"]
    assert struct.unpack("<9f", base64.b64decode(forms["base64"][0])) == SIGNS
    assert forms["ubinary"] == [[0b10101010, 0b10000000]] and forms["binary"] == [[42, 0]]


def test_cohere_lists_the_input_types_of_the_model():
    error = UnknownPromptName("unknown", name="clustering", known=["passage", "query"])
    answer = read_embed(texts=["a"], input_type="clustering").render_refusal(error)
    sentence = "Unsupported input_type 'clustering'. Supported values: passage, query"
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (400, sentence)


@pytest.mark.parametrize(
    ("members", "truncate", "keep"),
    [
        ({}, 100, "head"),
        ({"truncate": "START"}, 100, "tail"),
        ({"truncate": "NONE"}, None, "head"),
        ({"max_tokens": 9}, 9, "head"),
        ({"max_tokens": 900, "truncate": "START"}, 100, "tail"),
    ],
)
def test_cohere_truncates_as_asked(members, truncate, keep):
    request = read_embed(texts=["a"], **members).request
    assert (request.prompts, request.max_prompt_tokens, request.kept_side) == ([Text("a")], truncate, keep)


def test_cohere_members_reach_the_request():
    request = read_embed(model="m", texts="a", input_type="search_query", output_dimension=8).request
    assert (request.model, request.pooling) == ("m", PoolingOptions(8, prompt="search_query"))


NO_INPUT = "'msg': 'Value error, Exactly one of texts, images, or inputs must be provided, and it must be non-empty'"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, NO_INPUT),
        ({"texts": []}, NO_INPUT),
        ({"texts": ["a"], "images": []}, NO_INPUT),
        ({"texts": ["a", ""]}, "The decoder prompt cannot be empty"),
        ({"texts": ["a"], "embedding_types": ["int3"]}, "body.embedding_types.0"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "body.truncate"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 5}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
    ],
)
def test_cohere_refuses_wrong_members(body, sentence):
    with pytest.raises(BadRequest) as caught:
        read_embed(**body)
    assert sentence in caught.value.message


@pytest.mark.parametrize("name", ["images", "inputs"])
def test_cohere_refuses_images_and_inputs(name):
    with pytest.raises(Unsupported) as caught:
        read_embed(**{name: ["a"]})
    assert caught.value.field == name
