"""Llama 3.2 Vision in its published shape: the mark of an image is the first token beyond the vocabulary."""

import asyncio
from pathlib import Path

import pytest
import torch
from support.media_answers import make_image
from support.multimodal_models import load_whole_model, write_multimodal_model

from parley.errors import BadRequest
from parley.llm import LLM
from parley.model.leading_media import image_views
from parley.model.media_input.processor import load_jobs
from parley.text.media_prompt import begin_after_marks, place_leading_items
from parley.types import EmbeddingRun, MediaItem, ProcessedMedia

MARK = 463  # of the tokenizer of all models here
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_multimodal_model(tmp_path_factory.mktemp("mllama"), "mllama", text={"vocab_size": MARK})


@pytest.fixture(scope="module")
def llm(folder: Path):
    with LLM(str(folder), dtype="float32", kv_memory=1 << 26) as model:
        count = torch.get_num_threads()
        jobs = load_jobs(folder)
        torch.set_num_threads(count)

        async def process_here(source, target, job, tenant):
            return await asyncio.to_thread(jobs.process_media, job)

        model.model.media_workers.process_media = process_here
        yield model


def transformers_answer(folder: Path, text: str, seeds: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that greedy generation adds to a prompt, and their log-probabilities."""
    from transformers import AutoProcessor

    model, processor = load_whole_model(folder), AutoProcessor.from_pretrained(folder)
    inputs = processor(text=[text], images=list(map(make_image, seeds)), return_tensors="pt")
    for name in ("input_ids", "attention_mask", "cross_attention_mask"):  # without BOS, which these templates lack
        inputs[name] = inputs[name][:, 1:]
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    scores = torch.cat(output.logits).log_softmax(-1).amax(-1)
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), scores


@pytest.mark.parametrize("seeds", [[1], [2], [1, 2]])
def test_conversations_give_the_tokens_of_transformers(folder: Path, llm: LLM, seeds: list[int]):
    question = [{"role": "user", "content": "what is this?"}]
    images = list(map(make_image, seeds))
    answer = llm.chat(question, images=images, temperature=0, max_tokens=NEW_TOKENS, logprobs=True)
    text = f"<|im_start|>user\n{'<|image|>' * len(seeds)}what is this?<|im_end|>\n<|im_start|>assistant\n"
    expected, scores = transformers_answer(folder, text, seeds)
    tokens = answer.completions[0].tokens
    assert [token.id for token in tokens] == expected
    assert torch.allclose(torch.tensor([token.logprob for token in tokens]), scores, atol=1e-4)


def test_prompt_logprobs_leave_out_images_their_marks_and_the_first_token(llm: LLM):
    question = [{"role": "user", "content": "what is this?"}]
    answer = llm.chat(question, images=[make_image(1)], temperature=0, max_tokens=1, prompt_logprobs=0)
    token_ids = [token.id for token in answer.prompt]
    lead = next(place for place, token_id in enumerate(token_ids) if token_id not in (MARK, 0))
    assert lead % 16 == 0
    unscored = [place for place, token in enumerate(answer.prompt) if token.logprob is None]
    assert unscored == [*range(lead + 1), token_ids.index(MARK, lead)]


def processed(count: int) -> ProcessedMedia:
    return ProcessedMedia("image", bytes([count]), "<|image|>", "<|image|>", count, leads_prompt=True)


def find_token(mark: str) -> int | None:
    return {"<|image|>": MARK, "<bos>": 0}.get(mark)


def test_images_lead_the_prompt_and_those_with_adjacent_marks_are_adjacent():
    token_ids, media = place_leading_items(
        [7, MARK, MARK, 8, MARK, 9], [processed(17), processed(3), processed(5)], find_token
    )
    assert token_ids == [MARK] * 20 + [0] * 12 + [MARK] * 5 + [0] * 11 + [7, MARK, MARK, 8, MARK, 9]
    assert media == [
        MediaItem("image", bytes([count]), start, count, [EmbeddingRun(0, count)], seen_from=48 + mark)
        for start, count, mark in [(0, 17, 1), (17, 3, 2), (32, 5, 4)]
    ]
    assert image_views(media) == [(49, 0, 17), (50, 0, 20), (52, 32, 37)]


@pytest.mark.parametrize("token_ids", [[7], [MARK, 7, MARK]])
def test_a_prompt_needs_one_mark_for_each_image(token_ids: list[int]):
    with pytest.raises(BadRequest, match=r"too few|more '<\|image\|>' placeholders"):
        place_leading_items(token_ids, [processed(17)], find_token)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([0, MARK, MARK, 7], [MARK, MARK, 0, 7]),
        ([0, 7, MARK], [0, 7, MARK]),
        ([MARK, 7], [MARK, 7]),
        ([], []),
    ],
)
def test_a_plain_text_begins_after_the_marks_at_its_start(token_ids: list[int], expected: list[int]):
    assert begin_after_marks(token_ids, [processed(1)], find_token, "<bos>") == expected
