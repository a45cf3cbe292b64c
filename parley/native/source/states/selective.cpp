// The scan of Mamba 1 (arXiv 2312.00752; native/torch_forms/torch_selective.py defines the whole layer). Each channel
// has a state of its own. Tokens of a sequence are computed one after another in fp32, by one thread for each block of
// channels, so bits depend neither on the chunks of a prompt nor on the batch.
#include <algorithm>
#include <vector>

#include "../activations.h"
#include "states.h"

namespace {

constexpr long BLOCK = 64;  // channels that are one task

}  // namespace

extern "C" {

// out [T, inner] of active [T, inner], steps [T, inner], keys [T, 2 * state_dim], which hold B and C, and gates [T,
// inner], whose rows are `gates_stride` numbers apart. Each channel computes step = softplus(step + step_bias); state
// [state_dim] [inner] = exp(step * decay [state_dim][inner]) * state + B times step * x; out = (C times state + skip *
// x) * silu(gate).
void scan_channels(const bf16* active, const bf16* steps, const float* keys, const bf16* gates, int64_t gates_stride,
                   const float* decay, const float* step_bias, const float* skip, float* states, int64_t stride,
                   const StateSpan* spans, int64_t count, bf16* out, int64_t inner, int64_t state_dim,
                   int64_t threads) {
  long blocks = (inner + BLOCK - 1) / BLOCK;
  each_part(spans, count, blocks, 8 * inner * state_dim, threads, [=](const StateSpan& span, long block) {
    std::vector<float> strip(state_dim * LANES);
    for (long i = block * BLOCK, end = std::min(inner, i + BLOCK); i < end; i += LANES) {
      long left = std::min(end - i, (long)LANES);
      float* state = states + span.target * stride + i;
      const float* before = states + span.source * stride + i;
      for (long n = 0; n < state_dim; n++)
        store(&strip[n * LANES], span.source < 0 ? Vec{} : load(before + n * inner, left));
      Vec bias = load(step_bias + i, left), share = load(skip + i, left);
      for (long t = span.first; t < span.first + span.count; t++) {
        const float *b = keys + t * 2 * state_dim, *c = b + state_dim;
        Vec x = load(active + t * inner + i, left), step = softplus(load(steps + t * inner + i, left) + bias);
        Vec scaled = step * x, sum = {};
        for (long n = 0; n < state_dim; n++) {
          Vec kept = exp(step * load(decay + n * inner + i, left));
          Vec next = fma(broadcast(b[n]), scaled, load<Vec>(&strip[n * LANES]) * kept);
          store(&strip[n * LANES], next);
          sum = fma(broadcast(c[n]), next, sum);
        }
        store(out + t * inner + i, fma(share, x, sum) * silu(load(gates + t * gates_stride + i, left)), left);
      }
      for (long n = 0; n < state_dim; n++) store(state + n * inner, load<Vec>(&strip[n * LANES]), left);
    }
  });
}

}  // extern "C"
