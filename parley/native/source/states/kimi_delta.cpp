// Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay of its own for each row of a state. The definition
// is in native/torch_forms/torch_states.py. Tokens of a sequence are computed one after another in fp32, by one thread
// for each head, so bits depend neither on the chunks of a prompt nor on the batch.
#include <algorithm>
#include <cmath>
#include <vector>

#include "delta.h"

namespace {

// What a token does to the state of a head: each row is multiplied by its number `kept`, and the state then gains keys
// times `strength` times the difference between a value and keys times the state. `match`: queries times keys.
struct Token {
  const float *queries, *keys, *kept;
  float strength, match;

  // As `update_columns` calls it. state = kept * before + keys * change, and out = queries * state.
  template <int V>
  void update_strip(const float* before, float* state, long stride, long dim, const float* values, float* out) const {
    Vec by_key[V] = {}, by_query[V] = {}, change[V];
    for (long n = 0; n < dim; n++) {
      Vec key = broadcast(keys[n]), query = broadcast(queries[n]), own = broadcast(kept[n]);
      for (int v = 0; v < V; v++) {
        Vec x = load<Vec>(before + n * stride + v * LANES) * own;
        by_key[v] = fma(key, x, by_key[v]);
        by_query[v] = fma(query, x, by_query[v]);
      }
    }
    for (int v = 0; v < V; v++) {
      change[v] = (load<Vec>(values + v * LANES) - by_key[v]) * strength;
      store(out + v * LANES, fma(broadcast(match), change[v], by_query[v]));
    }
    for (long n = 0; n < dim; n++) {
      Vec key = broadcast(keys[n]), own = broadcast(kept[n]);
      for (int v = 0; v < V; v++) {
        long at = n * stride + v * LANES;
        store(state + at, fma(key, change[v], load<Vec>(before + at) * own));
      }
    }
  }
};

// to [size] = the share that each row of a head's state keeps, of numbers f. Not bounded if `lower_bound` is 0.
void compute_kept(const bf16* f, const float* step_bias, float decay, float lower_bound, float* to, long size) {
  for (long i = 0; i < size; i += LANES) {
    Vec step = load(f + i, size - i) + load(step_bias + i, size - i);
    Vec log = lower_bound < 0 ? lower_bound / (1.f + exp(step * decay)) : softplus(step) * decay;
    store(to + i, exp(log), size - i);
  }
}

}  // namespace

extern "C" {

// out [T, heads, dim] of rows x [T, 3 * heads * dim], which hold queries, keys and values. Rows of gates [T, heads +
// heads * dim] hold the strength b of each head, and then the numbers f of decays, `gates_stride` numbers apart.
void scan_kimi_delta(const float* x, const bf16* gates, int64_t gates_stride, const float* decay,
                     const float* step_bias, float lower_bound, float* states, int64_t stride, const StateSpan* spans,
                     int64_t count, float* out, int64_t heads, int64_t dim, int64_t threads) {
  long inner = heads * dim, size = dim * dim;
  each_part(spans, count, heads, 2 * inner * dim, threads, [=](const StateSpan& span, long h) {
    float* state = states + span.target * stride + h * size;
    const float* before = span.source < 0 ? state : states + span.source * stride + h * size;
    if (span.source < 0) std::fill(state, state + size, 0.f);
    std::vector<float> numbers(std::min<long>(span.count, BLOCK_TOKENS) * 3 * dim);  // queries, keys and kept shares
    Token tokens[BLOCK_TOKENS];
    for (long done = 0; done < span.count; done += BLOCK_TOKENS, before = state) {
      long first = span.first + done, some = std::min(BLOCK_TOKENS, span.count - done);
      for (long t = 0; t < some; t++) {
        const float* row = x + (first + t) * 3 * inner + h * dim;
        const bf16* gate = gates + (first + t) * gates_stride;
        float *queries = numbers.data() + t * 3 * dim, *keys = queries + dim, *kept = keys + dim;
        scale_to_unit(row, queries, dim, 1.f / std::sqrt((float)dim));
        scale_to_unit(row + inner, keys, dim, 1.f);
        compute_kept(gate + heads + h * dim, step_bias + h * dim, decay[h], lower_bound, kept, dim);
        tokens[t] = {queries, keys, kept, sigmoid(load(gate + h, 1)[0]), dot(queries, keys, dim)};
      }
      const float* given = x + first * 3 * inner + 2 * inner + h * dim;
      update_columns(tokens, some, before, state, dim, dim, given, 3 * inner, out + first * inner + h * dim, inner);
    }
  });
}

// out [M, width] = norm(x) * weight * sigmoid(gates), with an RMS norm over each of `groups` parts of a row. Rows of
// gates are `stride` numbers apart.
void norm_sigmoid_gated(const float* x, const bf16* gates, int64_t stride, const float* weight, float eps, bf16* out,
                        int64_t M, int64_t width, int64_t groups, int64_t threads) {
  long size = width / groups;
  run_parallel(M * width < 65536 ? 1 : threads, [=] {
#pragma omp for schedule(static)
    for (long part = 0; part < M * groups; part++) {
      long m = part / groups, start = part % groups * size;
      const float* row = x + m * width + start;
      Vec squares = {};
      for (long i = 0; i < size; i += LANES) {
        Vec v = load(row + i, size - i);
        squares = fma(v, v, squares);
      }
      float scale = 1.f / std::sqrt(sum(squares) / size + eps);
      for (long i = 0; i < size; i += LANES) {
        Vec gate = load(gates + m * stride + start + i, size - i);
        Vec v = load(row + i, size - i) * scale * load(weight + start + i, size - i);
        store(out + m * width + start + i, v / (1.f + exp(-gate)), size - i);
      }
    }
  });
}

}  // extern "C"
