"""LLM in scripts: equal answers alone, in batches and from a server, from any thread or event loop, without leaks."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import gguf_files, tiny_models

from parley import LLM, ParleyError
from parley.engine.protocol import EngineFailed
from parley.hub import ModelMissing
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import ParleySettings
from parley.worker.thread_engine import ThreadEngine

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_models.model_folder("qwen3")), threads=1, kv_memory=8 << 20) as llm:
        yield llm


def used_blocks(llm: LLM) -> int:
    return llm.model.engine.stats.used_pages


def test_text_and_token_id_prompts_give_same_answer(llm):
    text = llm.generate("the quick brown", max_tokens=6, temperature=0, return_token_ids=True)
    ids = llm.model.text_pipeline.tokenizer.encode("the quick brown")
    again = llm.generate(ids, max_tokens=6, temperature=0)
    assert text.text == again.text and text.completions[0].finish == "length"
    assert text.usage.prompt_tokens == len(ids) and text.usage.completion_tokens == 6
    assert len(text.completions[0].tokens) == 6


def test_batched_prompts_and_choices_equal_single_ones(llm):
    prompts = [f"the quick brown fox {k} jumps" for k in range(12)]
    together = llm.generate(prompts, n=2, seed=7, max_tokens=5)
    for prompt, answer in zip(prompts, together, strict=True):
        for k, completion in enumerate(answer.completions):
            assert llm.generate(prompt, seed=7 + k, max_tokens=5).text == completion.text
    assert llm.generate([]) == []


def test_prediction_changes_only_usage(llm):
    options = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True, "n": 2}
    plain = llm.chat(MESSAGES, **options)
    assert plain.usage.accepted_tokens == plain.usage.rejected_tokens == 0
    for content in (plain.text, [{"type": "text", "text": plain.text}], "the lazy dog", ""):
        predicted_answer = llm.chat(MESSAGES, prediction={"type": "content", "content": content}, **options)
        assert [completion.text for completion in predicted_answer.completions] == [
            completion.text for completion in plain.completions
        ]
        usage = predicted_answer.usage
        predicted = llm.model.text_pipeline.tokenizer.encode(content if isinstance(content, str) else plain.text, False)
        assert usage.accepted_tokens + usage.rejected_tokens == 2 * len(predicted)
    for wrong in ({"content": 5}, {"type": "other", "content": "a"}, {"type": "content"}, "text"):
        with pytest.raises(ParleyError, match="prediction"):
            llm.chat(MESSAGES, prediction=wrong)


def test_keys_of_logit_bias_may_be_integers(llm):
    (token,) = llm.generate("the quick", max_tokens=1, logit_bias={7: 100}, return_token_ids=True).completions[0].tokens
    assert token.id == 7
    with pytest.raises(ParleyError, match="token ids"):
        llm.generate("the quick", logit_bias={7.5: 1})


def test_logprob_token_ids_return_logprobs_of_named_tokens(llm):
    options = {"max_tokens": 6, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    every = llm.generate("the quick brown", logprobs=-1, **options).completions[0]
    named = llm.generate("the quick brown", logprobs=2, logprob_token_ids=[300, 5, every.tokens[1].id], **options)
    assert named.completions[0].text == every.text
    for token, whole in zip(named.completions[0].tokens, every.tokens, strict=True):
        ids = list(dict.fromkeys([token.id, 300, 5, every.tokens[1].id]))
        known = {top_token.id: top_token.logprob for top_token in whole.top_tokens} | {token.id: whole.logprob}
        assert [(top_token.id, top_token.logprob) for top_token in token.top_tokens] == [
            (token_id, known[token_id]) for token_id in ids
        ]
        assert (token.id, token.logprob, token.rank) == (whole.id, whole.logprob, whole.rank)
    with pytest.raises(ParleyError, match="vocabulary"):
        llm.generate("a", logprobs=1, logprob_token_ids=[10**6])
    with pytest.raises(ParleyError, match=r"logprob_token_ids.*use_beam_search"):
        llm.generate("a", logprobs=1, logprob_token_ids=[5], use_beam_search=True, n=2)


def test_embed_returns_vectors_in_order_equal_to_single_calls(llm):
    texts = ["the quick brown fox", "jumps", "the quick brown fox"]
    first, second, third = llm.embed(texts)
    assert first == third != second and [second] == llm.embed(["jumps"]) and len(first) == 64
    assert math.isclose(sum(x * x for x in llm.embed([[5, 6, 7]], dimensions=16)[0]), 1, rel_tol=1e-5)
    assert len(llm.embed(["the quick brown fox " * 2000], truncate_prompt_tokens=-1)) == 1
    assert llm.embed([]) == []
    assert asyncio.run(llm.aembed(texts)) == [first, second, third]
    with pytest.raises(ParleyError, match="no option 'dimension'"):
        llm.embed(texts, dimension=16)


def test_stream_joins_to_answer_and_closing_it_frees_pages(llm):
    whole = llm.chat(MESSAGES, max_tokens=20, temperature=0)
    assert "".join(llm.stream(MESSAGES, max_tokens=20, temperature=0)) == whole.text
    pieces = llm.stream(MESSAGES, max_tokens=1500, temperature=0, ignore_eos=True)
    next(pieces)
    pieces.close()
    llm.generate("x", max_tokens=1)
    assert used_blocks(llm) == 0


def test_echo_returns_prompt_and_output_logprobs(llm):
    answer = llm.generate("the quick brown fox", echo=True, logprobs=2, max_tokens=2, temperature=0)
    assert answer.prompt[0].logprob is None and all(token.logprob <= 0 for token in answer.prompt[1:])
    for token in answer.completions[0].tokens:
        assert token.logprob == token.top_tokens[0].logprob and token.rank == 1 and len(token.top_tokens) == 2
        assert math.isfinite(token.logprob)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temprature": 1}, "'temperature'"),
        ({"temperature": -1}, "at least 0"),
        ({"max_tokens": 10**6}, "context"),
        ({"logit_bias": {"100000": 1}}, "vocabulary"),
        ({"n": 0}, "at least 1"),
    ],
)
def test_generate_refuses_invalid_option_with_reason(llm, options, named):
    with pytest.raises(ParleyError, match=named):
        llm.generate("x", **options)


def test_async_methods_run_in_callers_event_loop(llm):
    async def scenario() -> None:
        alone = llm.chat(MESSAGES, max_tokens=8, temperature=0).text
        answers = await asyncio.gather(*(llm.achat(MESSAGES, max_tokens=8, temperature=0) for _ in range(5)))
        assert {answer.text for answer in answers} == {alone}
        assert (await llm.agenerate("x", max_tokens=1)).usage.completion_tokens == 1
        assert "".join([piece async for piece in llm.astream(MESSAGES, max_tokens=8, temperature=0)]) == alone
        doomed = asyncio.ensure_future(llm.achat(MESSAGES, max_tokens=1500, temperature=0, ignore_eos=True))
        await asyncio.sleep(0.2)
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)

    asyncio.run(scenario())
    llm.generate("x", max_tokens=1)
    assert used_blocks(llm) == 0


def test_threads_share_one_llm(llm):
    alone = llm.generate("the quick", max_tokens=8, temperature=0).text
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: llm.generate("the quick", max_tokens=8, temperature=0).text, range(16))
    assert set(answers) == {alone}


def test_llm_raises_for_missing_or_broken_model(tmp_path):
    with pytest.raises(ModelMissing, match="no such folder"):
        LLM(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text((tiny_models.model_folder("qwen3") / "tokenizer.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0broken!!")
    with pytest.raises(EngineFailed):
        LLM(str(tmp_path))


def test_a_draft_model_may_be_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_files.write_folder(tmp_path / "folder", "llama")
    file = gguf_files.write_gguf(tmp_path / "model.gguf", folder)
    with LLM(str(file), speculate=f"draft={file}", threads=1, kv_memory=8 << 20) as drafting:
        assert drafting.generate("the quick brown", max_tokens=12, temperature=0, ignore_eos=True)
        assert sum(drafting.model.engine.stats.draft_accepted) > 0
    with pytest.raises(ModelMissing, match=r"The draft model .*nothing cannot be used: there is no such folder"):
        LLM(str(folder), speculate=f"draft={tmp_path / 'nothing'}")


async def test_a_server_finds_the_folders_of_model_and_draft_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_files.write_folder(tmp_path / "folder", "llama")
    file = gguf_files.write_gguf(tmp_path / "model.gguf", folder)
    settings = ParleySettings(model=str(folder), speculate=f"draft={file}")
    await ServedModel(("m",), settings, ThreadEngine(settings), ServerOptions()).fetch_weights()
    assert settings.draft_model is not None and (Path(settings.draft_model) / "config.json").is_file()


def test_engine_process_gives_same_answer(llm):
    with LLM(str(tiny_models.model_folder("qwen3")), in_process=False, threads=1, kv_memory=8 << 20) as other:
        theirs, ours = (model.chat(MESSAGES, max_tokens=12, temperature=0) for model in (other, llm))
        assert theirs.completions == ours.completions
        closed_stream, open_stream = (other.stream(MESSAGES, max_tokens=1500, ignore_eos=True) for _ in range(2))
        assert next(closed_stream) and next(open_stream)
        other.close()
    closed_stream.close()  # as the garbage collector does
    with pytest.raises(RuntimeError, match="closed"):
        next(open_stream)
    with pytest.raises(RuntimeError, match="closed"):
        other.generate("x")
