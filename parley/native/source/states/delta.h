// What the delta rules share: queries and keys of length 1, and tokens that change a head's state one after another.
#pragma once
#include <algorithm>
#include <cmath>

#include "states.h"

constexpr long MAX_KEY_DIM = 512;  // the largest key_dim, as in native/state_shape.py

static inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// to [size] = factor * from / sqrt(the sum of squares + 1e-6)
static inline void scale_to_unit(const float* from, float* to, long size, float factor) {
  Vec squares = {};
  for (long i = 0; i < size; i += LANES) {
    Vec x = load(from + i, size - i);
    squares = fma(x, x, squares);
  }
  float scale = factor / std::sqrt(sum(squares) + 1e-6f);
  for (long i = 0; i < size; i += LANES) store(to + i, load(from + i, size - i) * scale, size - i);
}

static inline float dot(const float* a, const float* b, long size) {
  Vec total = {};
  for (long i = 0; i < size; i += LANES) total = fma(load(a + i, size - i), load(b + i, size - i), total);
  return sum(total);
}

// Changes the state [key_dim][value_dim] of a head from `before` by up to BLOCK_TOKENS tokens, whose values and outputs
// are `given_stride` and `to_stride` numbers apart. Token::update_strip<V> computes one token, for V vectors of values;
// rows of its states are `stride` numbers apart.
template <class Token>
void update_columns(const Token* tokens, long count, const float* before, float* state, long key_dim, long value_dim,
                    const float* given, long given_stride, float* to, long to_stride) {
  alignas(64) float strip[MAX_KEY_DIM * STRIP], values[STRIP] = {}, outputs[STRIP];
  long i = 0;
  for (; count == 1 && i + WIDE <= value_dim; i += WIDE)
    tokens[0].template update_strip<WIDE_VECTORS>(before + i, state + i, value_dim, key_dim, given + i, to + i);
  for (; i < value_dim; i += STRIP) {
    long left = std::min(value_dim - i, STRIP);
    read_strip(before + i, key_dim, value_dim, left, strip);
    for (long t = 0; t < count; t++) {
      const float* own = given + t * given_stride + i;
      float* result = to + t * to_stride + i;
      if (left < STRIP) std::copy_n(own, left, values);
      tokens[t].template update_strip<STRIP_VECTORS>(strip, strip, STRIP, key_dim, left < STRIP ? values : own,
                                                     left < STRIP ? outputs : result);
      if (left < STRIP) std::copy_n(outputs, left, result);
    }
    write_strip(strip, key_dim, value_dim, left, state + i);
  }
}
