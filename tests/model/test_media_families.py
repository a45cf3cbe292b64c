"""Images, videos and clips over KV pages: the tokens of Transformers, and the same bits in any chunks and company."""

from __future__ import annotations

import functools
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.image_models import IMAGE_MODELS
from support.media_items import SAMPLING_RATE
from support.media_requests import (
    MediaPrompt,
    build_media_prompt,
    random_image,
    random_sound,
    random_video,
    whole_model,
)
from support.multimodal_models import BY_NIGHT, FAMILIES, IS_NIGHT, multimodal_folder
from support.run_model import load_test_runner, serve_requests

from parley.core.sequence import PAGE_SIZE, Sequence, Step, StepRow
from parley.model.media_embeddings import EncodedItem
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import DecoderRunner
from parley.types import EngineRequest, SamplingOptions, TokenScore
from parley.types.media import lead_length

NEW_TOKENS = 8
# Of the models in recent_media_models.py, those whose decoder has media in no other family. The embeddings of all, of
# some by night, are compared in test_media_encoder.py, and the tokens of their prompts in test_media_prompt.py.
IMAGE_FAMILIES = [
    "llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "idefics3", "smolvlm", "internvl", "mistral3", "gemma3", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "glm4v",
    "glm46v", "glm4v_moe", "glm_ocr", "exaone4_5", "video_llama_3", "paddleocr_vl", "gemma4", "gemma4_31b",
    "gemma4_unified", *IMAGE_MODELS, "lfm3_vl", "minicpmv4_6", "minicpmv4_7", "mllama",
    "paligemma2", "nemotron_h_omni",
]  # fmt: skip
VIDEO_FAMILIES = [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm", "internvl", "llava_onevision", "llava_next_video",
    "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "glm4v", "glm46v", "glm4v_moe", "glm_ocr", "exaone4_5",
    "video_llama_3", "gemma4", "gemma4_31b", "gemma4_unified", "nemotron_h_omni", "minicpmv4_7",
]  # fmt: skip
# Of these Transformers mixes up images and videos, or cannot read both at once
ONE_KIND_FAMILIES = ["smolvlm", "glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga", "nemotron_h_omni"]
AUDIO_FAMILIES = [
    "qwen2_audio", "qwen3_asr", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "glmasr", "audioflamingo3", "voxtral",
    "gemma4", "gemma4_unified", "phi4_multimodal", "nemotron_h_omni", "granite_speech", "granite_speech_plus",
    "moss_transcribe_diarize",
]  # fmt: skip
# One without axes, three with M-RoPE, of which one has embeddings for several layers and one turns neighbouring
# dimensions, one that sees both ways, one with inputs of layers, and one that sees both ways in some layers. LFM2-VL
# has layers with a state, Llama 4 attention in chunks, Kimi K2.5 latent attention, PaliGemma prompts that are read both
# ways.
EXACT_FAMILIES = [
    "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "gemma3", "gemma4", "gemma4_31b", "lfm2_vl", "llama4",
    "kimi_k25", "paligemma2", "mllama",
]  # fmt: skip
if IS_NIGHT:
    IMAGE_FAMILIES += BY_NIGHT
    EXACT_FAMILIES += BY_NIGHT
    VIDEO_FAMILIES += [family for family in BY_NIGHT if "video" in FAMILIES[family].parts]
if "gemma3n" in FAMILIES:  # it needs timm
    for families in (IMAGE_FAMILIES, AUDIO_FAMILIES, EXACT_FAMILIES):
        families.append("gemma3n")
    IMAGE_FAMILIES.append("fast_vlm")
    VIDEO_FAMILIES.append("perception_lm")
    ONE_KIND_FAMILIES.append("perception_lm")
GREEDY = SamplingOptions(temperature=0.0)


@functools.cache
def two_images(family: str, number: int = 0) -> MediaPrompt:
    first, second = random_image(number, 60, 40), random_image(number + 1, 33, 90)
    return build_media_prompt(family, [first, f"what is this {number}, and ", second, " compare them"])


@functools.cache
def one_image(family: str) -> MediaPrompt:
    return build_media_prompt(family, ["a ", random_image(4, 90, 60), " bc"])


@functools.cache
def loaded_runner(family: str, dtype: str = "float32") -> DecoderRunner:
    return load_test_runner(multimodal_folder(family, dtype), dtype=dtype)[0]


class PagedRun:
    """Sequences over one set of pages, whose rows are computed step by step."""

    def __init__(self, runner: DecoderRunner, prompts: list[MediaPrompt], **request: Any):
        counts = [-(-len(prompt.token_ids) // PAGE_SIZE) + 1 for prompt in prompts]
        runner.pages = PagedKV(runner.pages.kv_layers, sum(counts), runner.pages.dtype)
        runner.pages.clear_pages(list(range(sum(counts))))
        self.runner = runner
        self.sequences: list[Sequence] = []
        for number, prompt in enumerate(prompts):
            blocks = list(range(sum(counts[:number]), sum(counts[: number + 1])))
            options: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 9, "media": prompt.media} | request
            engine_request = EngineRequest(str(number), prompt.token_ids, **options)
            length = len(prompt.token_ids)
            sequence = Sequence(
                str(number), 0, engine_request, list(prompt.token_ids), length, 0, number, block_table=blocks
            )
            sequence.item_embeddings = dict(prompt.encoded)
            sequence.slot = number
            runner.admit_sequence(sequence)
            self.sequences.append(sequence)

    @torch.inference_mode()
    def compute_hidden(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Compute tokens (sequence, start, end) in one step; return the hidden states of each part."""
        rows = [StepRow(self.sequences[number], start, end - start, False) for number, start, end in parts]
        batch = self.runner.pack_rows(rows)
        batch.result_counts = None  # all rows are compared
        hidden = self.runner.network.compute_hidden(batch, self.runner.pages)
        return list(hidden.split([span.count for span in batch.spans]))  # of text, where images lead a prompt


def end_of_chunk(prompt: MediaPrompt, end: int) -> int:
    """Where a chunk that wants to end at ``end`` must end, so that it has all that its last token sees."""
    media = prompt.media
    if lead := lead_length(media):
        return max(end, lead + 1)
    if any(item.prompt_sees_both_ways for item in media):
        return max(end, len(prompt.token_ids))
    return next((item.end for item in media if item.sees_both_ways and item.start < end < item.end), end)


@torch.inference_mode()
def paged_logits(family: str, prompt: MediaPrompt, answer: list[int], chunk: int) -> torch.Tensor:
    """Logits that predict each token of the answer, from steps of ``chunk`` tokens."""
    run = PagedRun(loaded_runner(family), [prompt])
    run.sequences[0].tokens += answer[:-1]
    hidden, start, length = [], 0, len(run.sequences[0].tokens)
    while start < length:
        end = end_of_chunk(prompt, min(length, start + chunk))
        hidden += run.compute_hidden([(0, start, end)])
        start = end
    return run.runner.network.compute_logits(torch.cat(hidden)[-len(answer) :])


def whole_answer(family: str, prompt: MediaPrompt) -> tuple[list[int], torch.Tensor]:
    """The tokens that Transformers generates, and the logits of each."""
    with torch.inference_mode():
        output = whole_model(family).generate(
            **prompt.inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    length = prompt.inputs["input_ids"].shape[1]
    return output.sequences[0, length:].tolist(), torch.cat(output.logits).float()


def check_against_transformers(family: str, prompt: MediaPrompt, chunk: int) -> None:
    answer, expected = whole_answer(family, prompt)
    logits = paged_logits(family, prompt, answer, chunk)
    assert logits.argmax(-1).tolist() == answer
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max().clamp_min(1)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_images_give_the_tokens_of_transformers(family):
    check_against_transformers(family, two_images(family), chunk=7)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_videos_give_the_tokens_of_transformers(family):
    parts = ["watch ", random_video(3, 6, 64, 48), "then ", random_image(2, 33, 90), " say"]
    if family in ONE_KIND_FAMILIES:
        del parts[3]
    check_against_transformers(family, build_media_prompt(family, parts), chunk=5)


@pytest.mark.parametrize("family", AUDIO_FAMILIES)
def test_clips_give_the_tokens_of_transformers(family):
    check_against_transformers(family, build_media_prompt(family, ["hear ", random_sound(6), " say"]), chunk=9)


@pytest.mark.parametrize("family", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_images_video_and_sound_in_one_prompt_give_the_tokens_of_transformers(family):
    """The text continues behind the last frame, and sound has no embeddings for further layers."""
    parts = ["a ", random_video(3, 6, 64, 48), "b ", random_sound(6), "c ", random_image(2, 33, 90), " d"]
    check_against_transformers(family, build_media_prompt(family, parts), chunk=11)


def test_repeated_frames_have_one_token_each():
    """Of VideoLLaMA 3."""
    still = np.repeat(random_video(3, 1, 84, 56), 6, 0)
    prompt = build_media_prompt("video_llama_3", ["watch ", still, " say"])
    assert [run.count for run in prompt.media[0].runs] == [6, 1, 1, 1, 1, 1]
    check_against_transformers("video_llama_3", prompt, chunk=5)


@pytest.mark.parametrize("family", ["glmasr", "audioflamingo3", "voxtral", "moss_transcribe_diarize"])
def test_long_clips_of_several_windows_give_the_tokens_of_transformers(family):
    sound = np.random.default_rng(6).standard_normal(41 * SAMPLING_RATE + 777).astype(np.float32)
    check_against_transformers(family, build_media_prompt(family, ["hear ", sound, " say"]), chunk=300)


@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_the_engine_encodes_and_gives_the_tokens_of_transformers(family):
    """Two requests at a time read feature files; the second one begins with the first one's pages."""
    prompts = [two_images(family), two_images(family), one_image(family)]
    with ExitStack() as files:
        requests = [
            EngineRequest(
                str(number), prompt.token_ids, NEW_TOKENS, GREEDY, media=files.enter_context(prompt.open_media())
            )
            for number, prompt in enumerate(prompts)
        ]
        answers, stats = serve_requests(loaded_runner(family), requests, step=50, blocks=60)
    for number, prompt in enumerate(prompts):
        assert answers[str(number), 0].token_ids == whole_answer(family, prompt)[0]
    assert stats.media_cache_queries > 0


@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_another_image_gives_other_logits(family):
    """Guards against tests that pass because images change nothing."""
    prompt, other = two_images(family), two_images(family, 5)
    swapped = replace(prompt, encoded=dict(zip(prompt.encoded, other.encoded.values(), strict=True)))
    expected, actual = (paged_logits(family, image_prompt, [1], 100) for image_prompt in (prompt, swapped))
    assert (expected - actual).abs().max() > 0.01


def in_bf16(prompt: MediaPrompt) -> MediaPrompt:
    encoded = {
        digest: EncodedItem(item.rows.bfloat16(), [rows.bfloat16() for rows in item.deepstack])
        for digest, item in prompt.encoded.items()
    }
    return replace(prompt, encoded=encoded)


def hidden_alone(family: str, prompt: MediaPrompt) -> torch.Tensor:
    """The hidden states of a prompt that is computed alone and at once, in bfloat16."""
    return PagedRun(loaded_runner(family, "bfloat16"), [prompt]).compute_hidden([(0, 0, len(prompt.token_ids))])[0]


@pytest.mark.parametrize("family", EXACT_FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_any_chunks_and_neighbours_give_the_same_bits(family, seed):
    chance = random.Random(seed)
    prompts = [in_bf16(two_images(family, number)) for number in (0, 5, 0)]
    expected = [hidden_alone(family, prompt) for prompt in prompts]
    run = PagedRun(loaded_runner(family, "bfloat16"), prompts)
    states: list[list[torch.Tensor]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    while unfinished := [i for i, prompt in enumerate(prompts) if computed[i] < len(prompt.token_ids)]:
        parts = []
        for i in chance.sample(unfinished, chance.randint(1, len(unfinished))):
            end = min(computed[i] + chance.choice([1, 2, 5, 16, 40]), len(prompts[i].token_ids))
            parts.append((i, computed[i], end_of_chunk(prompts[i], end)))
        for (i, _, end), hidden in zip(parts, run.compute_hidden(parts), strict=True):
            states[i].append(hidden)
            computed[i] = end
    assert all(torch.equal(torch.cat(parts), alone) for parts, alone in zip(states, expected, strict=True))


@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_every_boundary_gives_the_same_bits(family):
    """A chunk may end after any token of an image, and a prefix hit after any page, unless layers keep a state."""
    prompt = in_bf16(one_image(family))
    length, expected = len(prompt.token_ids), hidden_alone(family, prompt)
    for end in sorted({end_of_chunk(prompt, boundary) for boundary in range(1, length)} - {length}):
        run = PagedRun(loaded_runner(family, "bfloat16"), [prompt])
        assert torch.equal(
            torch.cat([run.compute_hidden([(0, *part)])[0] for part in ((0, end), (end, length))]), expected
        )
    if loaded_runner(family, "bfloat16").state_slots is not None:
        return
    run = PagedRun(loaded_runner(family, "bfloat16"), [prompt, prompt])
    run.compute_hidden([(0, 0, length)])
    first, second = run.sequences
    for page in range(1, length // PAGE_SIZE + 1):
        second.block_table = first.block_table[:page] + second.block_table[page:]
        start = min(page * PAGE_SIZE, length - 1)
        hidden = run.compute_hidden([(1, start, length)])[0]
        assert torch.equal(hidden, expected[-len(hidden) :])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3", "gemma4", "gemma4_31b"])
def test_preemption_and_prefix_hits_keep_outputs_bit_for_bit(family):
    """Requests with a common image run through the loop, with the encoder and too few pages."""
    prompts = [two_images(family), two_images(family, 5), two_images(family)]
    pages = max(len(prompt.token_ids) for prompt in prompts) // PAGE_SIZE + 4
    runner = loaded_runner(family, "bfloat16")
    with ExitStack() as files:
        requests = [
            EngineRequest(
                str(number),
                prompt.token_ids,
                20,
                SamplingOptions(temperature=0.8),
                seed=number,
                logprobs=1,
                media=files.enter_context(prompt.open_media()),
            )
            for number, prompt in enumerate(prompts)
        ]
        alone = [
            serve_requests(runner, [request], step=1000, blocks=60, cache=False)[0][request.id, 0]
            for request in requests
        ]
        answers, stats = serve_requests(runner, requests, step=23, blocks=pages)
    assert stats.preemptions
    for expected, request in zip(alone, requests, strict=True):
        assert answers[request.id, 0].scores == expected.scores


def test_output_is_not_found_as_part_of_the_next_prompt_where_its_positions_differ():
    """A long video reaches further than the text after it; output goes on behind it, the text of a prompt does not."""
    prompt = build_media_prompt("qwen2_5_vl", ["a ", random_video(3, 6, 64, 48), " b"])
    (run,) = prompt.media[0].runs
    far_apart = [msgspec.structs.replace(run, frame_step=40.0)]
    runner = loaded_runner("qwen2_5_vl", "bfloat16")
    with prompt.open_media() as media:
        media = [msgspec.structs.replace(media[0], runs=far_apart)]
        first = EngineRequest("first", prompt.token_ids, 40, GREEDY, media=media)
        output = serve_requests(runner, [first], blocks=60)[0]["first", 0].token_ids
        turn = [*prompt.token_ids, *output, 7, 8, 9]
        second = EngineRequest("second", turn, 8, GREEDY, media=media, logprobs=1)
        alone = serve_requests(runner, [second], blocks=60)[0]["second", 0]
        after = serve_requests(runner, [first, second], batch=1, blocks=60)[0]["second", 0]
    assert after.scores == alone.scores


def beyond_the_table(prompt: MediaPrompt) -> tuple[MediaPrompt, set[int]]:
    """The prompt with placeholders that no embedding table has, and their positions."""
    places = {
        item.start + run.offset + number for item in prompt.media for run in item.runs for number in range(run.count)
    }
    token_ids = [1 << 20 if place in places else token for place, token in enumerate(prompt.token_ids)]
    return replace(prompt, token_ids=token_ids), places


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_placeholders_beyond_the_embedding_table_change_nothing(family):
    """Published checkpoints of both have such ids."""
    prompt = one_image(family)
    beyond, _ = beyond_the_table(prompt)
    assert torch.equal(paged_logits(family, beyond, [1], 100), paged_logits(family, prompt, [1], 100))


def test_prompt_logprobs_of_placeholders_are_none():
    prompt, places = beyond_the_table(one_image("llava"))
    length = len(prompt.token_ids)
    sampling = SamplingOptions(temperature=0.0, repetition_penalty=1.3, no_repeat_ngram=2)
    run = PagedRun(loaded_runner("llava"), [prompt], prompt_logprobs=1, sampling=sampling)
    scores: list[TokenScore | None] = [None]
    for start in range(0, length, 9):
        count = min(9, length - start)
        row = StepRow(run.sequences[0], start, count, start + count == length, score_from=start + 1)
        (result,) = run.runner.run_step(Step([row]))
        scores += result.prompt_scores
    assert result.error is None and len(result.tokens) == 1
    assert [place for place, score in enumerate(scores) if score is None] == [0, *sorted(places)]
    assert len(scores) == length
