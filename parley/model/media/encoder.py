"""Computes the embeddings of media items with the encoders of a multimodal model of Transformers.

Each call computes one item alone, so that an item's bits depend on nothing but its features. The model can be
loaded when the first item arrives, so that text-only use costs neither time nor memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextvars import ContextVar
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from parley.model.media.feature_file import EncoderError, read_feature_file
from parley.model.media_embeddings import EncodedItem
from parley.types import MediaItem, MediaKind

LOADING_POLL = 0.02  # seconds between checks whether the model is loaded

Features = dict[str, torch.Tensor]
FeatureFunction = Callable[..., Any]


class _Pauses:
    """Calls ``between_blocks``, and records whether it has raised."""

    def __init__(self, between_blocks: Callable[[], None]):
        self.is_interrupted = False
        self._between_blocks = between_blocks

    def pause(self) -> None:
        try:
            self._between_blocks()
        except BaseException:
            self.is_interrupted = True
            raise


_current_pauses: ContextVar[_Pauses | None] = ContextVar("pauses", default=None)


def pause_encoding() -> None:
    """Let other work of the engine run, if this thread encodes an item. Raises the exception that stops the item."""
    pauses = _current_pauses.get()
    if pauses is not None:
        pauses.pause()


class TransformersEncoder:
    """``core.sequence.MediaEncoder`` with a model of Transformers, which ``load_model`` loads when it is first needed.

    Only its encoders are used, and they must have been through ``slices.optimize_encoders``. Items come one at a time,
    in any thread.
    """

    def __init__(self, load_model: Callable[[], Any], dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self._load_model = load_model
        self._loading: Future[Any] | None = None

    def load(self) -> None:
        """Load the model now. Raises LoadError."""
        self._loading = Future()
        self._loading.set_result(self._load_model())

    @torch.inference_mode()
    def encode_item(self, item: MediaItem, between_blocks: Callable[[], None]) -> EncodedItem:
        """Return the embeddings of an item. Raises EncoderError, and exceptions of ``between_blocks``."""
        if item.features is None:
            raise EncoderError(f"The {item.kind} has no processed features.")
        features = read_feature_file(item.features, item.digest, self.dtype, self.device)
        if "embeddings" in features:  # the client has computed them
            encoded = EncodedItem(features["embeddings"], list(features.get("deep_embeddings", ())))
        else:
            encoded = self._run_encoder(item, features, between_blocks)
        if len(encoded.rows) != item.embedding_count:
            raise EncoderError(
                f"The encoder gave {len(encoded.rows)} embeddings for the {item.kind}, "
                f"but its text has {item.embedding_count} placeholders."
            )
        return encoded

    def _run_encoder(self, item: MediaItem, features: Features, between_blocks: Callable[[], None]) -> EncodedItem:
        model = self._await_model(between_blocks)
        pauses = _Pauses(between_blocks)
        token = _current_pauses.set(pauses)
        try:
            return self._compute_embeddings(model, item.kind, features, item.embedding_count)
        except Exception as error:
            if isinstance(error, EncoderError) or pauses.is_interrupted:
                raise
            raise _explain_failure(error, item.kind) from error
        finally:
            _current_pauses.reset(token)

    def _compute_embeddings(self, model: Any, kind: MediaKind, features: Features, embedding_count: int) -> EncodedItem:
        function = find_feature_function(model, kind)
        features = {"embedding_count": torch.tensor(embedding_count)} | features
        output = function(**_select_arguments(function, features, kind))
        deep_features = getattr(output, "deepstack_features", None) or ()
        rows, is_real = output.pooler_output, getattr(output, "attention_mask", None)
        if is_real is not None:  # Gemma 4's processor fills up the last frames of a clip
            rows = rows[is_real]
        rows = self._join_rows(rows)
        if "placeholder_numbers" in features:  # of Ovis2: marks around and between its tiles have embeddings as well
            marks = output.visual_indicator_features
            rows = _insert_mark_rows(rows, marks.to(rows.dtype), features["placeholder_numbers"])
        is_kept = features.get(f"{kind}_compression_mask")  # of VideoLLaMA 3: without most of a frame that repeats
        if is_kept is not None:
            rows = rows[is_kept]
        return EncodedItem(rows, [self._join_rows(deep_rows) for deep_rows in deep_features])

    def _join_rows(self, parts: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
        """Return [n, hidden] of a tensor of any rank, or of one tensor for each tile or frame."""
        tensors = [parts] if isinstance(parts, torch.Tensor) else list(parts)
        return torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in tensors]).to(self.dtype)

    def _await_model(self, between_blocks: Callable[[], None]) -> Any:
        """Return the model. It is loaded in another thread, so that the engine's steps can run meanwhile."""
        if self._loading is None:
            self._loading = _run_in_thread(self._load_model)
        while not self._loading.done():
            between_blocks()
            wait([self._loading], LOADING_POLL)
        try:
            return self._loading.result()
        except Exception as error:
            self._loading = None  # the next item tries again
            raise EncoderError("The model's encoder cannot be loaded.") from error


def _insert_mark_rows(rows: torch.Tensor, mark_rows: torch.Tensor, placeholder_numbers: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [n, hidden] of an image with those of its marks.

    ``placeholder_numbers``: int64 [n], 0 where the next of ``rows`` belongs, k where row k - 1 of ``mark_rows`` does.
    """
    result = torch.cat([mark_rows[:1], mark_rows])[placeholder_numbers]
    is_image = placeholder_numbers == 0
    if int(is_image.sum()) != len(rows):
        raise EncoderError(f"The encoder gave {len(rows)} embeddings, but the image's text has other placeholders.")
    result[is_image] = rows
    return result


def encoder_parts(model: Any) -> list[nn.Module]:
    """Return the encoders of a model and the projections of their output: all parts of its body but the decoder."""
    decoder = model.get_decoder()
    if model.base_model is decoder:  # Phi-4-multimodal's has its encoders beside the embedding
        return [part for name, part in decoder.named_children() if name == "embed_tokens_extend"]
    return [part for part in model.base_model.children() if all(module is not decoder for module in part.modules())]


def encoder_blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of each encoder of a model: the elements of its longest list of modules."""
    blocks: list[nn.Module] = []
    for part in encoder_parts(model):
        lists = [list(module) for module in part.modules() if isinstance(module, nn.ModuleList)]
        if lists:
            longest = max(lists, key=len)
            blocks += longest
    return blocks


def find_feature_function(model: Any, kind: MediaKind) -> FeatureFunction:
    """Return the model's function from features to embeddings. Raises EncoderError.

    Models without one for video take its frames as images.
    """
    if model.config.model_type == "qwen2_audio":
        return lambda input_features, feature_attention_mask: _encode_qwen2_audio(
            model.base_model, input_features, feature_attention_mask
        )
    if model.config.model_type == "phi4_multimodal":
        return _phi4_function(model.base_model, kind)
    if model.config.model_type == "musicflamingo":
        return lambda input_features, input_features_mask, embedding_count: _encode_music_flamingo(
            model.base_model, input_features, input_features_mask, embedding_count
        )
    if model.config.model_type == "granite4_vision":
        return lambda pixel_values, image_sizes: _encode_granite4(model.base_model, pixel_values, image_sizes)
    if model.config.model_type == "llama4":
        return lambda pixel_values: _encode_llama4(model, pixel_values)
    if model.config.model_type == "mllama":
        return lambda pixel_values, aspect_ratio_ids, aspect_ratio_mask: _encode_mllama(
            model.base_model, pixel_values, aspect_ratio_ids, aspect_ratio_mask
        )
    if model.config.model_type == "gemma3n" and kind == "audio":
        return lambda input_features, input_features_mask: _encode_gemma3n_audio(
            model.base_model, input_features, input_features_mask
        )
    names = [f"get_{kind}_features", *(["get_image_features"] if kind == "video" else [])]
    holders = (model.base_model, model)  # the latter often passes arguments on without naming them
    functions = [getattr(holder, name) for name in names for holder in holders if hasattr(holder, name)]
    if not functions:
        raise EncoderError(f"The model has no encoder for this {kind}.")
    function: FeatureFunction = functions[0]
    if model.config.model_type == "perception_lm" and kind == "video":
        return lambda pixel_values_videos: function(pixel_values_videos)
    return function


def _encode_qwen2_audio(body: Any, input_features: torch.Tensor, feature_attention_mask: torch.Tensor) -> Any:
    """Compute the embeddings of audio. Other models have ``get_audio_features`` for this; for Qwen2-Audio,
    Transformers has it only inside the forward pass.

    ``input_features``: [1, mel bins, frames]; ``feature_attention_mask``: [1, frames].
    """
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    tower = body.audio_tower
    lengths, output_lengths = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    positions = torch.arange((input_features.shape[-1] - 2) // 2 + 1, device=input_features.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(1, len(positions), 1),
        attention_mask=(positions < lengths[:, None]).long(),
    )
    rows = body.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
    return BaseModelOutputWithPooling(pooler_output=rows[0, : int(output_lengths[0])])


def _encode_gemma3n_audio(body: Any, input_features: torch.Tensor, input_features_mask: torch.Tensor) -> Any:
    """Fill up the embeddings of a clip to as many as its text has placeholders, with the projector's last token.

    Transformers does this within a forward pass. ``input_features``: [1, frames, mel bins];
    ``input_features_mask``: [1, frames].
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    output = body.get_audio_features(input_features, ~input_features_mask.bool())
    projector = body.embed_audio
    last = torch.tensor([[projector.vocab_offset + projector.vocab_size - 1]], device=input_features.device)
    filling = projector(input_ids=last)[0]
    rows = torch.where(output.audio_mel_mask[0, :, None], filling, output.pooler_output[0])
    missing = body.config.audio_soft_tokens_per_image - len(rows)
    return BaseModelOutputWithPooling(pooler_output=torch.cat((rows, filling.expand(missing, -1))))


def _encode_music_flamingo(
    body: Any, input_features: torch.Tensor, input_features_mask: torch.Tensor, embedding_count: torch.Tensor
) -> Any:
    """Call ``get_audio_features`` with the token ids of the clip, whose windows it counts.

    ``input_features``: [windows, mel bins, frames]; ``input_features_mask``: [windows, frames].
    """
    token_ids = torch.full((1, int(embedding_count)), body.config.audio_token_id, device=input_features.device)
    return body.get_audio_features(input_features, input_features_mask, input_ids=token_ids)


def _phi4_function(body: Any, kind: MediaKind) -> FeatureFunction:
    """Return the function that runs an encoder of Phi-4-multimodal, which overwrites the embeddings of placeholders.

    In a prompt with images, audio would have another projection; such prompts are refused
    (``text/text_pipeline.py``).
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    part = body.embed_tokens_extend

    def place_rows(encoder: nn.Module, token_id: int, embedding_count: torch.Tensor, **features: Any) -> Any:
        device = next(encoder.parameters()).device
        token_ids = torch.full((1, int(embedding_count)), token_id, device=device)
        places = torch.zeros(*token_ids.shape, body.config.hidden_size, device=device)
        rows = encoder(token_ids, places, **features)
        return BaseModelOutputWithPooling(pooler_output=rows)

    if kind == "image":
        return lambda image_pixel_values, image_sizes, image_attention_mask, embedding_count: place_rows(
            part.image_embed,
            part.image_token_id,
            embedding_count,
            image_pixel_values=image_pixel_values,
            image_sizes=image_sizes,
            image_attention_mask=image_attention_mask,
        )
    return lambda audio_input_features, audio_embed_sizes, embedding_count: place_rows(
        part.audio_embed,
        part.audio_token_id,
        embedding_count,
        audio_input_features=audio_input_features,
        audio_embed_sizes=audio_embed_sizes,
    )


def _encode_llama4(model: Any, pixel_values: torch.Tensor) -> Any:
    """Project the output of ``get_image_features``, which Transformers does within a forward pass.

    ``pixel_values``: [tiles, 3, height, width].
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    rows = model.get_image_features(pixel_values=pixel_values).last_hidden_state
    return BaseModelOutputWithPooling(pooler_output=model.multi_modal_projector(rows.flatten(0, -2)))


def _encode_mllama(
    body: Any, pixel_values: torch.Tensor, aspect_ratio_ids: torch.Tensor, aspect_ratio_mask: torch.Tensor
) -> Any:
    """Return what the layers with cross-attention read of an image, without the tiles that pad it. They come last.

    ``pixel_values``: [1, 1, tiles, 3, height, width]; ``aspect_ratio_ids``: [1, 1]; ``aspect_ratio_mask``: [1, 1,
    tiles].
    """
    states = body.vision_model(pixel_values, aspect_ratio_ids, aspect_ratio_mask).last_hidden_state[0, 0]
    return SimpleNamespace(pooler_output=body.multi_modal_projector(states[: int(aspect_ratio_mask.sum())]))


def _encode_granite4(body: Any, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> Any:
    """Return the embeddings that the decoder adds before some of its layers. The first ones are zero.

    ``pixel_values``: [1, tiles, 3, height, width]; ``image_sizes``: [1, 2].
    """
    parts = [torch.cat(rows) for _, rows in body.get_image_features(pixel_values, image_sizes).deepstack_features]
    return SimpleNamespace(pooler_output=torch.zeros_like(parts[0]), deepstack_features=parts)


def _select_arguments(function: FeatureFunction, features: Features, kind: MediaKind) -> Features:
    """Return the features that are arguments of the function; processors also return others.

    LLaVA's function forwards other keyword arguments to its encoder; Pixtral's encoder needs the image sizes.
    """
    signature = inspect.signature(function).parameters
    parameters = {
        name: parameter for name, parameter in signature.items() if parameter.kind is not parameter.VAR_KEYWORD
    }
    missing = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in features
    ]
    if missing:
        raise EncoderError(f"The processed features of the {kind} have no {missing[0]}.")
    names = {*parameters, "image_sizes"} if len(parameters) < len(signature) else {*parameters}
    return {name: tensor for name, tensor in features.items() if name in names}


def _explain_failure(error: Exception, kind: MediaKind) -> EncoderError:
    """Return the sentence for an error of the model's code, whose own words are for the log only."""
    if isinstance(error, MemoryError) or "alloc" in str(error) or "out of memory" in str(error):
        return EncoderError(f"There is not enough memory to encode the {kind}.")
    return EncoderError(f"The model's encoder cannot process the {kind}.")


def _run_in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="load encoder", daemon=True).start()
    return future
