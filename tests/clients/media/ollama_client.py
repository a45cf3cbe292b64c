"""Ollama's Python client: images in chats and prompts, as files, bytes and base64. Takes HOST:PORT VISION SPEECH."""

import sys

import ollama
from cases import FILES, QUESTION, TOKENS, base64_text, check_answer, read_file

address, vision, _ = sys.argv[1:]
client = ollama.Client(host=f"http://{address}")
options = {"temperature": 0, "num_predict": TOKENS}
for images in ([FILES["image"]], [read_file("image")], [base64_text("image")]):
    messages = [{"role": "user", "content": QUESTION, "images": images}]
    whole = client.chat(model=vision, messages=messages, options=options).message.content
    check_answer("chat", whole)
    pieces = client.chat(model=vision, messages=messages, options=options, stream=True)
    assert "".join(piece.message.content for piece in pieces) == whole
    check_answer("chat", client.generate(model=vision, prompt=QUESTION, images=images, options=options).response)
other = [{"role": "user", "content": QUESTION, "images": [base64_text("other_image")]}]
check_answer("other", client.chat(model=vision, messages=other, options=options).message.content)
assert "vision" in client.show(vision).capabilities
for images in (["%%%"], [b"no image"], [base64_text("clip")]):
    try:
        client.chat(model=vision, messages=[{"role": "user", "content": QUESTION, "images": images}], options=options)
    except ollama.ResponseError as error:
        assert error.status_code == 400 and "images[0]" in error.error, error
    else:
        raise AssertionError(f"{images[0][:9]} was not refused")
print("good")
