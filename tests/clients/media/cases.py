"""The files that the clients send, and the answers of Transformers, as ``write_cases.py`` wrote them."""

import base64
import json
import os
from pathlib import Path

CASES = json.loads(Path(os.environ["MEDIA_CASES"]).read_text())
FILES = CASES["files"]
QUESTION = CASES["question"]
TOKENS = CASES["tokens"]  # length of every answer
TEXT = {"type": "text", "text": QUESTION}


def read_file(name):
    return Path(FILES[name]).read_bytes()


def base64_text(name):
    return base64.b64encode(read_file(name)).decode()


def data_url(name):
    media_type = {".jpg": "image/jpeg", ".png": "image/png", ".mp4": "video/mp4"}[Path(FILES[name]).suffix]
    return f"data:{media_type};base64,{base64_text(name)}"


def image_part(name):
    return {"type": "image_url", "image_url": {"url": data_url(name)}}


def question_about(*parts):
    return [{"role": "user", "content": [*parts, TEXT]}]


def check_answer(name, text):
    assert text == CASES["answers"][name], f"{name}: {text!r} instead of {CASES['answers'][name]!r}"
