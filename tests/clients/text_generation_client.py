"""TGI's own Python client (text-generation): text, chat, errors, streams of text. Arguments: HOST:PORT MODEL."""

import sys

from text_generation import Client
from text_generation.errors import ValidationError

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."

for base in ("", "/tgi"):
    client = Client(f"http://{address}{base}")
    whole = client.generate("Hello", max_new_tokens=4, decoder_input_details=True)
    assert (
        whole.generated_text and whole.details.generated_tokens == len(whole.details.tokens) and whole.details.prefill
    )
    events = list(client.generate_stream("Hello", max_new_tokens=4))
    assert events[-1].generated_text == whole.generated_text
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    drawn = client.generate(
        "Hello", do_sample=True, temperature=0.5, top_k=9, top_p=0.9, seed=3, stop_sequences=["."], max_new_tokens=8
    )
    assert drawn.details.seed == 3

    answer = client.chat(QUESTION, temperature=0.01, max_tokens=16)
    assert answer.choices[0].message.content == ANSWER, answer
    # Chat streams are not tested: the client passes the final [DONE], which TGI sends as well, to a JSON parser.

    # the client checks most values itself; this error can only come from the server
    try:
        client.generate("Hello " * 5000, max_new_tokens=4)
    except ValidationError as error:
        assert "inputs" in str(error) or "tokens" in str(error), error
    else:
        raise AssertionError("it was not refused")
print("good")
