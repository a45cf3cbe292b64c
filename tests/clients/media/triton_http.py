"""tritonclient.http: images as tensors, in JSON and binary. Arguments: HOST:PORT VISION SPEECH."""

import sys

import numpy as np
import tritonclient.http as triton
from cases import QUESTION, TOKENS, base64_text, check_answer, data_url
from tritonclient.utils import InferenceServerException

address, vision, speech = sys.argv[1:]
PARAMETERS = {"max_tokens": TOKENS, "temperature": 0.0}


def text_tensor(name, *values, binary):
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object), binary_data=binary)
    return tensor


def make_inputs(name, value, *, binary=True):
    bare = triton.InferInput("exclude_input_in_output", [1], "BOOL")
    bare.set_data_from_numpy(np.array([True]), binary_data=binary)
    return [text_tensor("text_input", QUESTION, binary=binary), text_tensor(name, value, binary=binary), bare]


with triton.InferenceServerClient(address) as client:
    names = {tensor["name"] for tensor in client.get_model_metadata(vision)["inputs"]}
    assert {"image", "image_url"} <= names, names
    for name, value in (("image", base64_text("image")), ("image_url", data_url("image"))):
        for binary in (True, False):
            inputs = make_inputs(name, value, binary=binary)
            for coding in (None, "gzip"):
                result = client.infer(vision, inputs, parameters=PARAMETERS, request_compression_algorithm=coding)
                check_answer("text", result.as_numpy("text_output")[0].decode())
    try:
        client.infer(vision, make_inputs("image", "AAAA"), parameters=PARAMETERS)
    except InferenceServerException as error:
        assert "[400]" in str(error) and "image" in str(error), error
    else:
        raise AssertionError("it was not refused")
print("good")
