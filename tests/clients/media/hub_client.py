"""Hugging Face's InferenceClient: Markdown links in prompts, parts in chats. Arguments: HOST:PORT VISION SPEECH."""

import sys

from cases import QUESTION, TOKENS, base64_text, check_answer, data_url, image_part, question_about
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

address, vision, speech = sys.argv[1:]
PROMPT = f"![]({data_url('image')}){QUESTION}"

for base in ("", "/tgi"):
    client = InferenceClient(model=f"http://{address}{base}")
    options = {"max_new_tokens": TOKENS, "return_full_text": False}
    whole = client.text_generation(PROMPT, **options, details=True)
    check_answer("text", whole.generated_text)
    assert whole.details.generated_tokens == TOKENS
    events = list(client.text_generation(PROMPT, **options, stream=True, details=True))
    check_answer("text", events[-1].generated_text)
    check_answer("text", "".join(event.token.text for event in events))
    try:
        client.text_generation("![](https://example.com/sun.jpg) What is it?", **options)
    except ValidationError as error:
        assert "Could not fetch image" in str(error), error
    else:
        raise AssertionError("it was not refused")

    chat = InferenceClient(base_url=f"http://{address}{base}")
    options = {"temperature": 0, "max_tokens": TOKENS}
    for name, image in (("chat", "image"), ("other", "other_image")):
        messages = question_about(image_part(image))
        answer = chat.chat_completion(messages, model=vision, **options)
        check_answer(name, answer.choices[0].message.content)
        chunks = chat.chat_completion(messages, model=vision, **options, stream=True)
        check_answer(name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))

sound = {"type": "input_audio", "input_audio": {"data": base64_text("clip"), "format": "wav"}}
chat = InferenceClient(base_url=f"http://{address}/v1")
answer = chat.chat_completion(question_about(sound), model=speech, temperature=0, max_tokens=TOKENS)
check_answer("sound", answer.choices[0].message.content)
print("good")
