// The activations of MLPs, a vector at a time.
#pragma once
#include "vector.h"

// Numbered as ACTIVATIONS in native/layer_shape.py.
enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU, RELU2, CLAMPED_SWIGLU, XIELU };

// In terms of e^-x, so that it saturates correctly: for very negative x, a finite number is divided by infinity.
static inline Vec silu(Vec x) { return x / (1.f + exp(-x)); }

// x * (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
static inline Vec gelu_tanh(Vec x) { return x / (1.f + exp(-x * (1.59576912f + 0.0713548163f * (x * x)))); }

// x * (1 + erf(x / sqrt(2))) / 2, with Abramowitz and Stegun's 7.1.26, whose absolute error is below 1.5e-7. Tails below
// e^-80 are 0: the rest would be denormal numbers, with which the products after the activation take 10 times as long.
static inline Vec gelu(Vec x) {
  Vec z = x * 0.707106781f, size = (Vec)((Bits)z & 0x7fffffff), t = 1.f / (1.f + 0.3275911f * size);
  Vec p = fma(broadcast(1.061405429f), t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  Vec tail = p * t * exp(-(z * z)) * 0.5f;  // of the normal distribution, on the side of x
  tail = z * z > 80.f ? Vec{} : tail;
  return x * (x < 0.f ? tail : 1.f - tail);
}

static inline Vec relu(Vec x) { return max_of(x, Vec{}); }

static inline Vec relu2(Vec x) {
  Vec positive = relu(x);
  return positive * positive;
}

// xIELU: positive * x^2 above 0 and negative * (e^x - 1 - x) below, plus linear * x. `factors`: these three
static inline Vec xielu(Vec x, const float* factors) {
  Vec curve = x > 0.f ? x * x * factors[0] : (exp(x) - 1.f - x) * factors[1];
  return fma(broadcast(factors[2]), x, curve);
}

// As SWIGLU_LIMIT and SWIGLU_ALPHA in native/layer_shape.py
constexpr float LIMIT = 7.f, ALPHA = 1.702f;

// At most LIMIT. NaN stays NaN.
static inline Vec limited(Vec x) { return x > LIMIT ? broadcast(LIMIT) : x; }

static inline Vec clamped_gate(Vec gate) {
  Vec x = limited(gate);
  return x / (1.f + exp(x * -ALPHA));
}

static inline Vec clamped_up(Vec up) { return 1.f - limited(-limited(up)); }

// Activations of gates that a product computes while it multiplies
constexpr bool is_fused(int64_t activation) { return activation == SILU || activation == GELU_TANH; }

// f(active) with the function of a fused activation. It is inline, since a call would save all registers of a tile.
// Without AVX-512 nothing calls this (is_gate_fused), and nothing is compiled for it.
template <class F> void with_fused([[maybe_unused]] int64_t activation, [[maybe_unused]] F f) {
  if constexpr (LANES == 16) {
    if (activation == SILU) f([](Vec x) __attribute__((always_inline)) { return silu(x); });
    else f([](Vec x) __attribute__((always_inline)) { return gelu_tanh(x); });
  }
}
