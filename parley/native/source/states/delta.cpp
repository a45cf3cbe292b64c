// Layers that keep a state: the gated delta rule (arXiv 2412.06464), and gated short convolutions. The definitions are
// in native/torch_forms/torch_states.py. Tokens of a sequence are computed one after another in fp32, by one thread for
// each part of the state, so bits depend neither on the chunks of a prompt nor on the batch.
#include <algorithm>
#include <cmath>
#include <vector>

#include "delta.h"

namespace {

// What a token does to the state of a head: it is multiplied by `kept`, and then gains keys times `strength` times the
// difference between a value and keys times the state. `match`: queries times keys.
struct Token {
  const float *queries, *keys;
  float kept, strength, match;

  // As `update_columns` calls it. state = kept * before + keys * change, and out = queries * state.
  template <int V>
  void update_strip(const float* before, float* state, long stride, long key_dim, const float* values,
                    float* out) const {
    Vec by_key[V] = {}, by_query[V] = {}, change[V], kept_part = broadcast(kept);
    for (long n = 0; n < key_dim; n++) {
      Vec key = broadcast(keys[n]), query = broadcast(queries[n]);
      for (int v = 0; v < V; v++) {
        Vec x = load<Vec>(before + n * stride + v * LANES);
        by_key[v] = fma(key, x, by_key[v]);
        by_query[v] = fma(query, x, by_query[v]);
      }
    }
    for (int v = 0; v < V; v++) {
      change[v] = (load<Vec>(values + v * LANES) - by_key[v] * kept_part) * strength;
      store(out + v * LANES, fma(broadcast(match), change[v], by_query[v] * kept_part));
    }
    for (long n = 0; n < key_dim; n++) {
      Vec key = broadcast(keys[n]);
      for (int v = 0; v < V; v++) {
        long at = n * stride + v * LANES;
        store(state + at, fma(key, change[v], load<Vec>(before + at) * kept_part));
      }
    }
  }
};

}  // namespace

extern "C" {

// out [T, value_heads, value_dim] of rows x [T, 2 * key_heads * key_dim + value_heads * value_dim], which hold queries,
// keys and values. Rows of gates [T, 2 * value_heads] hold b and a of each head, `gates_stride` numbers apart.
// Strengths of changes are at most `max_strength`.
void scan_delta(const float* x, const bf16* gates, int64_t gates_stride, const float* decay, const float* step_bias,
                float max_strength, float* states, int64_t stride, const StateSpan* spans, int64_t count, float* out,
                int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t threads) {
  long inner = value_heads * value_dim, width = 2 * key_heads * key_dim + inner;
  each_part(spans, count, value_heads, 2 * inner * key_dim, threads, [=](const StateSpan& span, long h) {
    long size = key_dim * value_dim;
    float* state = states + span.target * stride + h * size;
    const float* before = span.source < 0 ? state : states + span.source * stride + h * size;
    if (span.source < 0) std::fill(state, state + size, 0.f);
    std::vector<float> units(std::min<long>(span.count, BLOCK_TOKENS) * 2 * key_dim);  // queries and keys of the tokens
    Token tokens[BLOCK_TOKENS];
    for (long done = 0; done < span.count; done += BLOCK_TOKENS, before = state) {
      long first = span.first + done, some = std::min(BLOCK_TOKENS, span.count - done);
      for (long t = 0; t < some; t++) {
        const float* row = x + (first + t) * width + h / (value_heads / key_heads) * key_dim;
        const bf16* gate = gates + (first + t) * gates_stride + h;
        float *queries = units.data() + t * 2 * key_dim, *keys = queries + key_dim;
        scale_to_unit(row, queries, key_dim, 1.f / std::sqrt((float)key_dim));
        scale_to_unit(row + key_heads * key_dim, keys, key_dim, 1.f);
        tokens[t] = {queries, keys, 0, max_strength * sigmoid(load(gate, 1)[0]), 0};
        tokens[t].kept = std::exp(decay[h] * softplus(broadcast(load(gate + value_heads, 1)[0] + step_bias[h]))[0]);
        tokens[t].match = dot(queries, keys, key_dim);
      }
      const float* given = x + first * width + 2 * key_heads * key_dim + h * value_dim;
      float* to = out + first * inner + h * value_dim;
      update_columns(tokens, some, before, state, key_dim, value_dim, given, width, to, inner);
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
        for (long k = 0; k < kernel; k++)
          total = fma(load(weight + k * width + i, left), input(token - kept + k), total);
        store(out + (span.first + token) * width + i,
              load(rows + (span.first + token) * 3 * width + width + i, left) * total, left);
      }
      for (long k = 0; k < kept; k++) store(state + k * width + i, input(span.count - kept + k), left);
    }
  });
}

// rows [T, width] *= sigmoid(gates), whose rows are `stride` numbers apart
void gate_rows(bf16* rows, const bf16* gates, int64_t stride, int64_t M, int64_t width, int64_t threads) {
  run_parallel(M * width < 65536 ? 1 : threads, [=] {
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
