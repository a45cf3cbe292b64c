"""The Transformers backend: any causal language model of Transformers as a ``DecoderNetwork``, attention replaced.

Transformers allows a model's attention to be replaced by name. This replacement writes keys and values into the KV
pages and attends there, on a packed batch: batch dimension 1, explicit positions, no Transformers cache and no masks.
Everything else (norms, experts, scalings, the head) is the model's own code and needs no support here. A model that
keeps state other than keys and values cannot be served this way; the numeric check at load detects that.

Weights come from safetensors, and code shipped in a model folder is never run.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from parley import native
from parley.heartbeat import beat
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.load.logit_scale import scale_forgotten_logits
from parley.model.load.numeric_check.decoder_check import DECODER_TOLERANCE
from parley.model.load.numeric_check.transformers_check import body_of, transformers_deviation
from parley.model.load.padded_weights import pad_products
from parley.model.media.encoder import encoder_parts
from parley.model.networks.network import KVPages, LinearSite, PackedBatch
from parley.native.layout import LayerKV
from parley.text.media_family import read_media_family

ATTENTION_NAME = "parley"  # Transformers' name for ``transformers_attention``
WINDOW_UNKNOWN = -1  # the layer's code passed no sliding window
PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}  # the layer_types that KV pages support
STATELESS_LAYER_TYPES = {"chunked_attention"}  # those that keep no more, but which no kernel computes
# A model's first one counts. The last one has decoders too: those of the Flamingo models for sound.
WRITER_MAPPINGS = (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

AttendFunction = Callable[..., torch.Tensor]  # (layer_idx, queries, keys, values, scale=, window=, softcap=, sinks=)

_current_attend: ContextVar[AttendFunction] = ContextVar("attend")
_known_hidden: ContextVar[torch.Tensor | None] = ContextVar("hidden", default=None)
_current_long_rope: ContextVar[torch.Tensor | None] = ContextVar("long_rope", default=None)
_current_adapted: ContextVar[native.LoraRows | None] = ContextVar("adapted", default=None)


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


def _configured_window(module: nn.Module, layer: int) -> int | None:
    """Return the sliding window of a layer whose code leaves it to the mask, None for full attention."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if kinds is None or kinds[layer] == "sliding_attention" else None


AttentionInterface.register(ATTENTION_NAME, transformers_attention)


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
        self._body = body_of(model)
        self._body_forward = self._body.forward
        self._body.forward = self._forward_or_skip
        self._body_ran = False
        self.layers: list[LayerKV] = []
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
            _context_value(_current_adapted, batch.adapted),
            _context_value(_current_long_rope, batch.long_rope),
        ):
            output = self._body(**self._body_inputs(batch), use_cache=False)
        result: torch.Tensor = output.last_hidden_state[0]
        return result

    def _body_inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the body for a batch, by name."""
        axes = batch.rope_positions  # [3, T], and [3, 1, T] for Transformers
        inputs: dict[str, Any] = {"position_ids": batch.positions[None] if axes is None else axes[:, None]}
        media = batch.media
        if media is None:
            return inputs | {"input_ids": batch.token_ids[None]}
        token_ids = batch.token_ids.index_fill(0, media.tokens, 0)  # placeholders may lie beyond the table
        embeddings = self._body.get_input_embeddings()(token_ids)
        inputs["inputs_embeds"] = embeddings.index_copy(0, media.tokens, media.embeddings)[None]
        if media.deepstack:
            is_media = torch.zeros_like(token_ids, dtype=torch.bool)
            is_media[media.tokens] = True
            order = media.tokens.argsort()
            inputs |= {
                "visual_pos_masks": is_media[None],
                "deepstack_visual_embeds": [row[order] for row in media.deepstack],
            }
        return inputs

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
            self._layer_indices[layer] = len(self.layers)
            self.layers.append(LayerKV(keys.shape[1], keys.shape[2], values.shape[2]))
            return values.repeat_interleave(queries.shape[1] // values.shape[1], 1)

        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with _context_value(_current_attend, record_layer):
            output = self.model(input_ids=token, position_ids=token, use_cache=False)
        if self._body is self.model or not self._body_ran:
            raise LoadError("The model has no part that returns hidden states, so it cannot run over pages.")
        if not self.layers and getattr(self.model, "_is_stateful", False):
            raise LoadError(
                f"A {self.model.config.model_type} model keeps a state of each sequence in place of keys and values, "
                "which is not supported."
            )
        if not self.layers:
            raise LoadError("The model's attention cannot be replaced, so it cannot run over pages.")
        result: int = output.logits.shape[-1]
        return result


class _BodyOutput(BaseModelOutputWithPast):
    """A body's return value, for heads that also read attributes which only training sets."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def load_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None], max_len: int
) -> TransformersNetwork:
    """Load a model folder for contexts of at most ``max_len`` tokens and check it numerically. Raises LoadError."""
    checkpoint = Checkpoint(folder)  # reports faulty files in clearer words than Transformers
    config = read_supported_config(folder)

    def load_weights(model_class: Any, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
        return loaded

    model = read_model(config, load_weights)
    del checkpoint
    progress(0.6)
    try:
        model.to(device)  # type: ignore[arg-type]
        network = build_network(model.requires_grad_(False), max_len)
        progress(0.8)
        family = read_media_family(config.to_dict())
        relative_error = transformers_deviation(network, model, None if family and family.needs_fused else family)
    except (LoadError, MemoryError):
        raise
    except Exception as error:
        raise LoadError(f"A {config.model_type} model does not run on packed batches: {one_line(error)}") from error
    if not relative_error <= DECODER_TOLERANCE[dtype]:
        raise LoadError(
            f"A {config.model_type} model gives different results over pages (off by {relative_error:.2g}); "
            "it may keep state other than keys and values, and is not served."
        )
    progress(1.0)
    return network


def read_model(
    config: PreTrainedConfig, load: Callable[..., tuple[PreTrainedModel, dict[str, Any]]]
) -> PreTrainedModel:
    """Return the model that ``load`` makes of an Auto class and options, with Transformers' loading info.

    Raises LoadError if Transformers cannot load it, or if tensors are missing.
    """
    with silence_transformers():
        try:
            model, info = load(
                _model_class(config),
                attn_implementation="eager",
                experts_implementation="eager",  # a loop over experts, so that a row's sums do not depend on other rows
            )
        except MemoryError:
            raise
        except Exception as error:
            reason = one_line(error)
            if "ignore_mismatched_sizes" in reason:  # it means a table that it has written to its log
                reason = "its tensors do not have the sizes that config.json gives."
            raise LoadError(f"Transformers cannot load this {config.model_type} model: {reason}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise LoadError(f"The checkpoint has no tensor {missing[0]} ({len(missing)} missing in all).")
    return model


def build_network(model: PreTrainedModel, max_len: int) -> TransformersNetwork:
    """Return a model as a network, with its attention and linear layers replaced. Raises LoadError."""
    _refuse_uncounted_tokens(model)
    scale_forgotten_logits(model)
    sizes = [(parameter.numel(), parameter.nbytes) for parameter in model.eval().parameters()]
    long_rope_after = _fix_rope(model, max_len)
    linears = _pack_modules(model)
    body_of(model).set_attn_implementation(ATTENTION_NAME)  # encoders of a multimodal model keep theirs
    parameters, weights_bytes = map(sum, zip(*sizes, strict=True))
    return TransformersNetwork(model, linears, parameters, weights_bytes, long_rope_after)


def _model_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class that loads a model. Of a multimodal model, only the language model runs."""
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForSeq2SeqLM


def read_supported_config(folder: Path) -> PreTrainedConfig:
    """Return the config if it describes a decoder that KV pages support. Raises LoadError."""
    try:
        with silence_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # config classes raise all kinds of exceptions
        content = read_config(folder)
        if "auto_map" in content:
            raise LoadError("The model needs code of its own, but code from model folders is never run.") from error
        if content["model_type"] not in CONFIG_MAPPING:
            raise LoadError(
                f"Transformers {transformers.__version__} does not know the model type {content['model_type']}."
            ) from error
        raise LoadError(f"Transformers does not understand the model's config.json: {one_line(error)}") from error
    kind = config.model_type
    if config.is_encoder_decoder:
        raise LoadError(f"A {kind} model is an encoder-decoder; only decoders can be served.")
    if all(type(config) not in mapping for mapping in WRITER_MAPPINGS):
        raise LoadError(
            f"Transformers {transformers.__version__} has no {kind} model that generates text; only such models and "
            "encoders of BERT's family can be served."
        )
    # Models of BERT's kind have both fields; other configs have the first one without a meaning.
    if getattr(config, "is_decoder", True) is False and hasattr(config, "add_cross_attention"):
        raise LoadError(
            f"A {kind} model whose config does not set is_decoder reads in both directions and writes nothing."
        )
    unsupported = set(getattr(config.get_text_config(), "layer_types", None) or ()) - PAGED_LAYER_TYPES
    if unsupported:
        layer_kind = min(unsupported)
        reason = "are not computed here" if layer_kind in STATELESS_LAYER_TYPES else "keep more than keys and values"
        raise LoadError(f"A {kind} model has layers of kind {layer_kind}, which {reason}.")
    result: PreTrainedConfig = config
    return result


def _refuse_uncounted_tokens(model: PreTrainedModel) -> None:
    """Raise LoadError for embeddings as RoBERTa's: the position of a token depends on how many before it pad."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise LoadError(
            f"A {model.config.model_type} model gives positions only to tokens that do not pad, which is not supported."
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
    every token of a batch passes in place. Experts are left out, as they see only some tokens, and so is the head,
    which runs for few. Encoders of pictures and sound stay as they are (``media/encoder.py``).
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
    """Whether the code of the module that holds a linear layer reads the layer's weight itself, as LongCat's router."""
    parent, _, own = name.rpartition(".")
    module_class: Any = type(model.get_submodule(parent))
    return f"self.{own}.weight" in _read_source(module_class)


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
    adapted = _current_adapted.get()
    if adapted is not None:
        adapted.add_lora(x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), site)
    return y


@contextmanager
def _context_value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence Transformers' progress bars and advice, and torch's about the layers of an empty language model."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors", UserWarning)
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def one_line(error: Exception) -> str:
    """Return an error's message as one line of about 200 characters at most: whole sentences of it, or else words."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > 200:
        sentences, words = (text[:200].rpartition(end)[0] for end in (". ", " "))
        text = sentences or f"{words or text[:200]} (shortened)"
    return text if text.endswith((".", ")")) else text + "."
