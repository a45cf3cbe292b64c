// Linear layers on int8: y = x W^T + bias, with one scale per row and per output, and exact sums in int32.
//
// The CPU's int8 multiplier takes signed times unsigned numbers, and only the signed operand can be broadcast from
// memory. So weights are stored as w + 128, and each row comes with 128 times the sum of its numbers, which is the
// excess that this adds to each of its outputs. Sums are modulo 2^32: only the result without the excess has to fit.
#include "kernels.h"
#include "linear.h"
#include "weight.h"

namespace {

struct Rows {
  const int8_t* values;   // [M, K], K a multiple of 4
  const float* scales;    // [M]
  const int32_t* excess;  // [M]
};

template <class T>
void run(Rows x, const Four* w, const float* scales, const bf16* bias, T* y, Slices slices, long N, long steps,
         int threads) {
  auto finish = [=](const int32_t* sums, const RowSlice& slice, long n) {
    long first = slice.weight * N + n;  // of scales and biases
    for (long r = 0; r < slice.rows; r++)
      for (long i = 0; i < PANEL && i < N - n; i += LANES) {
        long m = slice.first + r;
        Ints exact = (Ints)(read<Bits>(sums + r * PANEL + i) - (uint32_t)x.excess[m]);
        Vec v = __builtin_convertvector(exact, Vec) * x.scales[m] * load(scales + first + i, N - n - i);
        if (bias) v += load(bias + first + i, N - n - i);
        store(y + m * N + n + i, v, N - n - i);
      }
  };
  product<int32_t>((const Four*)x.values, w, slices, N, steps, threads, finish);
}

}  // namespace

void int8_linear_slices(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed,
                       const float* scales, const bf16* bias, void* y, Slices slices, long N, long K, bool wide,
                       long threads) {
  Rows rows{x, x_scales, excess};
  if (wide) run(rows, (const Four*)packed, scales, bias, (float*)y, slices, N, K / 4, threads);
  else run(rows, (const Four*)packed, scales, bias, (bf16*)y, slices, N, K / 4, threads);
}

extern "C" {

// Bytes of a packed weight [N, K].
int64_t int8_size(int64_t N, int64_t K) { return (N + PANEL - 1) / PANEL * PANEL * ((K + 3) / 4 * 4); }

// w [N, K] -> packed
void int8_pack(const int8_t* w, uint8_t* packed, int64_t N, int64_t K, int64_t threads) {
  lay(w, (Four*)packed, N, K, 0x80808080, threads);  // adds 128 to each byte
}

// y [M, N] as bf16, or as fp32 if `wide`, of rows x and weights with scales [N]. K is a multiple of 4; bias may be
// null.
void int8_linear(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed, const float* scales,
                 const bf16* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t wide, int64_t threads) {
  RowSlice all{0, M, 0};
  int8_linear_slices(x, x_scales, excess, packed, scales, bias, y, {&all, M > 0}, N, K, wide, threads);
}

}  // extern "C"
