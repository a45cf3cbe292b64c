"""Encoders and embedding models in GGUF files: the names of their tensors, and what Hugging Face's configs call them.

For llama.cpp, BERT, RoBERTa and XLM-RoBERTa are one architecture; the tokenizer shows which one a file has. Encoders
compute in float32, so their weights are dequantized.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import Architecture, fields_of
from parley.gguf.gemma_architectures import GEMMA_LAYER_NAMES
from parley.gguf.header import GgufError, GgufModel

POSITIONS = "position_embd.weight"
PADDING_POSITIONS = 2  # rows before the first position, which RoBERTa has and its files leave out
SEQUENCE_CLASSIFIER = "ForSequenceClassification"
CLASSIFIER_OUTPUT = "cls.output.weight"
# Linear layers after the pooling: their names in files, and their folders in the format of sentence-transformers
DENSE_FOLDERS = {"dense_2": "2_Dense", "dense_3": "3_Dense"}
MAX_LABELS = 1 << 17
EMBEDDING_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}
BERT_NAMES = EMBEDDING_NAMES | {
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
BERT_LAYER_NAMES = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
NOMIC_LAYER_NAMES = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
# Of nomic-embed-text-v2. The converter leaves the bias of mixtures out.
NOMIC_MIXTURE_LAYER_NAMES = NOMIC_LAYER_NAMES | {
    "ffn_up": "mlp.fc1",
    "ffn_gate_inp": "mlp.router.layer",
    "ffn_up_exps.weight": "mlp.experts.mlp.w1",
    "ffn_down_exps.weight": "mlp.experts.mlp.w2",
}
JINA_LAYER_NAMES = NOMIC_LAYER_NAMES | {
    "attn_qkv": "mixer.Wqkv",
    "attn_output": "mixer.out_proj",
    "ffn_up": "mlp.fc1",
}
# Of jina-embeddings-v2. In early files, both halves of gated layers are apart
JINA_V2_LAYER_NAMES = BERT_LAYER_NAMES | {
    "attn_q_norm": "attention.self.layer_norm_q",
    "attn_k_norm": "attention.self.layer_norm_k",
    "attn_norm_2": "layer_norm_1",
    "ffn_up": "mlp.gated_layers",
    "ffn_down": "mlp.wo",
    "layer_output_norm": "mlp.layernorm",
}
JINA_V2_SPLIT_NAMES = {"ffn_gate": "mlp.gated_layers_w", "ffn_up": "mlp.gated_layers_v"}
# Of jina-embeddings-v2-base-code, whose layers have one norm more and activate the second half
JINA_CODE_NAMES = {"ffn_up": "mlp.up_gated_layer", "ffn_down": "mlp.down_layer", "layer_output_norm": "layer_norm_2"}
MODERN_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}


def _complete_encoder(model: GgufModel, config: dict[str, Any]) -> None:
    """Remove ``quantization_config``, because the numbers are plain, and set the number of token types."""
    del config["quantization_config"]
    types = model.tensors.get("token_types.weight")
    config["type_vocab_size"] = 0 if types is None else types.shape[0]


def complete_bert(model: GgufModel, config: dict[str, Any]) -> None:
    """Add how many positions there are. Raises GgufError if the file does not show it, and for classifiers of BERT."""
    _complete_encoder(model, config)
    if POSITIONS not in model.tensors:
        raise GgufError(f"{model.paths[0].name} has no tensor {POSITIONS}")
    config["max_position_embeddings"] = model.tensors[POSITIONS].shape[0]
    if config["model_type"] != "bert":
        config["max_position_embeddings"] += PADDING_POSITIONS
        _complete_classifier(model, config)
    elif any(name.startswith("cls.") for name in model.tensors):
        # llama.cpp's converter leaves a layer out that scores depend on
        raise GgufError(f"{model.paths[0].name} is a classifier of the kind BERT, which is not read from GGUF")


def _complete_classifier(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the classes of a reranker, or another classifier. Raises GgufError if their names do not fit."""
    output = model.tensors.get(CLASSIFIER_OUTPUT)
    if output is None:
        return
    labels = fields_of(model).get("classifier.output_labels") or [
        f"LABEL_{number}" for number in range(output.shape[0])
    ]
    are_texts = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not are_texts or len(labels) != output.shape[0] or len(labels) > MAX_LABELS:
        raise GgufError(
            f"{model.paths[0].name} gives classifier.output_labels as {reprlib.repr(labels)}, for {output.shape[0]} "
            "classes"
        )
    config["architectures"] = [config["architectures"][0].removesuffix("Model") + SEQUENCE_CLASSIFIER]
    config["id2label"] = {str(number): label for number, label in enumerate(labels)}


def complete_modern_bert(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the window of local layers, and which layers are global ones. Raises GgufError if they are impossible."""
    _complete_encoder(model, config)
    fields, file = fields_of(model), model.paths[0].name
    every = fields.get("attention.sliding_window_pattern", 3)
    if not isinstance(every, list):  # a list says of each layer whether it has a window, as layer_types do
        if type(every) is not int or every < 1:
            raise GgufError(f"{file} gives attention.sliding_window_pattern as {reprlib.repr(every)}; it is 1 or more")
        config["global_attn_every_n_layers"] = every
    activation = fields.get("hidden_act", "gelu")
    if not isinstance(activation, str):
        raise GgufError(f"{file} gives hidden_act as {reprlib.repr(activation)}; it is a text")
    config["hidden_activation"] = activation
    config["norm_bias"] = "output_norm.bias" in model.tensors
    if any(name.startswith("cls.") for name in model.tensors):
        raise GgufError(f"{file} is a classifier of the kind ModernBERT, which is not read from GGUF")


BERT = Architecture(
    "bert",
    "BertModel",
    BERT_LAYER_NAMES,
    layer_prefix="encoder.layer.",
    model_names=BERT_NAMES,
    is_encoder=True,
    complete=complete_bert,
    fields={"hidden_act": "gelu"},
)
ROBERTA = replace(
    BERT,
    model_type="roberta",
    class_name="RobertaModel",
    fields={"hidden_act": "gelu", "pad_token_id": PADDING_POSITIONS - 1},
)
XLM_ROBERTA = replace(ROBERTA, model_type="xlm-roberta", class_name="XLMRobertaModel")


def bert_variant(model: GgufModel) -> Architecture | None:
    """Return the row of RoBERTa or XLM-RoBERTa, by the kind of tokenizer."""
    tokenizer = model.metadata.get("tokenizer.ggml.model")
    return {"gpt2": ROBERTA, "t5": XLM_ROBERTA}.get(tokenizer) if isinstance(tokenizer, str) else None


JINA_V2 = replace(
    BERT,
    class_name="JinaBertModel",
    layer_names=JINA_V2_LAYER_NAMES,
    complete=_complete_encoder,
    fields={"hidden_act": "gelu", "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
)


def jina_variant(model: GgufModel) -> Architecture:
    """Return the row for the form of a file's layers. Raises GgufError for classifiers."""
    if any(name.startswith("cls.") for name in model.tensors):
        raise GgufError(f"{model.paths[0].name} is a classifier of the kind JinaBERT, which is not read from GGUF")
    names = JINA_V2_LAYER_NAMES
    if "blk.0.attn_norm_2.weight" in model.tensors:
        names = names | JINA_CODE_NAMES
    if "blk.0.ffn_gate.weight" in model.tensors:
        names = names | JINA_V2_SPLIT_NAMES
    return replace(JINA_V2, layer_names=names)


NOMIC_BERT = Architecture(
    "nomic_bert",
    "NomicBertModel",
    NOMIC_LAYER_NAMES,
    layer_prefix="encoder.layers.",
    model_names=EMBEDDING_NAMES | {"token_embd_norm": "emb_ln"},
    is_encoder=True,
    complete=_complete_encoder,
    fields={"hidden_act": "silu"},
)
NOMIC_BERT_MOE = replace(
    NOMIC_BERT,
    layer_names=NOMIC_MIXTURE_LAYER_NAMES,
    keys={"moe_every_n_layers": "moe_every_n_layers", "expert_used_count": "moe_top_k"},
    fields={"hidden_act": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True},
)
ENCODERS = {
    "bert": replace(BERT, variant=bert_variant),
    "nomic-bert": NOMIC_BERT,
    "nomic-bert-moe": replace(NOMIC_BERT_MOE, mixture=NOMIC_BERT_MOE),
    "jina-bert-v2": replace(JINA_V2, variant=jina_variant),
    "jina-bert-v3": replace(
        NOMIC_BERT,
        model_type="jina_embeddings_v3",
        class_name="JinaEmbeddingsV3Model",
        layer_names=JINA_LAYER_NAMES,
        fields={"hidden_act": "gelu"},
    ),
    "modern-bert": Architecture(
        "modernbert",
        "ModernBertModel",
        MODERN_LAYER_NAMES,
        layer_prefix="layers.",
        model_names={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
        },
        is_encoder=True,
        keys={
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
        },
        complete=complete_modern_bert,
        bias_layer="attn_qkv",
    ),
    "gemma-embedding": Architecture(
        "gemma3_text",
        "Gemma3TextModel",
        GEMMA_LAYER_NAMES,
        norm_offset=1.0,
        fields={"use_bidirectional_attention": True},
        model_names={stem: f"{folder}.linear" for stem, folder in DENSE_FOLDERS.items()},
    ),
    "eurobert": Architecture("eurobert", "EuroBertModel"),
}
