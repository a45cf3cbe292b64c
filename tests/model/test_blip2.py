"""BLIP-2 with OPT: its placeholders stand before the token that begins texts, and it has no chat template."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from support.media_answers import make_image
from support.media_family_shape import VISION
from support.tiny_models import VOCAB, write_random_model, write_tokenizer

from parley.llm import LLM
from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.media_input.processor import load_jobs
from parley.types import ParleySettings

QUESTION = "Question: what is this? Answer:"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
OPT = {
    "model_type": "opt",
    "vocab_size": VOCAB + 1,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from transformers import (
        AutoTokenizer,
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessor,
    )

    target: Path = tmp_path_factory.mktemp("blip2")
    _write_tokenizer(target)
    image_processor = BlipImageProcessor(size={"height": 28, "width": 28})
    processor = Blip2Processor(image_processor, AutoTokenizer.from_pretrained(target), num_query_tokens=4)
    processor.save_pretrained(target)
    config = Blip2Config(
        text_config=OPT,
        vision_config=VISION | {"image_size": 28, "patch_size": 7},
        qformer_config=VISION | {"encoder_hidden_size": 32},
        num_query_tokens=4,
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = Blip2ForConditionalGeneration(config)
    model.generation_config.eos_token_id = None
    write_random_model(target, model, seed=2, dtype="float32")
    return target


def _write_tokenizer(folder: Path) -> None:
    """Write one that begins texts with BOS, as OPT's does. The chat template writes the question alone."""
    write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos["id"]: bos},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": bos["id"], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def transformers_answer(folder: Path, seed: int | None) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that greedy generation adds to the question, and their log-probabilities."""
    from transformers import Blip2ForConditionalGeneration, Blip2Processor

    model = Blip2ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    processor = Blip2Processor.from_pretrained(folder)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        if seed is None:
            inputs = processor.tokenizer(QUESTION, return_tensors="pt")
            output = model.language_model.generate(**inputs, **options, eos_token_id=None)
        else:
            inputs = processor(images=make_image(seed), text=QUESTION, return_tensors="pt")
            output = model.generate(**inputs, **options)
    scores = torch.cat(output.logits).log_softmax(-1).amax(-1)
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), scores


def test_images_and_texts_give_the_tokens_of_transformers(folder: Path, monkeypatch):
    with LLM(str(folder), dtype="float32", kv_memory=1 << 26) as llm:
        count = torch.get_num_threads()
        jobs = load_jobs(folder)
        torch.set_num_threads(count)

        async def process_here(source, target, job, tenant):
            return await asyncio.to_thread(jobs.process_media, job)

        monkeypatch.setattr(llm.model.media_workers, "process_media", process_here)
        options = {"temperature": 0, "max_tokens": 8, "logprobs": True}
        question = [{"role": "user", "content": QUESTION}]
        answers = [llm.chat(question, images=[make_image(seed)], **options) for seed in (1, 2)]
        text = llm.generate(QUESTION, **options | {"logprobs": 1})
    for answer, seed in zip([*answers, text], [1, 2, None], strict=True):
        expected, scores = transformers_answer(folder, seed)
        tokens = answer.completions[0].tokens
        assert torch.allclose(torch.tensor([token.logprob for token in tokens]), scores, atol=1e-4)
        assert [token.id for token in tokens] == expected
    first, second = (answer.completions[0].tokens[0].logprob for answer in answers)
    assert abs(first - second) > 1e-3  # images change something


def test_a_model_with_an_encoder_of_texts_is_refused(tmp_path: Path):
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    small = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    config = Blip2Config(
        text_config={"model_type": "t5", **small},
        vision_config=VISION | {"image_size": 28, "patch_size": 7},
        qformer_config=VISION | {"encoder_hidden_size": 32},
    )
    write_tokenizer(tmp_path)
    Blip2ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"A blip-2 model is an encoder-decoder; only decoders can be served\."):
        check_model(ParleySettings(model=str(tmp_path)))
