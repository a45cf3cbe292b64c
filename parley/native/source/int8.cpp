// Linear layers on int8: y = x W^T + bias, with one scale per row and per output, and exact sums in int32.
//
// The CPU's int8 multiplier takes signed times unsigned numbers, and only the signed operand can be broadcast from
// memory. So weights are stored as w + 128, and each row comes with 128 times the sum of its numbers, which is the
// excess that this adds to each of its outputs. Sums are modulo 2^32: only the result without the excess has to fit.
#include "kernels.h"
#include "linear.h"

namespace {

struct Rows {
  const int8_t* values;   // [M, K], K a multiple of 4
  const float* scales;    // [M]
  const int32_t* excess;  // [M]
};

template <class T>
void run(Rows x, const Four* w, const float* scales, const bf16* bias, T* y, long M, long N, long steps, int threads) {
  product<int32_t>((const Four*)x.values, w, M, N, steps, threads, [=](const int32_t* sums, long m, long rows, long n) {
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < PANEL && i < N - n; i += LANES) {
        Ints exact = (Ints)(read<Bits>(sums + r * PANEL + i) - (uint32_t)x.excess[m + r]);
        Vec v = __builtin_convertvector(exact, Vec) * x.scales[m + r] * load(scales + n + i, N - n - i);
        if (bias) v += load(bias + n + i, N - n - i);
        store(y + (m + r) * N + n + i, v, N - n - i);
      }
  });
}

}  // namespace

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
  Rows rows{x, x_scales, excess};
  if (wide) run(rows, (const Four*)packed, scales, bias, (float*)y, M, N, K / 4, threads);
  else run(rows, (const Four*)packed, scales, bias, (bf16*)y, M, N, K / 4, threads);
}

}  // extern "C"
