// A packed weight with all that its kernel needs.
#pragma once
#include "row_slices.h"
#include "vector.h"

enum Form : int64_t { BF16, INT8, GROUPED };

struct Linear {
  int64_t form, out_features, in_features, code, group;  // `in_features` is a multiple of 8
  const void* weight;
  const float* scales;   // of outputs, for int8 and perhaps for groups
  const bf16* bias;      // or null
  const int64_t* order;  // the permutation of a row's numbers that the weight needs; or null
};

// y [M, N] = x [M, K] W^T + bias for the rows of each slice, with its weight of several [N, K] that are stored one
// after another, as are their biases and scales. Otherwise as the function whose name lacks `_slices`.
void linear_slices(const bf16* x, const bf16* packed, const bf16* bias, void* y, Slices slices, long N, long K,
                   bool as_fp32, long threads);
void int8_linear_slices(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed,
                        const float* scales, const bf16* bias, void* y, Slices slices, long N, long K, bool as_fp32,
                        long threads);
void grouped_linear_slices(long code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias,
                           void* y, Slices slices, long N, long K, long group, bool as_fp32, long threads);

// Rows as the input of a linear layer: as bf16, or as int8 (see int8.cpp).
struct LinearInput {
  bf16* plain;
  int8_t* values;
  float* scales;
  int32_t* excess;
};

// Whether `linear_gated` computes such a layer and its activation, and sooner than in two steps, for `rows` rows of a
// slice.
bool is_gate_fused(const Linear& gate_up, int64_t activation, int64_t gated, long rows);

// y [M, out / 2] = activation(gate) * up of the rows [gate | up] that the two steps would write, with the same bits.
void linear_gated(const Linear& gate_up, const LinearInput& x, bf16* y, Slices slices, int64_t activation,
                  long threads);

// Its forms; N = out / 2
void linear_gated_slices(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, Slices slices, long N, long K,
                         int64_t activation, long threads);
void int8_gated_slices(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed,
                       const float* scales, const bf16* bias, bf16* y, Slices slices, long N, long K,
                       int64_t activation, long threads);
