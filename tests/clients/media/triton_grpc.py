"""tritonclient.grpc: images as tensors, in calls and streams. Arguments: HOST:PORT VISION SPEECH."""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from cases import QUESTION, TOKENS, base64_text, check_answer, data_url
from tritonclient.utils import InferenceServerException

address, vision, speech = sys.argv[1:]
PARAMETERS = {"max_tokens": TOKENS, "temperature": 0.0}
FORMS = {"image": base64_text("image"), "image_url": data_url("image")}


def tensor(name, value, datatype):
    infer_input = triton.InferInput(name, [1], datatype)
    infer_input.set_data_from_numpy(np.array([value], dtype=triton.triton_to_np_dtype(datatype)))
    return infer_input


def make_inputs(name, value, *, stream=False):
    texts = {"text_input": QUESTION, name: value}
    flags = {"stream": stream, "exclude_input_in_output": True}
    return [tensor(key, text.encode(), "BYTES") for key, text in texts.items()] + [
        tensor(key, flag, "BOOL") for key, flag in flags.items()
    ]


def stream_text(inputs):
    """Returns the text of a streamed answer."""
    results = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    client.async_stream_infer(vision, inputs, parameters=PARAMETERS, enable_empty_final_response=True)
    pieces, is_last = [], False
    while not is_last:
        result, error = results.get(timeout=60)
        assert error is None, error
        pieces.append(result.as_numpy("text_output")[0].decode())
        is_last = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    return "".join(pieces)


with triton.InferenceServerClient(address) as client:
    for name, value in FORMS.items():
        result = client.infer(vision, make_inputs(name, value), parameters=PARAMETERS)
        check_answer("text", result.as_numpy("text_output")[0].decode())
        check_answer("text", stream_text(make_inputs(name, value, stream=True)))
    try:
        client.infer(vision, make_inputs("image", "AAAA"), parameters=PARAMETERS)
    except InferenceServerException as error:
        assert error.status() == "StatusCode.INVALID_ARGUMENT" and "image" in error.message(), error
    else:
        raise AssertionError("it was not refused")
print("good")
