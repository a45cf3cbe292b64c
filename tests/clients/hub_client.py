"""Hugging Face's InferenceClient: text and chat, streams, details, errors. Arguments: HOST:PORT MODEL."""

import sys

from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."

for base in ("", "/tgi"):
    url = f"http://{address}{base}"
    client = InferenceClient(model=url)
    assert client.text_generation("Hello", max_new_tokens=4).startswith("Hello")  # includes the prompt by default
    bare = {"max_new_tokens": 4, "return_full_text": False}
    text = client.text_generation("Hello", **bare)
    assert text
    whole = client.text_generation("Hello", **bare, details=True, decoder_input_details=True)
    assert whole.generated_text == text and whole.details.generated_tokens == len(whole.details.tokens)
    assert whole.details.prefill and whole.details.finish_reason in ("length", "eos_token")
    events = list(client.text_generation("Hello", **bare, stream=True, details=True))
    assert "".join(event.token.text for event in events if not event.token.special) == text
    plain = client.text_generation("Hello", **bare, stream=True)  # also yields special tokens
    assert list(plain) == [event.token.text for event in events]
    last = events[-1]
    assert last.generated_text == text and last.details.generated_tokens == whole.details.generated_tokens
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 7}
    one = client.text_generation("Hello", max_new_tokens=8, **drawn)
    assert one == client.text_generation("Hello", max_new_tokens=8, **drawn)
    try:
        client.text_generation("Hello", max_new_tokens=0)
    except ValidationError as error:
        assert "max_new_tokens" in str(error)
    else:
        raise AssertionError("it was not refused")

    chat = InferenceClient(base_url=url)
    answer = chat.chat_completion(QUESTION, model=model, temperature=0.01, max_tokens=16)
    assert answer.choices[0].message.content == ANSWER, answer
    chunks = chat.chat_completion(QUESTION, model=model, temperature=0.01, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
print("good")
