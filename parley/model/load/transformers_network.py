"""A model of Transformers as a ``DecoderNetwork``, with its attention and linear layers replaced.

Transformers allows a model's attention to be replaced by name. This replacement writes keys and values into the KV
pages and attends there, on a packed batch: batch dimension 1, explicit positions, no Transformers cache and no masks.
Everything else (norms, experts, scalings, the head) is the model's own code and needs no support here. A model that
keeps state other than keys and values cannot be served this way; the numeric check at load detects that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from parley import native
from parley.heartbeat import beat
from parley.model.checkpoint.files import LoadError
from parley.model.load.logit_scale import scale_forgotten_logits
from parley.model.load.media_arguments import MediaArguments
from parley.model.load.numeric_check.transformers_check import body_of
from parley.model.load.padded_weights import pad_products
from parley.model.media.encoder import encoder_parts
from parley.model.networks.network import KVPages, LinearSite, PackedBatch
from parley.native.layout import LayerKV

ATTENTION_NAME = "parley"  # Transformers' name for ``transformers_attention``
WINDOW_UNKNOWN = -1  # the layer's code passed no sliding window

AttendFunction = Callable[..., torch.Tensor]  # (layer_idx, queries, keys, values, scale=, window=, softcap=, sinks=)

_current_attend: ContextVar[AttendFunction] = ContextVar("attend")
_known_hidden: ContextVar[torch.Tensor | None] = ContextVar("hidden", default=None)
_current_long_rope: ContextVar[torch.Tensor | None] = ContextVar("long_rope", default=None)
_current_lora_rows: ContextVar[native.LoraRows | None] = ContextVar("lora_rows", default=None)


def transformers_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = WINDOW_UNKNOWN,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Replace every attention layer: query [1, heads, T, dim] and so on -> [1, T, heads, value_dim]."""
    if other.get("is_causal") is False or other.get("position_bias") is not None:
        raise LoadError("The model's attention is not causal or has position biases, which is not supported.")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise LoadError("The model's attention layers do not carry layer numbers, so it cannot run over pages.")
    output = _current_attend.get()(
        layer,
        *(part[0].transpose(0, 1) for part in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_configured_window(module, layer) if sliding_window == WINDOW_UNKNOWN else sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, transformers_attention)


def _configured_window(module: nn.Module, layer: int) -> int | None:
    """Return the sliding window of a layer whose code leaves it to the mask, None for full attention."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if kinds is None or kinds[layer] == "sliding_attention" else None


class TransformersNetwork:
    """A Transformers model as ``network.DecoderNetwork``."""

    def __init__(
        self,
        model: PreTrainedModel,
        linears: Mapping[str, LinearSite],
        parameters: int,
        weights_bytes: int,
        long_rope_after: float = inf,
    ):
        self.model = model
        self.linears = linears
        self.device = model.device
        self.parameters = parameters
        self.weights_bytes = weights_bytes
        self._media_arguments = MediaArguments(model)
        self._body = body_of(model)
        self._body_forward = self._body.forward
        self._body.forward = self._forward_or_skip
        self._body_ran = False
        self.kv_layers: list[LayerKV] = []
        self.long_rope_after = long_rope_after
        self.state_sizes: list[int] = []
        self._layer_indices: dict[int, int] = {}  # layer_idx -> index in ``layers``
        self.vocab_size = self._probe_layers()

    def set_context_length(self, length: int) -> None:
        """Do nothing: Transformers computes angles at each step."""

    def position_bytes(self, length: int) -> int:
        """Return 0: there are no tables of positions."""
        return 0

    def compute_hidden(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Return final hidden states [T, hidden]; write keys and values of all T tokens to the pages."""

        def attend_over_pages(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any
        ) -> torch.Tensor:
            beat()
            index = self._layer_indices[layer]
            pages.write_kv(index, keys, values, batch)
            return pages.attend_pages(index, queries, batch, **how)

        with (
            _context_value(_current_attend, attend_over_pages),
            _context_value(_current_lora_rows, batch.lora_rows),
            _context_value(_current_long_rope, batch.long_rope),
        ):
            output = self._body(**self._body_inputs(batch), use_cache=False)
        result: torch.Tensor = output.last_hidden_state[0]
        return result

    def _body_inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the body for a batch, by name."""
        axes = batch.rope_positions  # [3, T], and [3, 1, T] for Transformers
        inputs = self._media_arguments.of_batch(batch)
        inputs["position_ids"] = batch.positions[None] if axes is None else axes[:, None]
        media = batch.media
        if media is None:
            return inputs | {"input_ids": batch.token_ids[None]}
        token_ids = batch.token_ids.index_fill(0, media.tokens, 0)  # placeholders may lie beyond the table
        embeddings = self._body.get_input_embeddings()(token_ids)
        return inputs | {"inputs_embeds": embeddings.index_copy(0, media.tokens, media.embeddings)[None]}

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the given hidden rows: float32 [rows, vocab_size]. The head is all code after the body."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
        with _context_value(_known_hidden, hidden):
            result: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0].float()
            return result

    def _forward_or_skip(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body; if only the head is wanted, return the hidden states that already exist."""
        hidden = _known_hidden.get()
        if hidden is not None:
            return _BodyOutput(last_hidden_state=hidden[None])
        self._body_ran = True
        return self._body_forward(*args, **kwargs)

    @torch.inference_mode()
    def _probe_layers(self) -> int:
        """Run one token to find the layers that attend, and the shapes that they cache. Return the vocabulary size."""

        def record_layer(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **_: Any
        ) -> torch.Tensor:
            if layer in self._layer_indices:
                raise LoadError(f"Layer {layer} of the model attends twice, which is not supported.")
            self._layer_indices[layer] = len(self.kv_layers)
            self.kv_layers.append(LayerKV(keys.shape[1], keys.shape[2], values.shape[2]))
            return values.repeat_interleave(queries.shape[1] // values.shape[1], 1)

        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with _context_value(_current_attend, record_layer):
            output = self.model(input_ids=token, position_ids=token, use_cache=False)
        if self._body is self.model or not self._body_ran:
            raise LoadError("The model has no part that returns hidden states, so it cannot run over pages.")
        if not self.kv_layers and getattr(self.model, "_is_stateful", False):
            raise LoadError(
                f"A {self.model.config.model_type} model keeps a state of each sequence in place of keys and values, "
                "which is not supported."
            )
        if not self.kv_layers:
            raise LoadError("The model's attention cannot be replaced, so it cannot run over pages.")
        result: int = output.logits.shape[-1]
        return result


class _BodyOutput(BaseModelOutputWithPast):
    """A body's return value, for heads that also read attributes that are set only in training."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def build_network(model: PreTrainedModel, max_len: int) -> TransformersNetwork:
    """Return a model as a network, with its attention and linear layers replaced. Raises LoadError."""
    _refuse_uncounted_tokens(model)
    _refuse_counted_positions(model)
    scale_forgotten_logits(model)
    sizes = [(parameter.numel(), parameter.nbytes) for parameter in model.eval().parameters()]
    long_rope_after = _fix_rope(model, max_len)
    linears = _pack_modules(model)
    body_of(model).set_attn_implementation(ATTENTION_NAME)  # encoders of a multimodal model keep theirs
    parameters, weights_bytes = map(sum, zip(*sizes, strict=True))
    return TransformersNetwork(model, linears, parameters, weights_bytes, long_rope_after)


def _refuse_uncounted_tokens(model: PreTrainedModel) -> None:
    """Raise LoadError for embeddings like RoBERTa's, where a token's position depends on the padding before it."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise LoadError(
            f"A {model.config.model_type} model gives positions only to tokens that do not pad, which is not supported."
        )


def _refuse_counted_positions(model: PreTrainedModel) -> None:
    """Raise LoadError for decoders that count the tokens before a step to know the positions of its tokens, as those
    made for encoder-decoders do."""
    for module in body_of(model).modules():
        if hasattr(module, "embed_positions") and "position_ids" not in inspect.signature(module.forward).parameters:
            raise LoadError(
                f"A {model.config.model_type} model counts the positions of its tokens itself, which is not supported."
            )


def _fix_rope(model: PreTrainedModel, max_len: int) -> float:
    """Fix rotary embeddings that choose their frequencies by the longest sequence in the batch.

    Dynamic ones keep the frequencies for a sequence of ``max_len`` tokens; longrope ones choose for each token. Returns
    ``DecoderNetwork.long_rope_after``.
    """
    long_rope_after = inf
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any("dynamic" in value or value == "longrope" for value in kind.values()):
            raise LoadError("The model's rotary embedding depends on length and layer, which is not supported.")
        if kind == "longrope":
            config: Any = module.config
            border = long_rope_after = int(config.rope_parameters["original_max_position_embeddings"])
            module.forward = partial(_longrope_by_token, rope=module.forward, long_rope_after=border)
        elif isinstance(kind, str) and "dynamic" in kind:
            module(torch.zeros(1, device=model.device), torch.tensor([[max_len - 1]], device=model.device))
            module.rope_type = "default"  # type: ignore[assignment]  # freezes the frequencies
    return long_rope_after


def _longrope_by_token(
    x: torch.Tensor, position_ids: torch.Tensor, *, rope: Callable[..., Any], long_rope_after: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [1, T, rotary]; tokens of long sequences have those of the long factors.

    ``rope`` is the model's own function, which uses the long factors if any position is ``long_rope_after`` or more.
    Without marked tokens no position is: a sequence of that many tokens has the positions below it.
    """
    is_long = _current_long_rope.get()
    if is_long is None:
        cos_sin: tuple[torch.Tensor, torch.Tensor] = rope(x, position_ids)
        return cos_sin
    short = rope(x, position_ids.masked_fill(is_long[None], 0))
    beyond = position_ids.new_full((1, 1), long_rope_after)
    long = [part[:, :-1] for part in rope(x, torch.cat((position_ids, beyond), 1))]
    cos, sin = (torch.where(is_long[None, :, None], *parts) for parts in zip(long, short, strict=True))
    return cos, sin


def _pack_modules(model: PreTrainedModel) -> dict[str, LinearSite]:
    """Move the linear layers to the native kernels; afterwards the modules hold no weights of their own.

    Matrices of other modules become ``PaddedWeight``. Returns the layers that LoRA adapters may change: those that
    every token of a batch passes in place. Experts are left out because they see only some tokens, and
    so is the head, which runs for few. Image and audio encoders stay as they are (``media/encoder.py``).
    """
    sites: dict[str, LinearSite] = {}
    encoders = {id(module) for part in encoder_parts(model) for module in part.modules()}
    body = {id(module) for module in body_of(model).modules()}
    for name, module in model.named_modules():
        if id(module) in encoders:
            continue
        if type(module) is nn.Linear and not _is_weight_read(model, name):
            weight = module.weight
        elif type(module) is Conv1D:
            weight = module.weight.t()
        else:
            pad_products(module)
            continue
        site = None
        if id(module) in body and "expert" not in name:
            linear_site = sites[name] = LinearSite(len(sites), 0, *weight.shape)
            site = linear_site.site
        if weight.is_meta:  # a model without weights
            continue
        packed = native.pack_weight(weight, module.bias)
        if site is None:
            module.forward = partial(native.linear, packed=packed)
        else:
            module.forward = partial(_adapted_linear, packed=packed, site=site)
        module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return sites


def _is_weight_read(model: PreTrainedModel, name: str) -> bool:
    """Whether the code of the module that holds a linear layer reads the layer's weight itself, as LongCat's router
    does."""
    parent, _, parameter_name = name.rpartition(".")
    module_class: Any = type(model.get_submodule(parent))
    return f"self.{parameter_name}.weight" in _read_source(module_class)


@cache
def _read_source(module_class: Any) -> str:
    """Return the code of a class of modules, or nothing where Python has no sources. It parses the whole file."""
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):
        return ""


def _adapted_linear(x: torch.Tensor, *, packed: native.PackedWeight, site: int) -> torch.Tensor:
    """Apply one linear layer and add the LoRA adapters' share."""
    y = native.linear(x, packed)
    lora_rows = _current_lora_rows.get()
    if lora_rows is not None:
        lora_rows.add_lora(x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), site)
    return y


@contextmanager
def _context_value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
