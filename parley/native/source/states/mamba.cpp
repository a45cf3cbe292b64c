// Layers that keep a state of fixed size for each sequence: the causal convolution, and the scan of Mamba 2 (arXiv
// 2405.21060; native/torch_forms/torch_mamba.py defines the whole layer). Tokens of a sequence are computed one after
// another in fp32, by one thread for each part of the state, so bits depend neither on the chunks of a prompt nor on
// the batch.
#include <algorithm>
#include <vector>

#include "../activations.h"
#include "states.h"

namespace {

constexpr long BLOCK = 64;  // channels of a convolution that are one task

// What a token does to the state of a head: it is multiplied by `kept`, and gains keys times values times `step`.
struct Token {
  const float *values, *keys, *queries;
  float kept, step;
};

// One token, for V vectors of values: state = kept * before + keys * step * values, and out = queries * state + skip *
// values. Rows of states are `stride` numbers apart.
template <int V>
void update_strip(const Token& token, const float* before, float* state, long stride, long size, float skip,
                  const float* values, float* out) {
  Vec sums[V] = {}, scaled[V], kept = broadcast(token.kept);
  for (int v = 0; v < V; v++) scaled[v] = load<Vec>(values + v * LANES) * token.step;
  for (long n = 0; n < size; n++) {
    Vec key = broadcast(token.keys[n]), query = broadcast(token.queries[n]);
    for (int v = 0; v < V; v++) {
      long at = n * stride + v * LANES;
      Vec next = fma(key, scaled[v], load<Vec>(before + at) * kept);
      store(state + at, next);
      sums[v] = fma(query, next, sums[v]);
    }
  }
  for (int v = 0; v < V; v++) store(out + v * LANES, fma(broadcast(skip), load<Vec>(values + v * LANES), sums[v]));
}

}  // namespace

extern "C" {

// out [T, channels] = SiLU(bias + the sum of weight [kernel][channels] times each channel's last `kernel` inputs). Rows
// of x are `x_stride` numbers apart. A state is [kernel - 1][channels]: a sequence's last inputs, the oldest first.
void convolve_rows(const bf16* x, int64_t x_stride, const float* weight, const float* bias, float* states,
                   int64_t stride, const StateSpan* spans, int64_t count, float* out, int64_t channels, int64_t kernel,
                   int64_t threads) {
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
        for (long k = 0; k < kernel; k++)
          total = fma(load(weight + k * channels + i, left), input(token - kept + k), total);
        store(out + (span.first + token) * channels + i, silu(total), left);
      }
      for (long k = 0; k < kept; k++) store(state + k * channels + i, input(span.count - kept + k), left);
    }
  });
}

// out [T, heads, head_dim] of rows x [T, heads * head_dim + 2 * groups * state_dim], which hold values, B and C. Each
// head computes step = softplus(step_scale * step + step_bias), at least `least` and at most `most`; state [state_dim]
// [head_dim] = exp(step * decay) * state + B times step * value; out = C times state + skip * value. Rows of steps
// are `steps_stride` numbers apart. Without steps, all are 1; without `skip`, it is 0.
void scan_heads(const float* x, const bf16* steps, int64_t steps_stride, const float* decay, const float* step_bias,
                const float* skip, float step_scale, float least, float most, float* states, int64_t stride,
                const StateSpan* spans, int64_t count, float* out, int64_t heads, int64_t head_dim, int64_t groups,
                int64_t state_dim, int64_t threads) {
  long inner = heads * head_dim, width = inner + 2 * groups * state_dim;
  each_part(spans, count, heads, inner * state_dim, threads, [=](const StateSpan& span, long h) {
    long size = state_dim * head_dim;
    float* state = states + span.target * stride + h * size;
    const float* before = span.source < 0 ? state : states + span.source * stride + h * size;
    if (span.source < 0) std::fill(state, state + size, 0.f);
    std::vector<float> strip(state_dim * STRIP);
    float share = skip ? skip[h] : 0.f;
    alignas(64) float values[STRIP] = {}, outputs[STRIP];
    Token tokens[BLOCK_TOKENS];
    for (long done = 0; done < span.count; done += BLOCK_TOKENS, before = state) {
      long first = span.first + done, some = std::min(BLOCK_TOKENS, span.count - done);
      for (long t = 0; t < some; t++) {
        const float *row = x + (first + t) * width, *keys = row + inner + h / (heads / groups) * state_dim;
        float step = 1;
        if (steps) {
          float given = load(steps + (first + t) * steps_stride + h, 1)[0];
          step = std::min(std::max(softplus(broadcast(given * step_scale + step_bias[h]))[0], least), most);
        }
        tokens[t] = {row + h * head_dim, keys, keys + groups * state_dim, exp(broadcast(step * decay[h]))[0], step};
      }
      float* to = out + first * inner + h * head_dim;
      long i = 0;
      for (; some == 1 && i + WIDE <= head_dim; i += WIDE)
        update_strip<WIDE_VECTORS>(tokens[0], before + i, state + i, head_dim, state_dim, share, tokens[0].values + i,
                                   to + i);
      for (; i < head_dim; i += STRIP) {
        long left = std::min(head_dim - i, STRIP);
        read_strip(before + i, state_dim, head_dim, left, strip.data());
        for (long t = 0; t < some; t++) {
          const float* own = tokens[t].values + i;
          float* result = to + t * inner + i;
          if (left < STRIP) std::copy_n(own, left, values);
          update_strip<STRIP_VECTORS>(tokens[t], strip.data(), strip.data(), STRIP, state_dim, share,
                                      left < STRIP ? values : own, left < STRIP ? outputs : result);
          if (left < STRIP) std::copy_n(outputs, left, result);
        }
        write_strip(strip.data(), state_dim, head_dim, left, state + i);
      }
    }
  });
}

}  // extern "C"
