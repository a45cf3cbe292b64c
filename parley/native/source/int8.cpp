// Linear layers on int8: y = x W^T + bias, with one scale per row and per output (W8A8), and exact sums in int32. The
// product is that of linear.h.
//
// The CPU's int8 multiplier takes signed times unsigned numbers, and only the signed operand can be broadcast from
// memory. So weights are stored as w + 128, and each row comes with 128 times the sum of its numbers, which is the
// excess that this adds to each of its outputs (oneDNN calls it compensation). Sums are modulo 2^32: only the result
// without the excess has to fit.
#include "activations.h"
#include "kernels.h"
#include "linear.h"
#include "weight.h"

namespace {

struct Rows {
  const int8_t* values;   // [M, K], K a multiple of 4
  const float* scales;    // [M]
  const int32_t* excess;  // [M]
};

// The scales and biases of a weight's outputs, from an output on.
struct Outputs {
  const float* scales;
  const bf16* bias;  // or null

  // Results of row m, from output i on: LANES or the first `count`, and zeros
  __attribute__((always_inline)) Vec results(const Rows& x, const int32_t* sums, long m, long i, long count) const {
    Ints exact = (Ints)(load<Bits>(sums) - (uint32_t)x.excess[m]);
    Vec v = __builtin_convertvector(exact, Vec) * x.scales[m] * load(scales + i, count);
    return bias ? v + load(bias + i, count) : v;
  }
};

template <class T>
void run_gemm(Rows x, const Four* w, const float* scales, const bf16* bias, T* y, Slices slices, long N, long steps,
              int threads) {
  gemm<int32_t>((const Four*)x.values, w, slices, N, steps, threads, [=](const RowSlice& slice, long n) {
    long first = slice.first, column = slice.weight * N + n, left = N - n;
    Outputs outputs{scales + column, bias ? bias + column : nullptr};
    return [=](const int32_t* sums, long at) __attribute__((always_inline)) {
      long m = first + at / PANEL_VECTORS, i = at % PANEL_VECTORS * LANES;
      if (i < left) store(y + m * N + n + i, outputs.results(x, sums, m, i, left - i), left - i);
    };
  });
}

template <class Active>
void run_gated_gemm(Rows x, const Four* w, const float* scales, const bf16* bias, bf16* y, Slices slices, long N,
                    long steps, int threads, Active active) {
  gated_gemm<int32_t>((const Four*)x.values, w, slices, N, steps, threads,
                      [=](const RowSlice& slice, long n, const int32_t* gate_sums) {
                        long first = slice.first, column = slice.weight * 2 * N + n;
                        auto outputs = [=](long from) { return Outputs{scales + from, bias ? bias + from : nullptr}; };
                        Outputs gates = outputs(column), ups = outputs(column + N);
                        return [=](const int32_t* sums, long at) __attribute__((always_inline)) {
                          long m = first + at / PANEL_VECTORS, i = at % PANEL_VECTORS * LANES;
                          Vec gate = gates.results(x, gate_sums + at * LANES, m, i, LANES),
                              up = ups.results(x, sums, m, i, LANES);
                          store(y + m * N + n + i, active(rounded(gate)) * rounded(up), LANES);
                        };
                      });
}

}  // namespace

void int8_gated_slices(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed,
                       const float* scales, const bf16* bias, bf16* y, Slices slices, long N, long K,
                       int64_t activation, long threads) {
  with_fused(activation, [=](auto active) {
    run_gated_gemm({x, x_scales, excess}, (const Four*)packed, scales, bias, y, slices, N, K / 4, threads, active);
  });
}

void int8_linear_slices(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed,
                        const float* scales, const bf16* bias, void* y, Slices slices, long N, long K, bool as_fp32,
                        long threads) {
  Rows rows{x, x_scales, excess};
  if (as_fp32) run_gemm(rows, (const Four*)packed, scales, bias, (float*)y, slices, N, K / 4, threads);
  else run_gemm(rows, (const Four*)packed, scales, bias, (bf16*)y, slices, N, K / 4, threads);
}

extern "C" {

// Bytes of a packed weight [N, K].
int64_t int8_size(int64_t N, int64_t K) { return (N + PANEL - 1) / PANEL * PANEL * ((K + 3) / 4 * 4); }

// w [N, K] -> packed
void int8_pack(const int8_t* w, uint8_t* packed, int64_t N, int64_t K, int64_t threads) {
  pack_panels(w, (Four*)packed, N, K, 0x80808080, threads);  // adds 128 to each byte
}

// y [M, N] as bf16, or as fp32 if `as_fp32`, of rows x and weights with scales [N]. K is a multiple of 4; bias may be
// null.
void int8_linear(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed,
                 const float* scales, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t as_fp32,
                 int64_t threads) {
  RowSlice all{0, M, 0};
  int8_linear_slices(x, x_scales, excess, packed, scales, bias, y, {&all, M > 0}, N, K, as_fp32, threads);
}

}  // extern "C"
