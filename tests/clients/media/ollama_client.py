"""Ollama's Python library: pictures as paths and bytes, in chats. Arguments: HOST:PORT VISION SPEECH."""

import sys

import ollama
from cases import FILES, QUESTION, TOKENS, check_answer, read_file

address, vision, speech = sys.argv[1:]
client = ollama.Client(host=f"http://{address}")

for name, image in (("chat", FILES["picture"]), ("chat", read_file("picture")), ("other", FILES["other_picture"])):
    messages = [{"role": "user", "content": QUESTION, "images": [image]}]
    options = {"model": vision, "messages": messages, "options": {"temperature": 0, "num_predict": TOKENS}}
    check_answer(name, client.chat(**options).message.content)
    check_answer(name, "".join(piece.message.content for piece in client.chat(**options, stream=True)))
try:
    client.chat(model=vision, messages=[{"role": "user", "content": QUESTION, "images": [b"no picture"]}])
except ollama.ResponseError as error:
    assert error.status_code == 400 and "image" in error.error, error
else:
    raise AssertionError("it was not refused")
print("good")
