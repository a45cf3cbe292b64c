"""Indexers that choose blocks of tokens (MiniMax-M3): their choice, attention over it, published files and refusals.

``test_decoder_families`` compares their logits with Transformers', ``test_exact`` their bits in all schedules.
"""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner
from transformers import AutoConfig, AutoModelForImageTextToText

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.indexed_attention import plan_rows
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.rope import Unfusable
from parley.native import indexer
from parley.native.layer_shape import BlockIndexerShape
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages

CPU = torch.device("cpu")
TEXT_TYPE, TEXT_FIELDS = tiny_models.MIXTURES["minimax_m3"]


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled_pool(layer: LayerKV, length: int, *, int8: bool = False, dtype: torch.dtype = torch.float32) -> LayerPages:
    """Return pages with random keys and values of ``length`` tokens, and the zero page."""
    page_format = native.choose_page_format(layer, dtype, CPU, int8=int8)
    pages = torch.zeros(-(-length // PAGE_SIZE) + 1, *page_format.shape, dtype=page_format.dtype)
    pool, slots = LayerPages(pages, page_format), torch.arange(length)
    keys, values = (random_tensor(length, layer.heads, dim, seed=dim, dtype=dtype) for dim in (layer.dim, 40))
    native.write_kv(keys, values[..., : layer.value_dim], pool, native.write_indices(slots, page_format))
    return pool


def attend_rows(queries: torch.Tensor, pages: LayerPages, spans: list[RowSpan]) -> torch.Tensor:
    """Return the attention of queries [T, heads, dim] to the tokens that ``spans`` give them."""
    return native.attend(queries, pages, plan_rows(spans, queries, pages), scale=0.2)


def blocks_by_definition(scores: torch.Tensor, shape: BlockIndexerShape) -> list[int]:
    """Return the blocks that a head chooses, by the scores of the tokens that its row sees."""
    best = [float(part.max()) for part in scores.split(shape.block_size)]
    best[-shape.local_blocks :] = [float("inf")] * shape.local_blocks
    order = sorted(range(len(best)), key=lambda block: (-best[block], block))
    return sorted(order[: shape.top_k])


@pytest.mark.parametrize(("block_size", "local_blocks"), [(16, 1), (48, 2), (128, 1)])
def test_chosen_blocks_follow_the_definition_in_every_batch(block_size, local_blocks):
    """Small whole numbers have exact scores, of which many are equal. Blocks of 48 tokens do not divide the ranges of
    keys that are scored at once."""
    shape = BlockIndexerShape(2, 24, 4, block_size, local_blocks, 8)
    length, rows = shape.max_unchosen + 5 * block_size + 7, 33
    pool = filled_pool(LayerKV(1, 24, 0, has_latents=True), length)
    keys = pool.data.view(-1, 24)[:length].round_()
    queries = random_tensor(rows, shape.heads, shape.dim, seed=1).round()
    scores = torch.einsum("rhd,kd->rhk", queries, keys)
    expected = [
        [blocks_by_definition(scores[row, head, : length - rows + row + 1], shape) for head in range(shape.heads)]
        for row in range(rows)
    ]
    table = list(range(-(-length // PAGE_SIZE)))
    groups = indexer.plan_choice([RowSpan(0, rows, length, table)], shape.heads, pool)
    assert indexer.choose_blocks(queries, pool, groups, shape).tolist() == expected
    alone = indexer.plan_choice([RowSpan(0, 1, length - rows + 8, table)], shape.heads, pool)
    assert indexer.choose_blocks(queries[7:8], pool, alone, shape).tolist() == expected[7:8]


def test_scores_that_are_not_numbers_are_the_lowest():
    shape = BlockIndexerShape(1, 24, 3, 16, 1, 8)
    pool = filled_pool(LayerKV(1, 24, 0, has_latents=True), 80)
    pool.data[1] = torch.nan
    pool.data[2] = -torch.inf
    groups = indexer.plan_choice([RowSpan(0, 1, 80, [0, 1, 2, 3, 4])], 1, pool)
    assert indexer.choose_blocks(torch.ones(1, 1, 24), pool, groups, shape).tolist() == [[[0, 3, 4]]]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_single_heads_has_the_bits_of_attention_of_all(dtype, int8):
    """In the compiled kernels' pages as in torch's, for a sequence of one head with all pages of the whole."""
    layer, length = LayerKV(2, 48, 40), 70
    pool = filled_pool(layer, length, int8=int8, dtype=dtype)
    queries, table = random_tensor(3, 6, 48, seed=9, dtype=dtype), [0, 1, 2, 3, 4]
    whole = attend_rows(queries, pool, [RowSpan(0, 3, length, table)])
    head_format = native.choose_page_format(LayerKV(1, 48, 40), dtype, CPU, int8=int8)
    chosen = torch.tensor(table).expand(3, 2, -1)
    head_pool, tables = indexer.split_heads(pool, head_format, chosen)
    spans = [RowSpan(row, 1, length - 2 + row // 2, pages) for row, pages in enumerate(tables.tolist())]
    split = attend_rows(queries.reshape(6, 3, 48), head_pool, spans)
    assert torch.equal(split.view(3, 6, 40), whole)


def test_published_files_have_the_logits_of_transformers(tmp_path):
    """They are of multimodal models, and have each expert and each linear layer as tensors of their own."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "minimax_m3_vl",
        text_config=TEXT_FIELDS,
        vision_config=vision | {"image_size": 56, "patch_size": 14},
        projector_hidden_size=64,
        image_token_index=5,
        video_token_index=6,
    )
    tiny_models.write_random_model(tmp_path, AutoModelForImageTextToText.from_config(config), seed=0, dtype="float32")
    tiny_models.write_tokenizer(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    runner, info = load_test_runner(tmp_path, dtype="float32")
    assert info.fused
    ids = list(range(7, 97))
    pages = PagedKV(runner.network.kv_layers, 6, torch.float32)
    pages.clear_pages(list(range(6)))
    batch = PackedBatch.pack_parts([(ids, 0, list(range(6)))], CPU)
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([ids])).logits[0]
        actual = runner.network.compute_logits(runner.network.compute_hidden(batch, pages))
    assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(("kv_dtype", "head_bytes"), [("auto", 4 * 32), ("int8", 2 * (32 + 4))])
def test_pages_hold_the_keys_of_indexers_in_the_dtype_of_the_model(kv_dtype, head_bytes):
    _, info = load_test_runner(
        tiny_models.model_folder("minimax_m3"), dtype="bfloat16", kv_dtype=kv_dtype, kv_memory=1 << 20
    )
    page_bytes = PAGE_SIZE * (3 * 2 * head_bytes + 2 * 2 * 24)  # two of three layers have indexers
    assert info.fused and info.kv_bytes == info.kv_pages * page_bytes


def test_published_configs_are_read_as_those_of_transformers():
    published = {name: value for name, value in TEXT_FIELDS.items() if not name.startswith("index_")}
    published |= {"layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 1]}
    published["sparse_attention_config"] = {
        "sparse_num_index_heads": 2, "sparse_index_dim": 24, "sparse_block_size": 16, "sparse_topk_blocks": 3,
        "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
    }  # fmt: skip
    config = read_decoder_config({"model_type": TEXT_TYPE, **published})
    assert config == read_decoder_config({"model_type": TEXT_TYPE, **TEXT_FIELDS})
    assert [shape.has_indexer for shape in config.layers] == [False, True, True]
    assert [shape.routing is None for shape in config.layers] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"index_n_heads": 4}, "choose for 4 of 2 key/value heads"),
        ({"index_head_dim": 8}, "8 numbers in a key, of which 16 turn"),
        ({"index_block_size": 24}, "blocks of 24 tokens, which fill no pages of 16"),
        ({"index_local_blocks": 0}, "index_local_blocks as 0"),
        ({"index_local_blocks": 4}, "always choose 4 of 3 blocks"),
        ({"swiglu_alpha": 2.0}, "swiglu_alpha as 2.0"),
        ({"layer_types": ["full_attention", "minimax_m3_sparse"]}, "layer_types as "),
        ({"layer_types": None, "sparse_attention_config": [1]}, "sparse_attention_config as "),
        ({"mlp_layer_types": None, "moe_layer_freq": [1]}, "moe_layer_freq as "),
        ({"mlp_layer_types": None, "moe_layer_freq": ["0"] * TEXT_FIELDS["num_hidden_layers"]}, "moe_layer_freq as "),
    ],
)
def test_configs_that_do_not_fit_have_no_fused_decoder(change, reason):
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config({"model_type": TEXT_TYPE, **TEXT_FIELDS, **change})
