"""Images in the calls of a script: the answer is that of Transformers, whatever form the image has."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.media_answers import chat_text, image_bytes, make_image, reference_ids
from support.multimodal_models import multimodal_folder

from parley.errors import BadMedia, InvalidValue, WrongType
from parley.llm import LLM

QUESTION = "What is this?"
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_chat_takes_images_as_paths_bytes_and_images_of_pillow(tmp_path: Path):
    file = tmp_path / "image.png"
    file.write_bytes(image_bytes(1))
    messages = [{"role": "user", "content": QUESTION}]
    parts = [{"type": "image", "image": file}, {"type": "text", "text": QUESTION}]
    _, expected = reference_ids("qwen2_vl", chat_text("qwen2_vl", ("user", [None, QUESTION])), (1,), 8)
    with LLM(str(multimodal_folder("qwen2_vl")), dtype="float32", kv_memory=8 << 20, threads=1) as llm:
        text = llm.model.text_pipeline.tokenizer.decode(expected)
        for image in (str(file), file, image_bytes(1), make_image(1)):
            answer = llm.chat(messages, images=[image], **GREEDY)
            assert answer.text == text
            assert answer.usage.media_tokens["image"] > 0
        assert llm.chat([{"role": "user", "content": parts}], **GREEDY).text == text
        assert "".join(llm.stream(messages, images=file, **GREEDY)) == text
        for error, sentence, media in (
            (InvalidValue, "none.png", {"images": [tmp_path / "none.png"]}),
            (InvalidValue, "known format", {"images": [b"no image"]}),
            (InvalidValue, "Did you mean 'images'", {"image": [file]}),
            (WrongType, "image of Pillow", {"images": [3]}),
            (BadMedia, "images and videos only", {"audio": [b"RIFF\0\0\0\0WAVE"]}),
            (BadMedia, "images and videos only", {"audio": [b"\0\0\0 ftypM4A "]}),
        ):
            with pytest.raises(error, match=sentence):
                llm.chat(messages, **media)
        with pytest.raises(InvalidValue, match="images needs a conversation"):
            llm.generate(QUESTION, images=[file])
        with pytest.raises(InvalidValue, match="needs a message of a user"):
            llm.chat([{"role": "system", "content": "Be brief."}], images=[file])
