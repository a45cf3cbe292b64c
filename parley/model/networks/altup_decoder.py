"""The fused decoder of models with several residual streams for each token (Gemma 3n). ``AltUpShape`` defines it.

Streams are [N, T, hidden]. They are mixed elementwise, so the bits of a row do not depend on its index in the batch.
"""

from __future__ import annotations

import torch

from parley import native
from parley.heartbeat import beat
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.network import KVPages, PackedBatch
from parley.native.layer import AltUpWeights

Rotation = tuple[torch.Tensor, torch.Tensor]


class AltUpDecoder(FusedDecoder):
    """``network.DecoderNetwork`` for one model with alternating updates. It always runs kernel by kernel."""

    def kernel_by_kernel(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Compute ``compute_hidden``."""
        rotations, embeddings = self.position_tables.rotations(batch), self.embeddings.embed_tokens(batch)
        inputs = self.embeddings.compute_inputs(batch, embeddings)
        assert inputs is not None
        streams = self._make_streams(embeddings)
        for i, shape in enumerate(self.config.layers):
            beat()
            streams = self._run_altup_layer(
                i, streams, inputs[:, shape.layer_input], batch, pages, rotations[shape.rope]
            )
        result: torch.Tensor = native.norm_rows(self._merge_streams(streams), self._norm)
        return result

    def _make_streams(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the residual streams [N, T, hidden] of embeddings [T, hidden]."""
        projections = self.embeddings.parts.streams
        assert projections is not None
        other_streams = native.linear(embeddings, projections.first).split(self.config.hidden_size, 1)
        return torch.stack([embeddings, *(native.match_sizes(rows.contiguous(), embeddings) for rows in other_streams)])

    def _merge_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the mean of all streams [N, T, hidden] after the last layer: [T, hidden]."""
        projections = self.embeddings.parts.streams
        assert projections is not None
        total = streams[0].to(torch.float32, copy=True)
        for rows, projection in zip(streams[1:], projections.last, strict=True):
            total += native.match_sizes(native.linear(rows, projection), streams[0])
        return (total / len(streams)).to(streams.dtype)

    def _run_altup_layer(
        self,
        layer: int,
        streams: torch.Tensor,
        inputs: torch.Tensor,
        batch: PackedBatch,
        pages: KVPages,
        rotation: Rotation,
    ) -> torch.Tensor:
        """Return the streams after a layer. ``inputs`` [T, width]: of the layer alone."""
        shape, weights, altup = self.config.altup, self.layer_weights[layer], self.layer_weights[layer].altup
        assert shape is not None and altup is not None
        predicted = self._predict_streams(layer, streams, altup)
        x = native.norm_rows(predicted[shape.active], weights.attention_norm)
        laurel = self._layer_linears.apply_linear(
            self._layer_linears.apply_linear(x, batch, layer, "laurel_left"), batch, layer, "laurel_right"
        )
        residual = native.add_norm(laurel, predicted[shape.active] + x, None, after=weights.laurel_norm)[1]
        attended = self._layer_linears.apply_linear(
            self._attention.attend_layer(layer, x, batch, pages, *rotation, None), batch, layer, "output"
        )
        consumer = None if batch.lora_rows is not None else weights.gate_up
        after_norm = weights.attention_after_norm
        x, residual = native.add_norm(
            attended, residual, weights.mlp_norm, after=after_norm, total_scale=0.5**0.5, consumer=consumer
        )
        mlp_output = self._mlps.run_mlps(layer, x, residual, batch)
        activated = native.add_norm(mlp_output, residual, None, after=weights.mlp_after_norm)[1]
        corrected = self._correct_streams(layer, predicted, activated, altup)
        rows = corrected[shape.active]
        if altup.output_scale is not None:
            rows = (rows.float() * altup.output_scale).to(rows.dtype)
        added = native.norm_rows(self._mlps.apply_layer_input(layer, rows, inputs, batch), weights.input_after_norm)
        corrected[1:] += added
        return corrected

    def _modalities(self, layer: int, rows: torch.Tensor, altup: AltUpWeights) -> torch.Tensor:
        """Return the router's outputs, which the coefficients depend on, for rows [T, hidden]: float32 [N, T, 1].

        tanh is computed in float64, because in float32 its bits depend on a number's index in the tensor.
        """
        normed = native.norm_rows(rows, self.layer_weights[layer].altup_norm)
        logits = native.lm_head_logits(normed, altup.router).double() / self.config.hidden_size
        return logits.tanh().float().t()[:, :, None].contiguous()

    def _predict_streams(self, layer: int, streams: torch.Tensor, altup: AltUpWeights) -> torch.Tensor:
        """Return a layer's predictions of all streams, [N, T, hidden]."""
        shape, count = self.config.altup, len(streams)
        assert shape is not None
        shares = _mix_numbers(altup.prediction, self._modalities(layer, streams[shape.active], altup))
        shares = shares.unflatten(0, (count, count))
        float_streams = streams.float()
        total = float_streams.clone()
        for i in range(count):
            total += shares[:, i] * float_streams[i]
        return total.to(streams.dtype)

    def _correct_streams(
        self, layer: int, predicted: torch.Tensor, activated: torch.Tensor, altup: AltUpWeights
    ) -> torch.Tensor:
        """Return a layer's predictions, corrected by what the layer made of the active one [T, hidden]."""
        assert self.config.altup is not None
        float_streams = predicted.float()
        change = activated.float() - float_streams[self.config.altup.active]
        shares = _mix_numbers(altup.correction, self._modalities(layer, activated, altup)) + 1
        return (float_streams + shares * change).to(predicted.dtype)


def _mix_numbers(weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 weight [out, N] times numbers [N, T, 1]: [out, T, 1]. Sums are in the order of N."""
    total = weight[:, :1, None] * numbers[0]
    for i in range(1, len(numbers)):
        total = total + weight[:, i, None, None] * numbers[i]
    return total
