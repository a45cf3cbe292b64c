"""The Transformers backend: any causal language model of Transformers as a ``DecoderNetwork``, attention replaced.

Transformers allows a model's attention to be replaced by name. This replacement writes keys and values into the KV
pages and attends there, on a packed batch: batch dimension 1, explicit positions, no Transformers cache and no masks.
Everything else (norms, experts, scalings, the head) is the model's own code and needs no support here. A model that
keeps state other than keys and values cannot be served this way; the numeric check (``load/proof.py``) detects that.

Weights come from safetensors, and code shipped in a model folder is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as noise

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.load.proof import deviation
from parley.model.load.reference import TOLERANCE
from parley.model.networks.network import Batch, Pages, Place
from parley.native.layout import LayerKV

ATTENTION = "parley"  # Transformers' name for ``transformers_attention``
UNTOLD = -1  # the layer's code passed no sliding window
KINDS = {"full_attention", "sliding_attention"}  # the layer_types that KV pages support

Attend = Callable[..., torch.Tensor]  # (layer_idx, queries, keys, values, scale=, window=, softcap=, sinks=)

_attend: ContextVar[Attend] = ContextVar("attend")
_hidden: ContextVar[torch.Tensor | None] = ContextVar("hidden", default=None)
_adapted: ContextVar[native.Adapted | None] = ContextVar("adapted", default=None)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = UNTOLD,
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
    output = _attend.get()(
        layer,
        *(part[0].transpose(0, 1) for part in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_window(module, layer) if sliding_window == UNTOLD else sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


def _window(module: nn.Module, layer: int) -> int | None:
    """Return the sliding window of a layer whose code leaves it to the mask, None for full attention."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if kinds is None or kinds[layer] == "sliding_attention" else None


AttentionInterface.register(ATTENTION, attend)


class Foreign:
    """A Transformers model as ``network.DecoderNetwork``."""

    def __init__(self, model: PreTrainedModel, linears: Mapping[str, Place], parameters: int, weights_bytes: int):
        self.model = model
        self.linears = linears
        self.device = model.device
        self.parameters = parameters
        self.weights_bytes = weights_bytes
        self._body = model.get_decoder()
        self._compute = self._body.forward
        self._body.forward = self._forward
        self._entered = False
        self.layers: list[LayerKV] = []
        self._places: dict[int, int] = {}  # layer_idx -> index in ``layers``
        self.vocab_size = self._explore()

    def hidden(self, batch: Batch, pages: Pages) -> torch.Tensor:
        """Return final hidden states [T, hidden]; write keys and values of all T tokens to the pages."""

        def over_pages(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any
        ) -> torch.Tensor:
            place = self._places[layer]
            pages.write(place, keys, values, batch)
            return pages.attend(place, queries, batch, **how)

        with _using(_attend, over_pages), _using(_adapted, batch.adapted):
            output = self._body(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the given hidden rows: float32 [rows, vocab_size]. The head is all code after the body."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
        with _using(_hidden, hidden):
            return self.model(input_ids=ids, use_cache=False).logits[0].float()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body; if only the head is wanted, return the hidden states that already exist."""
        hidden = _hidden.get()
        if hidden is not None:
            return _Output(last_hidden_state=hidden[None])
        self._entered = True
        return self._compute(*args, **kwargs)

    @torch.inference_mode()
    def _explore(self) -> int:
        """Run one token to see which layers attend and what they cache. Return the vocabulary size."""

        def look(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **_: Any) -> torch.Tensor:
            if layer in self._places:
                raise LoadError(f"Layer {layer} of the model attends twice, which is not supported.")
            self._places[layer] = len(self.layers)
            self.layers.append(LayerKV(keys.shape[1], keys.shape[2], values.shape[2]))
            return values.repeat_interleave(queries.shape[1] // values.shape[1], 1)

        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with _using(_attend, look):
            output = self.model(input_ids=token, position_ids=token, use_cache=False)
        if self._body is self.model or not self._entered:
            raise LoadError("The model has no part that returns hidden states, so it cannot run over pages.")
        if not self.layers:
            raise LoadError("The model's attention cannot be replaced, so it cannot run over pages.")
        return output.logits.shape[-1]


class _Output(BaseModelOutputWithPast):
    """A body's return value, for heads that also read attributes which only training sets."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def load_foreign(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None], max_len: int
) -> Foreign:
    """Load a model folder for contexts of at most ``max_len`` tokens and check it numerically. Raises LoadError."""
    checkpoint = Checkpoint(folder)  # reports faulty files in clearer words than Transformers
    config = _config(folder)
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",  # a loop over experts, so that a row's sums do not depend on other rows
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise LoadError(f"Transformers cannot load this {config.model_type} model: {_line(error)}") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise LoadError(f"The checkpoint has no tensor {missing[0]} ({len(missing)} missing in all).")
    del checkpoint
    progress(0.6)
    model = model.to(device).eval().requires_grad_(False)
    sizes = [(parameter.numel(), parameter.nbytes) for parameter in model.parameters()]
    try:
        _settle(model, max_len)
        linears = _pack(model)
        progress(0.8)
        model.set_attn_implementation(ATTENTION)
        network = Foreign(model, linears, *map(sum, zip(*sizes, strict=True)))
        off = deviation(network, network.model)
    except (LoadError, MemoryError):
        raise
    except Exception as error:
        raise LoadError(f"A {config.model_type} model does not run on packed batches: {_line(error)}") from error
    if not off <= TOLERANCE[dtype]:
        raise LoadError(
            f"A {config.model_type} model gives different results over pages (off by {off:.2g}); "
            "it may keep state other than keys and values, and is not served."
        )
    progress(1.0)
    return network


def _config(folder: Path) -> PreTrainedConfig:
    """Return the config if it describes a decoder that KV pages support. Raises LoadError."""
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # config classes raise all kinds of exceptions
        if "auto_map" in read_config(folder):
            raise LoadError("The model needs code of its own, but code from model folders is never run.") from error
        raise LoadError(f"Transformers does not understand the model's config.json: {_line(error)}") from error
    kind = config.model_type
    if config.is_encoder_decoder:
        raise LoadError(f"A {kind} model is an encoder-decoder; only decoders can be served.")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise LoadError(f"Transformers has no causal language model for {kind}.")
    odd = set(getattr(config.get_text_config(), "layer_types", None) or ()) - KINDS
    if odd:
        raise LoadError(f"A {kind} model has layers of kind {min(odd)}, which keep more than keys and values.")
    return config


def _settle(model: PreTrainedModel, max_len: int) -> None:
    """Fix rotary embeddings that choose their frequencies by the longest sequence in the batch.

    They keep the frequencies chosen for a sequence of ``max_len`` tokens.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any("dynamic" in each or each == "longrope" for each in kind.values()):
            raise LoadError("The model's rotary embedding depends on length and layer, which is not supported.")
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            module(torch.zeros(1, device=model.device), torch.tensor([[max_len - 1]], device=model.device))
            module.rope_type = "default"  # type: ignore[assignment]  # freezes the frequencies


def _pack(model: PreTrainedModel) -> dict[str, Place]:
    """Move the linear layers to the native kernels; afterwards the modules hold no weights of their own.

    Returns the layers that LoRA adapters may change: those that every token of a batch passes in place. Experts are
    left out, as they see only some tokens, and so is the head, which runs for few.
    """
    places: dict[str, Place] = {}
    body = {id(module) for module in model.get_decoder().modules()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            weight = module.weight
        elif type(module) is Conv1D:
            weight = module.weight.t()
        else:
            continue
        packed = native.pack(weight, module.bias)
        if id(module) in body and "expert" not in name:
            place = places[name] = Place(len(places), 0, *weight.shape)
            module.forward = partial(_linear, packed=packed, site=place.site)  # type: ignore[method-assign]
        else:
            module.forward = partial(native.linear, packed=packed)  # type: ignore[method-assign]
        module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return places


def _linear(x: torch.Tensor, *, packed: native.Packed, site: int) -> torch.Tensor:
    """Apply one linear layer and add the LoRA adapters' share."""
    y = native.linear(x, packed)
    adapted = _adapted.get()
    if adapted is not None:
        adapted.add(x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), site)
    return y


@contextmanager
def _using(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' progress bars and advice."""
    level, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
    noise.set_verbosity_error()
    noise.disable_progress_bar()
    try:
        yield
    finally:
        noise.set_verbosity(level)
        if bars:
            noise.enable_progress_bar()


def _line(error: Exception) -> str:
    """Return an error's message as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
