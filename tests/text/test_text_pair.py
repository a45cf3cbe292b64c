"""Pairs of texts have the tokens, types and truncation of the tokenizers library."""

import pytest
from support import tiny_models
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from parley.errors import ContextLength
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.text_pipeline import TextPipeline
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import PoolingOptions, TextPair, TextPrompt

POOLING = PoolingOptions(task="classify")
BERT_PAIR = ("<|im_start|> $A <|im_end|>", "<|im_start|>:0 $A:0 <|im_end|>:0 $B:1 <|im_end|>:1")
ROBERTA_PAIR = (BERT_PAIR[0], "<|im_start|> $A <|im_end|> <|im_end|> $B <|im_end|>")
SENTENCES = ["The quick brown fox", "jumps", "over the lazy dog, then rests beside the river while the sun goes down."]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_models.write_tokenizer(folder)
    return str(folder / "tokenizer.json")


def read_backend(file, templates):
    backend = Backend.from_file(file)
    if templates is not None:
        special = [(token, backend.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")]
        backend.post_processor = processors.TemplateProcessing(
            single=templates[0], pair=templates[1], special_tokens=special
        )
    return backend


def make_pipeline(backend):
    return TextPipeline(Tokenizer(backend), ChatTemplate({}, {}))


def type_start(types):
    return types.index(1) if 1 in types else 0


@pytest.mark.parametrize("templates", [BERT_PAIR, ROBERTA_PAIR, None])
@pytest.mark.parametrize("special", [True, False])
def test_pairs_are_joined_and_cut_as_by_the_library(file, templates, special):
    pipeline = make_pipeline(read_backend(file, templates))
    for first in SENTENCES:
        for second in SENTENCES:
            pair = TextPair(TextPrompt(first, special), TextPrompt(second, special))
            for cut in (None, 6, 11, 12, 20, 400):
                for keep, direction in (("head", "right"), ("tail", "left")):
                    backend = read_backend(file, templates)
                    if cut is not None:
                        backend.enable_truncation(cut, direction=direction)
                    (expected,) = backend.encode_batch([(first, second)], add_special_tokens=special)
                    prepared = pipeline.prepare_prompt(pair, 4096, cut, keep, pooling=POOLING)
                    assert prepared.token_ids == expected.ids
                    assert prepared.second_text_start == type_start(expected.type_ids)


def test_texts_of_a_pair_are_limited_separately(file):
    pipeline = make_pipeline(read_backend(file, BERT_PAIR))
    first, second = (pipeline.tokenizer.encode(text, add_special_tokens=False) for text in (SENTENCES[2], SENTENCES[0]))
    pair = TextPair(TextPrompt(SENTENCES[2], max_tokens=5), TextPrompt(SENTENCES[0], max_tokens=2))
    ids = pipeline.prepare_prompt(pair, pooling=POOLING).token_ids
    assert len(ids) == 5 + 2 + 3 and ids[1:6] == first[:5] and ids[7:9] == second[:2]


PAIR_TEMPLATE = (
    "<|im_start|>{% for each in messages if each.role == 'query' %}Q {{ each.content }}{% endfor %}"
    "{% for each in messages if each['role'] == \"document\" %} D {{ each.content }}{% endfor %}<|im_end|>answer"
)


def test_a_template_of_a_reranker_writes_the_pair(file):
    tokenizer = Tokenizer(read_backend(file, None))
    pipeline = TextPipeline(tokenizer, ChatTemplate({"default": PAIR_TEMPLATE}, {}))
    pair = TextPair(TextPrompt(SENTENCES[0]), TextPrompt(SENTENCES[2]))
    ids = pipeline.prepare_prompt(pair, 4096, pooling=POOLING).token_ids
    assert tokenizer.decode(ids, skip_special=False) == (
        f"<|im_start|>Q {SENTENCES[0]} D {SENTENCES[2]}<|im_end|>answer"
    )
    cut = pipeline.prepare_prompt(pair, 4096, len(ids) - 3, "head", pooling=POOLING).token_ids
    text = tokenizer.decode(cut, skip_special=False)
    assert len(cut) <= len(ids) - 3 and text.endswith("<|im_end|>answer") and f"Q {SENTENCES[0]} D The" not in text
    assert text.startswith(f"<|im_start|>Q {SENTENCES[0]} D over")
    limited = TextPair(TextPrompt(SENTENCES[0], max_tokens=1), TextPrompt(SENTENCES[2], max_tokens=1))
    assert len(pipeline.prepare_prompt(limited, 4096, pooling=POOLING).token_ids) < len(ids) - 5
    with pytest.raises(ContextLength):
        pipeline.prepare_prompt(TextPair(TextPrompt("a"), TextPrompt("b " * 300_000)), 100, pooling=POOLING)


def test_a_pair_that_is_far_too_long_is_refused_before_it_is_read(file):
    pair = TextPair(TextPrompt("a"), TextPrompt("b " * 300_000))
    with pytest.raises(ContextLength, match="over 200"):
        make_pipeline(read_backend(file, BERT_PAIR)).prepare_prompt(pair, 100, pooling=POOLING)
