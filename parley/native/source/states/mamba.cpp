// Layers that keep a state of fixed size for each sequence: the causal convolution, and the scan of Mamba 2 (arXiv
// 2405.21060; native/torch_forms/torch_mamba.py defines the whole layer). Tokens of a sequence are computed one after
// another in fp32, by one thread for each part of the state, so bits depend neither on the chunks of a prompt nor on the
// batch.
#include <algorithm>

#include "states.h"

namespace {

constexpr long BLOCK = 64;   // channels of a convolution that are one task

// state [state_dim][width] = kept * before + keys * values, and out = queries * state, for V vectors of values. All are
// `left` numbers, if that is less than V vectors.
template <int V>
void update_state(const float* before, float* state, long size, long width, float kept, const Vec* values, const float* keys,
                  const float* queries, Vec* out, long left) {
  Vec sums[V] = {};
  for (long n = 0; n < size; n++) {
    Vec key = fill(keys[n]), query = fill(queries[n]);
    for (int v = 0; v < V; v++) {
      long at = n * width + v * LANES;
      Vec next = fma(key, values[v], load(before + at, left - v * LANES) * kept);
      store(state + at, next, left - v * LANES);
      sums[v] = fma(query, next, sums[v]);
    }
  }
  for (int v = 0; v < V; v++) out[v] = sums[v];
}

}  // namespace

extern "C" {

// out [T, channels] = SiLU(bias + the sum of weight [kernel][channels] times each channel's last `kernel` inputs). Rows
// of x are `x_stride` numbers apart. A state is [kernel - 1][channels]: a sequence's last inputs, the oldest first.
void convolve_rows(const bf16* x, int64_t x_stride, const float* weight, const float* bias, float* states, int64_t stride,
                   const StateSpan* spans, int64_t count, float* out, int64_t channels, int64_t kernel, int64_t threads) {
  long blocks = (channels + BLOCK - 1) / BLOCK;
  each_part(spans, count, blocks, channels * kernel, threads, [=](const StateSpan& span, long block) {
    long end = std::min(channels, (block + 1) * BLOCK), kept = kernel - 1;
    float* state = states + span.target * stride;
    const float* before = states + span.source * stride;
    const bf16* rows = x + span.first * x_stride;
    for (long i = block * BLOCK; i < end; i += LANES) {
      long left = std::min(end - i, (long)LANES);
      // The input of the sequence at a token; those before the first are in the state.
      auto input = [=](long token) {
        if (token >= 0) return load(rows + token * x_stride + i, left);
        return span.source < 0 ? Vec{} : load(before + (kept + token) * channels + i, left);
      };
      for (long token = 0; token < span.count; token++) {
        Vec total = bias ? load(bias + i, left) : Vec{};
        for (long k = 0; k < kernel; k++) total = fma(load(weight + k * channels + i, left), input(token - kept + k), total);
        store(out + (span.first + token) * channels + i, silu(total), left);
      }
      for (long k = 0; k < kept; k++) store(state + k * channels + i, input(span.count - kept + k), left);
    }
  });
}

// out [T, heads, head_dim] of rows x [T, heads * head_dim + 2 * groups * state_dim], which hold values, B and C. Each
// head computes step = softplus(step_scale * step + step_bias), at least `least` and at most `most`; state [state_dim]
// [head_dim] = exp(step * decay) * state + B times step * value; out = C times state + skip * value. Rows of steps
// are `steps_stride` numbers apart.
void scan_heads(const float* x, const bf16* steps, int64_t steps_stride, const float* decay, const float* step_bias,
                const float* skip, float step_scale, float least, float most, float* states, int64_t stride,
                const StateSpan* spans, int64_t count, float* out, int64_t heads, int64_t head_dim, int64_t groups,
                int64_t state_dim, int64_t threads) {
  constexpr int V = 4;
  long inner = heads * head_dim, width = inner + 2 * groups * state_dim;
  each_part(spans, count, heads, inner * state_dim, threads, [=](const StateSpan& span, long h) {
    long size = state_dim * head_dim;
    float* state = states + span.target * stride + h * size;
    const float* before = span.source < 0 ? state : states + span.source * stride + h * size;
    if (span.source < 0) std::fill(state, state + size, 0.f);
    for (long token = span.first; token < span.first + span.count; token++) {
      const float *row = x + token * width, *values = row + h * head_dim;
      const float *keys = row + inner + h / (heads / groups) * state_dim, *queries = keys + groups * state_dim;
      float given = load(steps + token * steps_stride + h, 1)[0];
      float step = std::min(std::max(softplus(given * step_scale + step_bias[h]), least), most);
      float kept = exp(fill(step * decay[h]))[0];
      float* to = out + token * inner + h * head_dim;
      for (long i = 0; i < head_dim;) {
        long left = head_dim - i, vectors = left >= V * LANES ? V : 1;
        Vec scaled[V], sums[V];
        for (long v = 0; v < vectors; v++) scaled[v] = load(values + i + v * LANES, left - v * LANES) * step;
        auto update = vectors == V ? update_state<V> : update_state<1>;
        update(before + i, state + i, state_dim, head_dim, kept, scaled, keys, queries, sums, left);
        for (long v = 0; v < vectors; v++, i += LANES)
          store(to + i, fma(fill(skip[h]), load(values + i, head_dim - i), sums[v]), head_dim - i);
      }
      before = state;
    }
  });
}

}  // extern "C"
