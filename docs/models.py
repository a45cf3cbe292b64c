"""Writes docs/models.md from the table of decoders and the zoo of the tests: ``python docs/models.py``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("models.md")

INTRODUCTION = """\
# Models and files

<!-- Made by docs/models.py from parley/model/networks/families/table.py and tests/support/model_zoo; change it
there. -->

`model_type` in config.json decides how a model runs. `architectures` is not read, except for the heads of encoders.

Everything on this page is in the zoo of `tests/model/test_model_zoo.py`: {count} small random checkpoints in the forms
that are published. Each is either served, and its greedy answers and log-probabilities are compared with those of
Transformers in float32, or refused with one sentence. `parley doctor` gives the same result in advance. `make
test-nightly` tests all of them.

| | parley's own decoder | Transformers' code |
|---|---|---|
| kernels | everything is compiled | linear layers and attention are compiled |
| quantized files, GGUF | yes | no |
| `--quantization int8`, `int4` | yes | no |
| tools, reasoning, `response_format` | by the chat template: [families](families.md) | the same |
| LoRA adapters | yes, but not of experts, indexers, nor of `kv_b_proj` | yes, but not of experts |
| separate prefill and decode | yes | yes |
| drafts, prefix cache, embeddings, log-probabilities | yes | yes |

With both, the bits of an answer do not depend on the requests that share its steps.

Models with layers that keep a state (`lfm2`, `lfm2_moe`, `lfm3`, `qwen3_next`, `qwen3_5_text`, `qwen3_5_moe_text`,
`olmo_hybrid`, `kimi_linear`, `bailing_hybrid`, `minimax`, `granitemoehybrid`, `bamba`, `falcon_h1`, `mamba`,
`falcon_mamba`, `jamba`, `mamba2`, `nemotron_h`) run on parley's own decoder only. Memory holds the states of all
running sequences, and further states for the prefix cache, for drafts and for handovers between instances
(`--state-cache`). If all of them would take more than half of the KV cache's share, fewer sequences run at once than
`--max-batch` allows. A prefix is found up to the last page end whose state is cached. As an instance with a role, such
a model runs on the CPU only, without `--kv-staging`.

Models whose indexers choose the tokens that attention reads (`deepseek_v32`, `glm_moe_dsa`, `axk2`, `hy_v4`,
`minimax_m3_vl_text`) keep one more key for each token and indexer, and pages have room for it. While a context has no
more than `index_topk` tokens, attention reads all of them with the usual kernels. Beyond that, torch's operators score
and choose tokens, and the kernels read only these. Indexers of `minimax_m3_vl_text` choose blocks of tokens instead,
for each key/value head by itself, where a context has more than `index_topk_blocks` blocks. Roundings can change which
tokens are chosen, so in long contexts bfloat16 differs more from float32 than in other models, as in Transformers.
`--quantization` applies to the linear layers of indexers, but not to the weights of their heads; `--kv-dtype int8` does
not apply to their keys. Layers that predict further tokens are left out.

`deepseek_v4` attends to a window of tokens and to entries that stand for several tokens each. Pages hold the keys of
tokens, the entries, and the rows that entries are made of, which are 3 to 8 times as many numbers as the keys; so any
position can be continued, shared or handed over. A token's attention reads copies of what it sees. Torch's operators
make and choose entries. Files may have experts in FP8 or MXFP4, as published. `--kv-dtype int8` applies to the keys of
tokens alone.

## On parley's own decoder

A model runs on parley's own kernels if its `model_type` is one of these and they can compute everything in its config.
Language models of multimodal models count as well. All other decoders run Transformers' own code, over parley's KV
pages; the log and `parley doctor` say why.

The last column lists the quantized forms that the zoo has for a type. Every type accepts all forms of safetensors in
which each expert has its own tensors. Tensors that hold all experts may be plain, FP8 with `NAME_scale_inv`, MXFP4, or
those of torchao or MLX. Layers of one file may have different forms. If layers are computed as one and no kernel reads
their forms together, they are kept as plain numbers, which take more memory.
"""
MLX = """\

## Folders of MLX

Folders of mlx-lm and mlx-vlm are read directly: integers of 1 to 8 bits with scales and biases in float16 or bfloat16,
mxfp4, mxfp8 and nvfp4, and plain weights. Integers of 5 to 8 bits take 8 in memory, those of 4 and less take 4. The
weights of a router, and of the layer that makes keys and values of latents, are decoded to the dtype of the model.
Image encoders are left out, so these models read text only.

Falcon-H1 is refused, because MLX multiplies factors of the config into its weights. Encoders are refused, and so are
the names that MLX gives to the tensors of other families, and weights whose bits or groups the config does not name.

The logits of a Llama converted by mlx-lm 0.32 equal those that mlx-lm computes, within 1.1e-5. Those of a DeepSeek-V3
are within 2.6e-5 of Transformers'. mlx-lm reads the rotary embedding of DeepSeek from `rope_scaling` only, as the
published configs have it, and ignores the `rope_parameters` that Transformers 5 writes.
"""
GGUF = """\

## GGUF files

These values of `general.architecture` are read:
{gguf}.
All others are refused, those of llama.cpp with the reason (`parley/gguf/refused_architectures.py`).

Architectures that the zoo does not list are compared with the folders that they were made from, in
`tests/model/test_gguf_*.py`. Layers that predict further tokens are left out. Files of `minimax-m3` by early converters
lack the indexers, so tokens attend to all before them.

Embedding models give the vectors of their folders (`tests/model/test_gguf_encoders.py`). Their pooling is that of the
file, and vectors have length 1, as llama.cpp makes them, unless the file says that they have not. `bert` is also
RoBERTa, XLM-RoBERTa and DistilBERT, and rerankers of the first two. Encoders compute in float32, so their blocks
become numbers. llama.cpp's converter leaves out the bias of mixtures of `nomic-bert-moe`, so vectors differ a little
from those of the folder, as they do there. A file does not have the prompts of a model, such as `search_query: `; write
them before the texts. If a file does not say whether its WordPiece tokenizer changes capitals and accents, the
vocabulary shows it.

Images and audio need llama.cpp's second file, `mmproj-*.gguf`, with the encoder. It is found if it is the only such
file beside the model, `--mmproj FILE` names it, and of a model on the hub it is downloaded with it (the one that
llama.cpp would take). These values of its `clip.projector_type` are read:
{projectors}.
With any other the model reads text only, and a warning says why (`parley/gguf/projectors/refused_projectors.py`);
one that `--mmproj` names is an error then. Images have the sizes of the published processors where the file does not
say them, and Qwen's models and Gemma 4 read videos as well. Embeddings of tiny models are those of the folders that
they were made from (`tests/model/test_*projectors.py`). Gemma's token for an image, which its files lack, takes the id
of the last `<unused…>` token, and LLaVA's that of the last reserved token, or of `<unk>`, which no text has.

* `pixtral` is Pixtral, and Mistral Small 3.1 and later; `idefics3` is SmolVLM as well, which reads no videos from GGUF.
* `internvl` reads videos if the vocabulary has `<video>`, or a token without use that can become it.
* `gemma4v` reads images and videos, and with `gemma4a` beside it, in the small models, audio. `gemma4uv` and `gemma4ua`
  are Gemma 4 12B. Images of the large ones see both ways, which files do not say. Files have softplus of some numbers
  of the audio encoder, so these may differ from the folder's in the last bit.
* `glm4v` is GLM-4.1V, 4.5V, 4.6V and GLM-OCR. The frames of videos have the times that GLM-4.6V's processor writes.
* `mlp` is LLaVA 1.5 and 1.6, and models with CLIP made as they are; other encoders of this kind, such as Moondream's
  and Granite Vision's, are refused. LLaVA 1.5 gets images padded to squares, as its own config and llama.cpp do it.
* `kimik25` reads images, and no videos.
* `janus_pro` reads images; the part of Janus that makes images is in no file. `exaone4_5` reads images and videos.
* `granite_speech` is Granite Speech and its Plus models. Files have the batch norms of the encoder as other numbers,
  which round otherwise. An adapter, as that of Granite Speech 3.3, is a file of its own (`--lora`).
* `qwen2.5o` (Qwen2.5-Omni) reads images, videos and audio, and writes text.
* `qwen3vl_merger` with `qwen3a` beside it is Qwen3-Omni, which reads images, videos and audio, and writes text.
  `qwen3a` alone is Qwen3-ASR.
* `minicpmv4_6` and `minicpmv4_7` are MiniCPM-V 4.6 and 4.7, with images and videos.
* `qwen2a`, `voxtral` and `musicflamingo` (Audio Flamingo 3) read audio.
* Whether a message may have media depends on the chat template in the model's file, which has to write their marks.

The kernels read the integers of the file, without rounding. Q2_K, Q4_0, Q4_1, Q5_1, Q8_0 and IQ4_NL take as many bits
in memory as in the file. The others take about 0.1 more for each number (Q4_K 4.6, Q5_K 5.6, Q6_K 6.6, Q3_K 3.6, IQ4_XS
4.4), MXFP4 4.5 instead of 4.25, and Q5_0 6 instead of 5.5. Types of fewer bits take more than in the file: IQ1_S,
IQ1_M, IQ2_XXS, IQ2_XS and IQ2_S 4.6, IQ3_XXS and IQ3_S 4.4, NVFP4 5, TQ1_0 and TQ2_0 2.1, Q1_0 2.25 and Q2_0 2.5 (of
Bonsai, in blocks of 64 or 128 numbers). So a mix of IQ1 and IQ2, such as Unsloth's `UD-IQ2_M`, needs more memory than
its size. Weights in NVFP4 with a scale of the whole become plain numbers; experts with such scales are refused.
Queries, keys and values, or gate and up, keep their own types, as in Q4_K_M. Rows of the embedding are decoded when
they are needed.

* GPT-OSS uses the rotary embedding of its config, whose blend of frequencies begins and ends between two dimensions.
  llama.cpp rounds both ends, so its numbers differ a little.
* `internlm2`, `xverse`, `baichuan` (7B), `exaone` and `pangu-embedded` compute what Llama computes, and `llama-embed`
  the same in both directions; `qwen` (the first Qwen) what Qwen 2, `minicpm` what Granite, `orion` what StableLM,
  `chatglm` what GLM-4, `codeshell` what StarCoder2, `bailingmoe` (Ling) what Granite's mixtures, and `bailingmoe2`
  (Ling 2) what GLM-4.5 computes. Their configs have these types.
* `phimoe` chooses experts as its own code does (SparseMixer), and its long rotary embedding has the published scale;
  llama.cpp takes the largest scores, and the scale of Phi-3's formula.
* `starcoder2` has the window of 4,096 tokens of the published models, which files do not say; llama.cpp has none.
* `stablelm` with norms of queries, or without a norm before its MLPs (StableLM 2 12B), is refused, and so are `olmo`
  and `olmoe` whose queries, keys and values are clamped.
* `maincoder` computes what Hunyuan does, and `hunyuan_vl` (HunyuanOCR) as well: it reads text only. `deepseek2-ocr` is
  the language model of DeepSeek-OCR, for text only, and computes what DeepSeekMoE does. `plm` is PLM.
* `granite_swa` is Granite with windows, dense or a mixture. Shared experts whose gates and ups are one tensor are
  refused.
* `flex-olmo` is FlexOlmo; llama.cpp has not settled this name yet.
* `deepseek` is DeepSeekMoE (DeepSeek's first mixture of experts).
* `deepseek2` is DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash and Youtu. A file of V3 or R1 may lack the number of
  groups of experts; it gets the 8 groups of the published models, where llama.cpp uses none. DeepSeek-V2 ranks its
  groups by their best expert, as its own code does; llama.cpp ranks them by the best two.
* `deepseek32` (DeepSeek-V3.2) and `glm-dsa` (GLM-5) choose the tokens that attention reads, as their own code does.
  Layers of GLM-5 use the tokens of an earlier layer where the file says so (`attention.indexer.types`) or lacks the
  tensors of their indexer. Files of GLM-5.2 and later that do neither get the published choice, as in llama.cpp.
* `mistral4` is Mistral 4, `cohere2moe` Command A+, and `laguna` Laguna.
* `deci` is Llama-Nemotron 49B, 51B and 253B, and DeciLM 7B, as are the folders of `nemotron-nas` and `deci`. A linear
  layer in place of attention, as in the 51B, keeps nothing of a sequence. In place of an MLP it is refused.
* `step35` is Step 3.5 and 3.7. Layers without a window rotate half of a head, and have the scaled rotary embedding of
  the published models if there is one, as files do not say it.
* `nemotron_h_moe` is Nemotron 3. The experts of Super and Ultra read latents of their input.
* `kolibri1` and `kolibri` are Kolibri 1, which llama.cpp does not know yet; its ports have these two names for it.
* `mimo2` is MiMo-V2-Flash; queries, keys and values may be one tensor, as in MiMo-V2.5. Values are scaled as published
  in files that do not say it. Its window has one token more than in llama.cpp, as in Transformers.
* `kimi-linear` is Kimi Linear, with keys and values of latents in one layer or two, and `bailingmoe3` Ling 3; files
  that limit the gates of its experts are refused.
* `smallthinker` has the windows and rotary embeddings of the published models, which files do not list.
* `bitnet` computes SiLU, as in llama.cpp. Microsoft's files for its own bitnet.cpp are refused; its folders are read.
* `qwen35` and `qwen35moe` have the value heads of gated delta nets in another order than folders; reading restores it.
  Where there are more value heads than key heads, `ssm_out` in a type whose blocks hold numbers of several heads (K
  types and IQ4_XS, with heads of 128) becomes plain numbers of the model's dtype.
"""
OTHERS = """\

## Through Transformers

The zoo has these models. Other decoders of Transformers are served as well if they keep only keys and values. Their
numbers are checked at load.
"""
ENCODERS = """\

## Encoders

Encoders make vectors, and score texts if they have a head for that. They run on plain weights in float32. `gte` and
`nomic_bert` are also read in their publishers' form (`new`, and GPT-2's names of sizes), without the publishers' code.
A `nomic_bert` may have mixtures of experts, as nomic-embed-text-v2-moe.
`jina_embeddings_v3` is read as Transformers writes it, without its adapters for tasks. A `bert` with positions of the
kind `alibi` is jina-embeddings-v2, in both published forms, without the publishers' code. `eurobert` runs on parley's
own decoder, as do the decoders of the next section.
"""
SPARSE_MODELS = """\

## Sparse embedding models

The vectors of SPLADE models have a number for each token of the vocabulary, most of them 0. A folder of
sentence-transformers is such a model if its modules.json lists MLMTransformer (or Transformer) and SpladePooling. The
strategies are `max` and `sum`, the activations `relu` and `log1p_relu`. Other masked language models become one by
`--hf-overrides '{"architectures": ["BertSpladeSparseEmbeddingModel"]}'`, which is vLLM's name. A folder with Router,
which has one model for queries and another one for documents, is not supported.
"""
LATE_MODELS = """\

## Late-interaction models

ColBERT models make a vector of each token, by linear layers after the encoder, and none of a whole text. Three forms
are read: that of ColBERT's authors (`linear.weight` beside the encoder's weights, and `ColBERT` in the architecture's
name, as in `HF_ColBERT`), that of PyLate (modules.json lists Transformer and Dense), and that of sentence-transformers'
MultiVectorEncoder (MultiVectorMask and Normalize follow). `/pooling` returns the vectors; `/rerank` and `/score`
compare texts by them. Texts are read as they are, as in vLLM: without marks for queries and documents, without tokens
that fill up a query, and with all tokens of a document, punctuation too.
"""
WHOLE_TEXTS = """\

## Decoders that only make vectors or classes

These generate nothing. They need parley's own decoder, run in the dtype and with the quantized weights of other
decoders, and have no LoRA adapters, drafts or prefix cache.

* Decoders that read in both directions: EmbeddingGemma (`gemma3_text` with `use_bidirectional_attention`),
  EmbeddingGemma 2 (`embedding_gemma2`; texts only), gte-Qwen2 and others with `"is_causal": false`, EuroBERT, and the
  type `llama_bidirec`. Without a pooling of sentence-transformers, their vectors are the mean of all tokens, unless
  `pooling` of `llama_bidirec` says otherwise.
* Decoders whose modules.json asks for another pooling than that of the last token, or for linear layers after it.
* Decoders with modules.json whose head is neither in the files nor tied to the embedding, as e5-mistral.
* Decoders with a head for sequence classification (`Qwen3ForSequenceClassification` and the like). It reads the last
  token that is not `pad_token_id`, as in Transformers.
* Rerankers whose scores are the logits of tokens, with vLLM's members in config.json, which `--hf-overrides` can set:
  `classifier_from_token`, and `method` (`from_2_way_softmax`, `no_post_processing`) or `is_original_qwen3_reranker`.
  The template that `--chat-template` names may write the two texts, as messages of the roles `query` and `document`:

      parley serve Qwen/Qwen3-Reranker-0.6B --chat-template qwen3_reranker.jinja --hf-overrides \\
        '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
          "is_original_qwen3_reranker": true}'

Of all models, modules.json may list Transformer, Pooling, Dense and Normalize, in this order. The weights of Dense must
be in safetensors.
"""
FILES = """\

## Other forms of files

In addition to plain safetensors, in one file or several, in bfloat16, float16 or float32:
"""
REFUSALS = """\

## Refused

| Model | The error contains |
|---|---|
"""


def gguf_architectures() -> str:
    """Return the architectures of GGUF files that are read, as lines of a page."""
    from parley.gguf.architectures import ARCHITECTURES

    return textwrap.fill(", ".join(f"`{name}`" for name in ARCHITECTURES), 110, break_on_hyphens=False)


def gguf_projectors() -> str:
    """Return the kinds of encoders in GGUF files that are read."""
    from parley.gguf.projectors.table import PROJECTORS

    return textwrap.fill(", ".join(f"`{name}`" for name in PROJECTORS), 110, break_on_hyphens=False)


def models_page() -> str:
    """Return the text of the page."""
    from support.model_zoo.file_folders import ENCODERS as ENCODER_TYPES
    from support.model_zoo.zoo import ZOO
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from parley.model.load.text_encoders.sparse import MASKED_HEADS
    from parley.model.networks.families.table import FUSABLE_TYPES

    served = [folder for folder in ZOO.values() if not folder.refusal]
    lines = [
        INTRODUCTION.format(count=len(ZOO)),
        "| `model_type` | Architecture | Quantized forms in the zoo |",
    ]
    lines.append("|---|---|---|")
    for kind in sorted(FUSABLE_TYPES):
        forms = _join(folder.files for folder in served if folder.model_type == kind and folder.is_quantized)
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        is_own = kind not in CONFIG_MAPPING_NAMES  # unknown to Transformers
        origin = "published with code of its own, which is not run" if is_own else "in a multimodal model"
        lines.append(f"| `{kind}` | {f'`{name}`' if name else origin} | {forms} |")
    lines += [MLX.rstrip(), GGUF.format(gguf=gguf_architectures(), projectors=gguf_projectors()).rstrip()]
    lines += [OTHERS, "| `model_type` | Architecture |", "|---|---|"]
    others = {folder.model_type for folder in served} - FUSABLE_TYPES - set(ENCODER_TYPES)
    lines += [f"| `{kind}` | `{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)}` |" for kind in sorted(others)]
    lines += [ENCODERS, _join(f"`{kind}`" for kind in ENCODER_TYPES)]
    lines += [SPARSE_MODELS, _join(f"`{kind}`" for kind in MASKED_HEADS), LATE_MODELS.rstrip(), WHOLE_TEXTS.rstrip()]
    plain = ("bfloat16", "float16", "float32", "safetensors")
    other_forms = [folder.files for folder in served if not folder.is_quantized and folder.files not in plain]
    lines += [FILES, *(f"* {form}" for form in dict.fromkeys(other_forms))]
    refused = [folder for folder in ZOO.values() if folder.refusal]
    rows = (f"| {folder.name.removeprefix('refused: ')} | {folder.refusal} |" for folder in refused)
    return "\n".join(lines) + "\n" + REFUSALS + "\n".join(rows) + "\n"


def _join(words: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(words))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    PAGE.write_text(models_page(), "utf-8")
