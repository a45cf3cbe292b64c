"""Prompts with media use the LoRA adapters that a model's makers publish in its folder."""

import asyncio
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from support.media_answers import make_image
from support.multimodal_models import load_processor, load_whole_model, multimodal_folder

from parley.llm import LLM, Answer
from parley.model.media_input.processor import load_jobs
from parley.serving.media.media_adapters import adapter_rank, find_media_adapters

TARGETS = r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)"
QUESTION = "what is this"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Phi-4-multimodal with an adapter for images, of more than the highest rank that is allowed by default."""
    target = tmp_path_factory.mktemp("phi4") / "phi4"
    shutil.copytree(multimodal_folder("phi4_multimodal"), target)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=300, lora_alpha=600, target_modules=TARGETS, init_lora_weights=False)
    peft.get_peft_model(load_whole_model(target), config).save_pretrained(target / "vision-lora")
    return target


def token_ids(answer: Answer) -> list[int]:
    return [token.id for token in answer.completions[0].tokens]


def transformers_answer(folder: Path, images: list, adapter: str) -> list[int]:
    model, processor = load_whole_model(folder), load_processor(folder)
    if adapter:
        model.load_adapter(folder / adapter)
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": QUESTION}]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_prompts_with_images_use_the_adapter_in_the_folder_and_texts_do_not(folder: Path, monkeypatch):
    with LLM(str(folder), dtype="float32", kv_memory=1 << 26) as llm:
        assert list(llm.model.adapters) == ["phi4-vision-lora"]
        count = torch.get_num_threads()
        jobs = load_jobs(folder)
        torch.set_num_threads(count)

        async def process_here(source, target, job, tenant):
            return await asyncio.to_thread(jobs.process_media, job)

        monkeypatch.setattr(llm.model.media_workers, "process_media", process_here)
        message = [{"role": "user", "content": QUESTION}]
        options = {"temperature": 0, "max_tokens": 8, "logprobs": True}
        seen, read = (llm.chat(message, images=images, **options) for images in ([make_image(1)], []))
    assert token_ids(seen) == transformers_answer(folder, [make_image(1)], "vision-lora")
    assert token_ids(seen) != transformers_answer(folder, [make_image(1)], "")
    assert token_ids(read) == transformers_answer(folder, [], "")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"r": "a"}', '{"r": true}'])
def test_damaged_configs_are_left_to_the_load(tmp_path: Path, content: str):
    (tmp_path / "adapter_config.json").write_text(content)
    assert adapter_rank(tmp_path) == 0
    (tmp_path / "config.json").write_text(content)
    assert find_media_adapters(tmp_path) == {}


def test_adapters_belong_to_kinds_of_media(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4_multimodal"}))
    for name, rank in (("vision-lora", 256), ("speech-lora", 10**9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    assert find_media_adapters(tmp_path) == {"image": tmp_path / "vision-lora", "audio": tmp_path / "speech-lora"}
    assert [adapter_rank(tmp_path / name) for name in ("vision-lora", "speech-lora")] == [256, 512]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granite_speech"}))
    assert find_media_adapters(tmp_path) == {}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 64}))  # next to the model's own files
    assert find_media_adapters(tmp_path) == {"audio": tmp_path}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    assert find_media_adapters(tmp_path) == {}
