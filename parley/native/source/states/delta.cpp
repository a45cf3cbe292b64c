// Layers that keep a state: the gated delta rule (arXiv 2412.06464), and gated short convolutions. The definitions are
// in native/torch_forms/torch_states.py. Tokens of a sequence are computed one after another in fp32, by one thread for
// each part of the state, so bits depend neither on the chunks of a prompt nor on the batch.
#include <algorithm>
#include <cmath>

#include "states.h"

namespace {

constexpr long MOST_KEYS = 512;  // the largest key_dim, as in native/state_shape.py

float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// to [size] = factor * from / sqrt(the sum of squares + 1e-6)
void scale_to_unit(const float* from, float* to, long size, float factor) {
  Vec squares = {};
  for (long i = 0; i < size; i += LANES) {
    Vec x = load(from + i, size - i);
    squares = fma(x, x, squares);
  }
  float scale = factor / std::sqrt(sum(squares) + 1e-6f);
  for (long i = 0; i < size; i += LANES) store(to + i, load(from + i, size - i) * scale, size - i);
}

// One token of one head, for V vectors of values: state [key_dim][width] = kept * before; then it gains keys times
// strength * (values - keys * state); out = queries * state. All are `left` numbers, if that is less than V vectors.
template <int V>
void update_state(const float* before, float* state, long key_dim, long width, float kept, float strength, const float* keys,
                  const float* queries, const float* values, float* out, long left) {
  Vec change[V], sums[V] = {};
  for (long n = 0; n < key_dim; n++)
    for (int v = 0; v < V; v++)
      sums[v] = fma(fill(keys[n]), load(before + n * width + v * LANES, left - v * LANES) * kept, sums[v]);
  for (int v = 0; v < V; v++) {
    change[v] = (load(values + v * LANES, left - v * LANES) - sums[v]) * strength;
    sums[v] = Vec{};
  }
  for (long n = 0; n < key_dim; n++) {
    Vec key = fill(keys[n]), query = fill(queries[n]);
    for (int v = 0; v < V; v++) {
      long at = n * width + v * LANES;
      Vec next = fma(key, change[v], load(before + at, left - v * LANES) * kept);
      store(state + at, next, left - v * LANES);
      sums[v] = fma(query, next, sums[v]);
    }
  }
  for (int v = 0; v < V; v++) store(out + v * LANES, sums[v], left - v * LANES);
}

}  // namespace

extern "C" {

// out [T, value_heads, value_dim] of rows x [T, 2 * key_heads * key_dim + value_heads * value_dim], which hold queries,
// keys and values. Rows of gates [T, 2 * value_heads] hold b and a of each head, `gates_stride` numbers apart.
void scan_delta(const float* x, const bf16* gates, int64_t gates_stride, const float* decay, const float* step_bias,
                float* states, int64_t stride, const StateSpan* spans, int64_t count, float* out, int64_t key_heads,
                int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t threads) {
  constexpr int V = 4;
  long inner = value_heads * value_dim, width = 2 * key_heads * key_dim + inner;
  each_part(spans, count, value_heads, 2 * inner * key_dim, threads, [=](const StateSpan& span, long h) {
    long size = key_dim * value_dim;
    float* state = states + span.target * stride + h * size;
    const float* before = span.source < 0 ? state : states + span.source * stride + h * size;
    if (span.source < 0) std::fill(state, state + size, 0.f);
    float keys[MOST_KEYS], queries[MOST_KEYS];
    for (long token = span.first; token < span.first + span.count; token++) {
      const float* row = x + token * width + h / (value_heads / key_heads) * key_dim;
      const float* values = x + token * width + 2 * key_heads * key_dim + h * value_dim;
      scale_to_unit(row, queries, key_dim, 1.f / std::sqrt((float)key_dim));
      scale_to_unit(row + key_heads * key_dim, keys, key_dim, 1.f);
      const bf16* gate = gates + token * gates_stride + h;
      float strength = sigmoid(load(gate, 1)[0]);
      float kept = std::exp(decay[h] * softplus(load(gate + value_heads, 1)[0] + step_bias[h]));
      for (long i = 0; i < value_dim;) {
        long left = value_dim - i, vectors = left >= V * LANES ? V : 1;
        auto update = vectors == V ? update_state<V> : update_state<1>;
        update(before + i, state + i, key_dim, value_dim, kept, strength, keys, queries, values + i,
               out + token * inner + h * value_dim + i, left);
        i += vectors * LANES;
      }
      before = state;
    }
  });
}

// out [T, width] = c times the sum of weight [kernel][width] times the last `kernel` numbers b * x, plus a bias, for
// rows [T, 3 * width] of b, c and x. A state is [kernel - 1][width]: the last of these numbers, the oldest first.
void convolve_gated(const bf16* rows, const float* weight, const float* bias, float* states, int64_t stride,
                    const StateSpan* spans, int64_t count, bf16* out, int64_t width, int64_t kernel, int64_t threads) {
  constexpr long BLOCK = 64;  // numbers that are one task
  long blocks = (width + BLOCK - 1) / BLOCK, kept = kernel - 1;
  each_part(spans, count, blocks, width * kernel, threads, [=](const StateSpan& span, long block) {
    long end = std::min((long)width, (block + 1) * BLOCK);
    float* state = states + span.target * stride;
    const float* before = states + span.source * stride;
    for (long i = block * BLOCK; i < end; i += LANES) {
      long left = std::min(end - i, (long)LANES);
      // The number of the sequence at a token; those before the first are in the state.
      auto input = [=](long token) {
        if (token < 0) return span.source < 0 ? Vec{} : load(before + (kept + token) * width + i, left);
        const bf16* row = rows + (span.first + token) * 3 * width + i;
        return load(row, left) * load(row + 2 * width, left);
      };
      for (long token = 0; token < span.count; token++) {
        Vec total = bias ? load(bias + i, left) : Vec{};
        for (long k = 0; k < kernel; k++) total = fma(load(weight + k * width + i, left), input(token - kept + k), total);
        store(out + (span.first + token) * width + i, load(rows + (span.first + token) * 3 * width + width + i, left) * total,
              left);
      }
      for (long k = 0; k < kept; k++) store(state + k * width + i, input(span.count - kept + k), left);
    }
  });
}

// rows [T, width] *= sigmoid(gates), whose rows are `stride` numbers apart
void gate_rows(bf16* rows, const bf16* gates, int64_t stride, int64_t M, int64_t width, int64_t threads) {
  together(M * width < 65536 ? 1 : threads, [=] {
#pragma omp for schedule(static)
    for (long m = 0; m < M; m++)
      for (long i = 0; i < width; i += LANES) {
        bf16* at = rows + m * width + i;
        Vec gate = load(gates + m * stride + i, width - i);
        store(at, load(at, width - i) / (1.f + exp(-gate)), width - i);
      }
  });
}

}  // extern "C"
