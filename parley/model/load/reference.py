"""The reference for fused decoders: a Llama-shaped model by its definitions, compared with the decoder at load.

A plain float32 forward pass on the unmerged weights, of a few tokens, compared by logits. It knows nothing of kernels
and packed weights, so that both cannot be wrong in the same way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parley.core.sequence import BLOCK_SIZE
from parley.model.checkpoint.files import Checkpoint
from parley.model.checkpoint.quantization import Quantisation
from parley.model.load.fuse import EMBEDDING, NORM, Names
from parley.model.networks.config import Shape
from parley.model.networks.decoder import Decoder
from parley.model.networks.network import Batch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import Span

PROBE = 24  # tokens in the numeric check
OUTPUTS = 4096  # vocabulary entries with compared logits
ALL = 50_000_000  # parameters; the check runs all layers of models up to this size, else the first and the last
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}  # relative error (L2) of the logits


@torch.inference_mode()
def deviation(decoder: Decoder, checkpoint: Checkpoint, quantisation: Quantisation) -> float:
    """Return the relative error (L2) of the decoder's logits against ``reference_logits`` for a few tokens."""
    shape = decoder.shape
    layers = list(range(shape.layers))
    if decoder.parameters > ALL:
        layers = sorted({0, shape.layers - 1})
    token_ids = torch.linspace(0, shape.vocab - 1, PROBE).long()
    outputs = torch.linspace(0, shape.vocab - 1, min(shape.vocab, OUTPUTS)).long()
    expected = reference(checkpoint, shape, quantisation, token_ids, outputs, layers)

    part = decoder.select(layers)
    device = decoder.blocks[0].input_norm.device
    count = -(-PROBE // BLOCK_SIZE)
    pages = PagedKV(part.layers, count, decoder.blocks[0].input_norm.dtype, device)
    pages.clear(list(range(count)))
    places = torch.arange(PROBE, device=device)
    batch = Batch(token_ids.to(device), places, places, [Span(0, PROBE, PROBE, list(range(count)))])
    got = part.logits(part.hidden(batch, pages)[-1:])[:, outputs.to(device)].cpu()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def reference(
    checkpoint: Checkpoint,
    shape: Shape,
    quantisation: Quantisation,
    token_ids: torch.Tensor,
    outputs: torch.Tensor,
    layers: list[int],
) -> torch.Tensor:
    """Compute logits of some ``outputs`` after the last token by the definitions, using only ``layers``.

    token_ids int64 [T], outputs int64 [N] -> float32 [1, N]. The whole vocabulary in float32 would cost more than the
    rest of the start.
    """
    names = Names(checkpoint, shape, quantisation, torch.float32, torch.device("cpu"))
    count = len(token_ids)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = checkpoint.tensor(name, x.shape[-1]).float()
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + shape.eps) * weight

    def project(x: torch.Tensor, key: str, layer: int) -> list[torch.Tensor]:
        results = []
        for linear in names.parts(layer)[key]:
            y = names.read(linear).product(x)
            results.append(y + checkpoint.tensor(linear.name + ".bias", linear.out).float() if linear.bias else y)
        return results

    angles = torch.arange(count).float()[:, None, None] * shape.rope.inverse_frequencies()
    cos, sin = angles.cos(), angles.sin()
    half = shape.rope.rotary // 2

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    distance = torch.arange(count)[:, None] - torch.arange(count)
    x = checkpoint.tensor(EMBEDDING, shape.vocab, shape.hidden)[token_ids].float()
    for layer in layers:
        norms = names.norms(layer)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        qkv = torch.cat(project(norm(x, norms[0]), "qkv", layer), -1).view(count, -1, shape.head_dim)
        q, k, v = qkv.split(sizes, 1)
        if shape.qk_norm:
            q, k = norm(q, norms[2]), norm(k, norms[3])
        q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(shape.heads // shape.kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
        seen = distance >= 0
        window = shape.windows[layer]
        if window is not None:
            seen &= distance < window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        x = x + project(attended, "output", layer)[0]
        gate, up = torch.cat(project(norm(x, norms[1]), "gate_up", layer), -1).chunk(2, -1)
        x = x + project(F.silu(gate) * up, "down", layer)[0]
        checkpoint.drop(*names.of(layer))
    logits = names.read(names.head, outputs).product(norm(x[-1:], NORM))
    checkpoint.drop(*names.tensors(names.head))
    return logits
