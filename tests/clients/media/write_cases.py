"""Writes two small models, an image, a video and a clip, and what Transformers answers to them. Argument: FILE.

The JSON file is what the clients in this folder read: models, files, question and answers; the rest lies beside it. One
model reads images and video, the other sound. Their weights are random, so an answer has no meaning, but another
image or another order of the parts gives another one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from support.media_files import sine_wave, video_file, wav_file
from support.multimodal_models import FAMILIES, write_multimodal_model

import parley.model.load  # noqa: F401  (before Transformers, so that torchvision can be imported)

VISION_FAMILY, SPEECH_FAMILY = "qwen2_5_vl", "qwen3_asr"
QUESTION = "What is in this image?"
TOKENS = 16  # the least that OpenAI's Responses API allows
RATE = 16_000  # samples of the clip per second
FRAMES, FRAME_RATE = 8, 4


def draw_image(width: int, height: int, colour: tuple[int, int, int]) -> Image.Image:
    """Return a sun over a field."""
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    pen = ImageDraw.Draw(image)
    pen.ellipse((width // 4, height // 6, width // 2, height // 2), fill=colour)
    pen.rectangle((0, 2 * height // 3, width, height), fill=(40, 120, 50))
    return image


def write_media(folder: Path) -> dict[str, str]:
    """Write the files; return their paths by name."""
    draw_image(160, 120, (250, 210, 60)).save(folder / "sun.jpg")
    draw_image(90, 130, (200, 30, 20)).save(folder / "dusk.png")
    (folder / "clip.mp4").write_bytes(video_file(frames=FRAMES, rate=FRAME_RATE))
    tone = np.concatenate([sine_wave(0.3, RATE, hertz) for hertz in (300, 500, 800, 400)])
    (folder / "tone.wav").write_bytes(wav_file(tone[None], RATE))
    names = {"image": "sun.jpg", "other_image": "dusk.png", "video": "clip.mp4", "clip": "tone.wav"}
    return {name: str(folder / file) for name, file in names.items()}


class Reference:
    """A model in Transformers, in float32."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForMultimodalLM, AutoProcessor

        model = AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        self.model, self.processor = model.eval(), AutoProcessor.from_pretrained(folder)

    def chat_prompt(self, *parts: str | None, kind: str = "image") -> str:
        """Return the prompt for a user's turn. None stands for an item of this kind."""
        content = [{"type": kind} if part is None else {"type": "text", "text": part} for part in parts]
        prompt: str = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return prompt

    def answer(self, prompt: str, **media: Any) -> str:
        """Return the greedy answer to a prompt, which must not end before its limit."""
        return self.generate(self.processor(text=[prompt], return_tensors="pt", add_special_tokens=False, **media))

    def generate(self, batch: Any) -> str:
        """Return the greedy answer to what the processor made of a request."""
        with torch.inference_mode():
            output = self.model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
        ids = output[0, batch["input_ids"].shape[1] :].tolist()
        assert not set(ids) & set(self.processor.tokenizer.all_special_ids), "an answer ends early: ask something else"
        text: str = self.processor.tokenizer.decode(ids)
        return text


def vision_answers(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """Return the answers about the images and the video, by the name of the request."""
    reference = Reference(folder)
    image, other = (Image.open(files[name]).convert("RGB") for name in ("image", "other_image"))
    chat_prompt = reference.chat_prompt
    text_prompt = FAMILIES[VISION_FAMILY].parts["image"] + QUESTION
    answers = {
        "chat": reference.answer(chat_prompt(None, QUESTION), images=[image]),
        "other": reference.answer(chat_prompt(None, QUESTION), images=[other]),
        "two": reference.answer(chat_prompt("Is ", None, " as ", None, "?"), images=[image, other]),
        "text": reference.answer(text_prompt, images=[image]),
        "video": reference.answer(chat_prompt(None, QUESTION, kind="video"), **read_video(files["video"])),
    }
    assert len(set(answers.values())) == len(answers), answers
    return answers


def read_video(file: str) -> dict[str, Any]:
    """Return all frames of a short video, as the processor takes them."""
    import av

    with av.open(file) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    seconds = FRAMES / FRAME_RATE
    numbers = list(range(FRAMES))
    facts = {"fps": FRAME_RATE, "total_num_frames": FRAMES, "duration": seconds, "frames_indices": numbers}
    return {"videos": [frames], "video_metadata": [facts], "do_sample_frames": False}


def speech_answers(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """Return the answer about the clip, and its transcript."""
    reference = Reference(folder)
    samples = np.frombuffer(Path(files["clip"]).read_bytes()[44:], "<i2").astype(np.float32) / 32768
    sound_prompt = reference.chat_prompt(None, QUESTION, kind="audio")
    transcription = reference.processor.apply_transcription_request(samples, language="English")
    return {
        "sound": reference.answer(sound_prompt, audio=[samples]),
        "transcript": reference.generate(transcription).strip(),
    }


def main() -> None:
    cases_file = Path(sys.argv[1]).absolute()
    folder = cases_file.parent
    folder.mkdir(parents=True, exist_ok=True)
    vision = write_multimodal_model(folder / VISION_FAMILY, VISION_FAMILY)
    speech = write_multimodal_model(folder / SPEECH_FAMILY, SPEECH_FAMILY)
    files = write_media(folder)
    answers = vision_answers(vision, files) | speech_answers(speech, files)
    cases = {
        "models": {"vision": str(vision), "speech": str(speech)},
        "files": files,
        "question": QUESTION,
        "tokens": TOKENS,
        "answers": answers,
    }
    cases_file.write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
