// Linear layers on bf16: y = x W^T + bias, with sums in fp32.
#include "kernels.h"
#include "linear.h"
#include "weight.h"

namespace {

template <class T>
void run(const Pair* x, const Pair* w, const bf16* bias, T* y, Slices slices, long N, long steps, int threads) {
  product<float>(x, w, slices, N, steps, threads, [=](const float* sums, const RowSlice& slice, long n) {
    for (long r = 0; r < slice.rows; r++)
      for (long i = 0; i < PANEL && i < N - n; i += LANES) {
        Vec v = read<Vec>(sums + r * PANEL + i);
        if (bias) v += load(bias + slice.weight * N + n + i, N - n - i);
        store(y + (slice.first + r) * N + n + i, v, N - n - i);
      }
  });
}

}  // namespace

void linear_slices(const bf16* x, const bf16* packed, const bf16* bias, void* y, Slices slices, long N, long K,
                  bool wide, long threads) {
  if (wide) run((const Pair*)x, (const Pair*)packed, bias, (float*)y, slices, N, K / 2, threads);
  else run((const Pair*)x, (const Pair*)packed, bias, (bf16*)y, slices, N, K / 2, threads);
}

extern "C" {

// Numbers in a packed weight [N, K].
int64_t packed_size(int64_t N, int64_t K) { return (N + PANEL - 1) / PANEL * PANEL * ((K + 1) / 2 * 2); }

// w [N, K] -> packed
void pack(const bf16* w, bf16* packed, int64_t N, int64_t K, int64_t threads) {
  lay(w, (Pair*)packed, N, K * sizeof(bf16), 0, threads);
}

// y [M, N] = x [M, K] W^T + bias, as bf16, or as fp32 if `wide`. K is even; bias may be null.
void linear(const bf16* x, const bf16* packed, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t wide,
            int64_t threads) {
  RowSlice all{0, M, 0};
  linear_slices(x, packed, bias, y, {&all, M > 0}, N, K, wide, threads);
}

// y [heads, M, N] = x [heads, M, K] W^T with a weight of each head, which are packed one after another. K is even.
void linear_heads(const bf16* x, const bf16* packed, bf16* y, int64_t M, int64_t heads, int64_t N, int64_t K, int64_t threads) {
  std::vector<RowSlice> slices;
  for (long head = 0; head < heads; head++) slices.push_back({head * M, M, head});
  linear_slices(x, packed, nullptr, y, {slices.data(), M > 0 ? heads : 0}, N, K, false, threads);
}

}  // extern "C"
