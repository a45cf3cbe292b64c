"""Images in Triton's requests: the inputs ``image`` and ``image_url``, over HTTP and gRPC."""

import json
import struct
from typing import Any

import pytest

from parley.dialects.request_context import RequestContext
from parley.dialects.triton import error_answers, generate, infer, model
from parley.dialects.triton.rpc import infer as rpc
from parley.errors import BadRequest
from parley.types import EncodedMedia, Media, MediaAddress, PlacedMedia, Request, TextPrompt

PATHS = {"model": "m"}
CONTEXT = RequestContext("0f", 1, "fp", path_parts=PATHS, media_limits={"image": 3})
BLIND = RequestContext("0f", 1, "fp", path_parts=PATHS, media_limits={"audio": 3})
IMAGES = [
    PlacedMedia(0, Media("image", EncodedMedia("aGk="), "image[0]")),
    PlacedMedia(0, Media("image", EncodedMedia("aGo="), "image[1]")),
    PlacedMedia(0, Media("image", MediaAddress("http://a.b/c"), "image_url[0]")),
]
PROMPT = TextPrompt("What?", media=IMAGES)


def read_generate(context: RequestContext = CONTEXT, **members: Any) -> Request:
    body = json.dumps({"text_input": "What?"} | members).encode()
    reply = generate.read_triton_generate(body, context, stream=False, strict=True)
    assert isinstance(reply, generate.TritonReply)
    return reply.request


def refusal(context: RequestContext = CONTEXT, **members: Any) -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        read_generate(context, **members)
    answer = error_answers.triton_error_answer(caught.value)
    return answer.status, json.loads(answer.body)["error"]


def pack_texts(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def test_triton_generate_reads_images_in_their_order():
    request = read_generate(image_url="http://a.b/c", image=["aGk=", "", "aGo="])
    assert request.prompts == [PROMPT]
    assert read_generate(image="aGk=").prompts == [TextPrompt("What?", media=IMAGES[:1])]
    assert read_generate(image=[]).prompts == [TextPrompt("What?")]


def test_triton_infer_reads_images_as_json_and_as_bytes():
    tail = pack_texts(b"http://a.b/c")
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["What?"]},
        {"name": "image", "datatype": "BYTES", "shape": [2], "data": ["aGk=", "aGo="]},
        {"name": "image_url", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(tail)}},
    ]
    document = json.dumps({"inputs": inputs}).encode()
    headers = {infer.JSON_LENGTH_HEADER: b"%d" % len(document)}
    context = RequestContext("0f", 1, "fp", path_parts=PATHS, headers=headers, media_limits={"image": 3})
    assert infer.read_triton_infer(document + tail, context).request.prompts == [PROMPT]


@pytest.mark.parametrize("raw", [False, True])
def test_triton_grpc_reads_images(raw):
    tensors = {"text_input": [b"What?"], "image": [b"aGk=", b"aGo="], "image_url": [b"http://a.b/c"]}
    message = rpc.INFER_REQUEST(model_name="m")
    for name, texts in tensors.items():
        contents = {} if raw else {"contents": {"bytes_contents": texts}}
        message.inputs.add(name=name, datatype="BYTES", shape=[len(texts)], **contents)
        message.raw_input_contents.extend([pack_texts(*texts)] if raw else [])
    assert rpc.read_grpc_infer(message, CONTEXT, whole=True).request.prompts == [PROMPT]


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"image": ["a"] * 4}, "Invalid 'image[3]': a request may have at most 3 image items."),
        ({"image_url": "ftp://a"}, "Invalid 'image_url[0]': the URL must begin with http:, https: or data:."),
        ({"image_url": "file:///a.png"}, "Invalid 'image_url[0]': the URL must begin with http:, https: or data:."),
        ({"image": "a", "embedding_request": '{"input": "x"}'},
         "'image[0]': Embeddings of images are not available on this server."),
    ],
)  # fmt: skip
def test_triton_refuses_images_that_it_cannot_use(members, sentence):
    assert refusal(**members) == (400, sentence)


def test_triton_refuses_images_to_a_text_model():
    assert refusal(BLIND, image="a") == (400, "'image': The model does not read images.")


def test_triton_lists_the_inputs_for_images():
    described = {tensor["name"]: tensor for tensor in model.describe_bridge_model("m")["inputs"]}
    for name in ("image", "image_url"):
        assert described[name] == {"name": name, "datatype": "BYTES", "shape": [-1]}
