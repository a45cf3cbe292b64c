// Linear layers on bf16: y = x W^T + bias, with sums in fp32. The product is that of linear.h; this adds biases, and
// the activation of a gated MLP, whose gate and up are computed in one pass.
#include "activations.h"
#include "kernels.h"
#include "linear.h"
#include "weight.h"

namespace {

template <class T>
void run_gemm(const Pair* x, const Pair* w, const bf16* bias, T* y, Slices slices, long N, long steps, int threads) {
  gemm<float>(x, w, slices, N, steps, threads, [=](const RowSlice& slice, long n) {
    long first = slice.first, left = N - n;
    const bf16* own_bias = bias ? bias + slice.weight * N + n : nullptr;
    return [=](const float* sums, long at) __attribute__((always_inline)) {
      long m = first + at / PANEL_VECTORS, i = at % PANEL_VECTORS * LANES;
      if (i >= left) return;
      Vec v = load<Vec>(sums);
      if (own_bias) v += load(own_bias + i, left - i);
      store(y + m * N + n + i, v, left - i);
    };
  });
}

template <class Active>
void run_gated_gemm(const Pair* x, const Pair* w, const bf16* bias, bf16* y, Slices slices, long N, long steps,
                    int threads, Active active) {
  gated_gemm<float>(x, w, slices, N, steps, threads, [=](const RowSlice& slice, long n, const float* gate_sums) {
    long first = slice.first;
    const bf16* own_bias = bias ? bias + slice.weight * 2 * N + n : nullptr;
    return [=](const float* sums, long at) __attribute__((always_inline)) {
      long m = first + at / PANEL_VECTORS, i = at % PANEL_VECTORS * LANES;
      Vec gate = load<Vec>(gate_sums + at * LANES), up = load<Vec>(sums);
      if (own_bias) gate += load(own_bias + i), up += load(own_bias + N + i);
      store(y + m * N + n + i, active(rounded(gate)) * rounded(up), LANES);
    };
  });
}

}  // namespace

// The fused activation is no faster where a gemm leaves no registers for it, nor with few rows: their gemm waits for
// memory, and reads one sequence of panels faster than panels from two halves of the weight in turn.
bool is_gate_fused(const Linear& gate_up, int64_t activation, int64_t gated, long rows) {
  return LANES == 16 && gated && is_fused(activation) && gate_up.form != GROUPED && !gate_up.order &&
         gate_up.out_features % (2 * PANEL) == 0 && rows > TILE_ROWS;
}

void linear_gated(const Linear& gate_up, const LinearInput& x, bf16* y, Slices slices, int64_t activation,
                  long threads) {
  long N = gate_up.out_features / 2, K = gate_up.in_features;
  if (gate_up.form == INT8)
    int8_gated_slices(x.values, x.scales, x.excess, (const uint8_t*)gate_up.weight, gate_up.scales, gate_up.bias, y,
                      slices, N, K, activation, threads);
  else
    linear_gated_slices(x.plain, (const bf16*)gate_up.weight, gate_up.bias, y, slices, N, K, activation, threads);
}

void linear_gated_slices(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, Slices slices, long N, long K,
                         int64_t activation, long threads) {
  with_fused(activation, [=](auto active) {
    run_gated_gemm((const Pair*)x, (const Pair*)packed, bias, y, slices, N, K / 2, threads, active);
  });
}

void linear_slices(const bf16* x, const bf16* packed, const bf16* bias, void* y, Slices slices, long N, long K,
                   bool as_fp32, long threads) {
  if (as_fp32) run_gemm((const Pair*)x, (const Pair*)packed, bias, (float*)y, slices, N, K / 2, threads);
  else run_gemm((const Pair*)x, (const Pair*)packed, bias, (bf16*)y, slices, N, K / 2, threads);
}

extern "C" {

// Numbers in a packed weight [N, K].
int64_t packed_size(int64_t N, int64_t K) { return (N + PANEL - 1) / PANEL * PANEL * ((K + 1) / 2 * 2); }

// w [N, K] -> packed
void pack(const bf16* w, bf16* packed, int64_t N, int64_t K, int64_t threads) {
  pack_panels(w, (Pair*)packed, N, K * sizeof(bf16), 0, threads);
}

// y [M, N] = x [M, K] W^T + bias, as bf16, or as fp32 if `as_fp32`. K is even; bias may be null.
void linear(const bf16* x, const bf16* packed, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K,
            int64_t as_fp32, int64_t threads) {
  RowSlice all{0, M, 0};
  linear_slices(x, packed, bias, y, {&all, M > 0}, N, K, as_fp32, threads);
}

// y [heads, M, N] = x [heads, M, K] W^T with a weight of each head, which are packed one after another. K is even.
void linear_heads(const bf16* x, const bf16* packed, bf16* y, int64_t M, int64_t heads, int64_t N, int64_t K,
                  int64_t threads) {
  std::vector<RowSlice> slices;
  for (long head = 0; head < heads; head++) slices.push_back({head * M, M, head});
  linear_slices(x, packed, nullptr, y, {slices.data(), M > 0 ? heads : 0}, N, K, false, threads);
}

}  // extern "C"
