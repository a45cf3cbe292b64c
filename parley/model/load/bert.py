"""Loads BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and MPNet, and checks each loaded encoder numerically.

The families differ in tensor names and in how they encode positions. A config that asks for anything else is refused,
never guessed at. The numeric check runs a plain float32 forward pass, written from the definitions (BERT: arXiv
1810.04805; MPNet's relative positions: arXiv 1910.10683, section 2.1), one text at a time, on the unmerged weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.networks.encoder import GELU, RELU, TANH, Encoder, Form, Layer, Linear, Norm, Texts

WORDS, PLACES, TYPES = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
ACTIVATIONS = {"gelu": GELU, "relu": RELU, "gelu_new": TANH, "gelu_pytorch_tanh": TANH}
FARTHEST = 128  # relative distances from here on share the last bucket

PROBE = (17, 5)  # lengths in tokens of the numeric check's two texts
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}  # relative error (L2) of the hidden states


@dataclass(frozen=True)
class Names:
    """A family's tensor names within a layer. ``first_position``: a text's first, None: one past the padding id."""

    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    bias: str = "encoder.relative_attention_bias.weight"
    first: int | None = 0


BERT = Names()
ROBERTA = Names(first=None)
DISTILBERT = Names(
    layer="transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    norm="output_layer_norm",
)
MPNET = Names(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    first=2,
)
FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": DISTILBERT,
    "mpnet": MPNET,
}
SYNONYMS = {"dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers", "activation": "hidden_act"}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
}


def is_encoder(config: dict[str, Any]) -> bool:
    """True if the config names one of these encoders, not a model that generates."""
    return config["model_type"] in FAMILIES and not config.get("is_decoder")


def read_form(config: dict[str, Any]) -> Form:
    """Read the encoder's sizes from the content of config.json. Raises LoadError."""
    kind = config["model_type"]
    names = [str(name) for name in config.get("architectures") or ()]
    if headed := [name for name in names if "Classification" in name or "QuestionAnswering" in name]:
        raise LoadError(f"A {headed[0]} is not an embedding model.")
    if config.get("position_embedding_type") not in (None, "absolute"):
        raise LoadError(f"A {kind} model with positions of kind {config['position_embedding_type']} is not supported.")
    own = {SYNONYMS.get(name, name): value for name, value in config.items()}
    got: dict[str, Any] = DEFAULTS | {name: own[name] for name in DEFAULTS if own.get(name) is not None}
    if got["hidden_act"] not in ACTIVATIONS:
        raise LoadError(f"A {kind} model with the activation {got['hidden_act']} is not supported.")
    sizes = {name: value for name, value in got.items() if isinstance(DEFAULTS[name], int)}
    wrong = [name for name, value in sizes.items() if type(value) is not int or value < (name != "pad_token_id")]
    if wrong or type(own.get("vocab_size")) is not int or got["hidden_size"] % got["num_attention_heads"]:
        raise LoadError(f"config.json has no valid {(wrong or ['vocab_size'])[0]} for a {kind} model.")
    first = FAMILIES[kind].first
    form = Form(
        vocab=own["vocab_size"],
        hidden=got["hidden_size"],
        intermediate=got["intermediate_size"],
        heads=got["num_attention_heads"],
        layers=got["num_hidden_layers"],
        eps=float(got["layer_norm_eps"]),
        positions=got["max_position_embeddings"],
        first=got["pad_token_id"] + 1 if first is None else first,
        activation=ACTIVATIONS[got["hidden_act"]],
        buckets=got["relative_attention_num_buckets"] if kind == "mpnet" else 0,
    )
    if form.longest < 1:
        raise LoadError(f"config.json has {form.positions} positions, too few for a {kind} model.")
    return form


class Weights:
    """Reads a checkpoint's tensors by a family's names, whatever prefix the names carry. Raises LoadError."""

    def __init__(self, checkpoint: Checkpoint, form: Form, names: Names, dtype: torch.dtype, device: torch.device):
        self.checkpoint, self.form, self.names = checkpoint, form, names
        self.dtype, self.device = dtype, device
        found = [name for name in checkpoint.names if name.endswith(WORDS)]
        self.before = found[0].removesuffix(WORDS) if found else ""

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of one tensor in this object's dtype and on its device; ``shape`` is the expected shape."""
        whole = self.before + name
        if whole not in self.checkpoint:  # BERT's first release has these names
            whole = whole.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return self.checkpoint.tensor(whole, *shape).to(device=self.device, dtype=self.dtype, copy=True)

    def affine(self, name: str, out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [out, width] and bias [out] of one linear layer."""
        return self.read(f"{name}.weight", out, width), self.read(f"{name}.bias", out)

    def norm(self, name: str) -> Norm:
        """Return one LayerNorm."""
        return Norm(self.read(f"{name}.weight", self.form.hidden), self.read(f"{name}.bias", self.form.hidden))

    def places(self) -> torch.Tensor:
        """Return position embeddings [max_length, hidden], with the embedding of token type 0 added."""
        form = self.form
        places = self.read(PLACES, form.positions, form.hidden)[form.first :]
        if self.before + TYPES not in self.checkpoint:
            return places
        types = self.checkpoint.shape(self.before + TYPES)
        return places + self.read(TYPES, *types)[0]

    def linear(self, layer: int, *names: str, out: int, width: int) -> Linear:
        """Return several linear layers concatenated into one, [len(names) * out, width]."""
        parts = [self.affine(self.names.layer.format(layer) + name, out, width) for name in names]
        return Linear(torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))

    def layer(self, i: int) -> Layer:
        """Return encoder layer ``layer`` with query, key and value merged."""
        names, hidden, wide = self.names, self.form.hidden, self.form.intermediate
        before = names.layer.format(i)
        return Layer(
            qkv=self.linear(i, names.query, names.key, names.value, out=hidden, width=hidden),
            output=self.linear(i, names.output, out=hidden, width=hidden),
            attention_norm=self.norm(before + names.attention_norm),
            up=self.linear(i, names.up, out=wide, width=hidden),
            down=self.linear(i, names.down, out=hidden, width=wide),
            norm=self.norm(before + names.norm),
        )

    def bias(self) -> torch.Tensor | None:
        """Return the relative position bias of the attention scores, [heads, max_length, max_length], or None."""
        if not self.form.buckets:
            return None
        table = self.read(self.names.bias, self.form.buckets, self.form.heads)
        ways = torch.arange(1 - self.form.longest, self.form.longest)
        by_way = table[torch.tensor([bucket(int(way), self.form.buckets) for way in ways])].T  # [heads, ways]
        places = torch.arange(self.form.longest)
        return by_way[:, places - places[:, None] + self.form.longest - 1].contiguous()


def bucket(way: int, buckets: int) -> int:
    """Return the bucket, below ``buckets``, of a relative distance.

    Near distances have a bucket each; far ones share ever wider buckets. The upper half is for later tokens.
    """
    half = buckets // 2
    exact, distance = half // 2, abs(way)
    if distance >= exact:
        steps = torch.log(torch.tensor(distance).float() / exact) / math.log(FARTHEST / exact) * (half - exact)
        distance = min(exact + int(steps), half - 1)
    return distance + half * (way > 0)


def load_encoder(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> Encoder:
    """Load the encoder and check it numerically. Raises LoadError."""
    form = read_form(config)
    weights = Weights(checkpoint, form, FAMILIES[config["model_type"]], dtype, device)
    last = weights.before + weights.names.layer.format(form.layers - 1) + weights.names.query + ".weight"
    if last not in checkpoint:  # checked before work is planned per layer: a config may claim a million layers
        raise LoadError(f"The checkpoint has no tensor {last}, but the config asks for {form.layers} layers.")
    layers = []
    for i in range(form.layers):
        layers.append(weights.layer(i))
        progress((i + 1) / form.layers)
    words = weights.read(WORDS, form.vocab, form.hidden)
    encoder = Encoder(form, words, weights.places(), weights.norm("embeddings.LayerNorm"), layers, weights.bias())
    off = deviation(encoder, checkpoint, weights.names)
    if not off <= TOLERANCE[dtype]:
        raise LoadError(f"The encoder failed its numeric check (off by {off:.2g}) and is not used.")
    return encoder


@torch.inference_mode()
def deviation(encoder: Encoder, checkpoint: Checkpoint, names: Names) -> float:
    """Return the relative error (L2) of the hidden states of two texts packed together, against ``encode_plainly``."""
    form = encoder.form
    ids = torch.linspace(0, form.vocab - 1, sum(PROBE)).long()
    texts = [text.tolist()[: form.longest] for text in ids.split(PROBE)]
    plain = Weights(checkpoint, form, names, torch.float32, torch.device("cpu"))
    expected = torch.cat([reference(plain, text) for text in texts])
    got = encoder.hidden(Texts(texts, encoder.device)).float().cpu()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def reference(weights: Weights, text: list[int]) -> torch.Tensor:
    """Compute the hidden states of one text by the definitions: float32 [tokens, hidden]."""
    form, names = weights.form, weights.names
    count, dim = len(text), form.hidden // form.heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        both = weights.norm(name)
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + form.eps).sqrt() * both.weight + both.bias

    def project(x: torch.Tensor, name: str, out: int) -> torch.Tensor:
        weight, bias = weights.affine(name, out, x.shape[-1])
        return x @ weight.T + bias

    def act(x: torch.Tensor) -> torch.Tensor:
        if form.activation == RELU:
            return x.clamp_min(0)
        if form.activation == TANH:
            return F.gelu(x, approximate="tanh")
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    words = weights.checkpoint.tensor(weights.before + WORDS, form.vocab, form.hidden)
    x = words[text].float() + weights.places()[:count]
    x = norm(x, "embeddings.LayerNorm")
    bias = weights.bias()
    for i in range(form.layers):
        before = names.layer.format(i)
        parts = [project(x, before + name, form.hidden) for name in (names.query, names.key, names.value)]
        q, k, v = (part.view(count, form.heads, dim) for part in parts)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
        if bias is not None:
            scores = scores + bias[:, :count, :count]
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, form.hidden)
        x = norm(x + project(attended, before + names.output, form.hidden), before + names.attention_norm)
        wide = act(project(x, before + names.up, form.intermediate))
        x = norm(x + project(wide, before + names.down, form.hidden), before + names.norm)
    return x
