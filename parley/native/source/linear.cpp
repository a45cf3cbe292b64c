// Linear layers on bf16: y = x W^T + bias, with the weights in an order of their own.
//
// Each output element is one SIMD lane's chain over K, from first to last, whatever else is computed beside it. Its
// accumulator may rest in memory between two stretches of K, which loses nothing. So neither the number of rows, nor
// how they are cut into tiles, nor the number of threads can change a bit.
//
// Packed weights are [panels][K / 2][PANEL][2]: a panel is PANEL outputs, and a register holds a pair of neighbours in K
// for each of its lanes. Outputs beyond N and an odd K are filled with zeros.
#include <omp.h>

#include <algorithm>

#include "tile.h"

namespace {

constexpr long STRETCH = 256;  // pairs of K: a panel's part of them stays in the first cache while tiles pass
constexpr long PASS = 512;     // rows whose sums are kept at once

// sums [rows][PANEL] of one panel
void multiply(const Pair* x, const Pair* panel, long rows, long steps, float* sums) {
  long tiles = (rows + TILE - 1) / TILE, stretch = tiles == 1 ? steps : std::min(steps, STRETCH), k = 0;
  do {
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
      Tile run = t ? choose<false>(count) : choose<true>(count);
      run(x + first * steps + k, steps, panel + k * PANEL, PANEL, std::min(stretch, steps - k), sums + first * PANEL, PANEL,
          k == 0);
    }
    k += stretch;
  } while (k < steps);
}

template <class T> void finish(const float* sums, const bf16* bias, T* y, long rows, long stride, long count) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < PANEL && i < count; i += LANES) {
      Vec v = read<Vec>(sums + r * PANEL + i);
      if (bias) v += load(bias + i, count - i);
      store(y + r * stride + i, v, count - i);
    }
}

template <class T>
void run(const Pair* x, const Pair* w, const bf16* bias, T* y, long M, long N, long steps, int threads) {
  long panels = (N + PANEL - 1) / PANEL;
  if (!M || !panels) return;
  // Rows are cut into groups so that their sums fit, and so that no thread is left without work.
  long groups = std::max((M + PASS - 1) / PASS, std::min((M + TILE - 1) / TILE, (threads + panels - 1) / panels));
  long tasks = groups * panels;
#pragma omp parallel num_threads(threads)
  {
    alignas(64) float sums[PASS * PANEL];
    long me = omp_get_thread_num(), team = omp_get_num_threads();
    for (long task = tasks * me / team; task < tasks * (me + 1) / team; task++) {
      long group = task / panels, panel = task % panels, n = panel * PANEL;
      long first = M * group / groups, rows = M * (group + 1) / groups - first;
      multiply(x + first * steps, w + panel * steps * PANEL, rows, steps, sums);
      finish(sums, bias ? bias + n : nullptr, y + first * N + n, rows, N, N - n);
    }
  }
}

}  // namespace

extern "C" {

// Numbers of a weight [N, K] when it is packed.
int64_t packed_size(int64_t N, int64_t K) { return (N + PANEL - 1) / PANEL * PANEL * ((K + 1) / 2 * 2); }

// w [N, K] -> packed
void pack(const bf16* w, bf16* packed, int64_t N, int64_t K, int64_t threads) {
  long panels = (N + PANEL - 1) / PANEL, steps = (K + 1) / 2;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels; p++) {
    const bf16* from = w + p * PANEL * K;
    bf16* to = packed + p * steps * PANEL * 2;
    if ((p + 1) * PANEL <= N && K % 2 == 0) {
      for (long k = 0; k < steps; k++)
        for (long j = 0; j < PANEL; j++) ((Pair*)to)[k * PANEL + j] = ((const Pair*)from)[j * steps + k];
      continue;
    }
    long count = std::min<long>(PANEL, N - p * PANEL);
    for (long k = 0; k < 2 * steps; k++)
      for (long j = 0; j < PANEL; j++)
        to[(k / 2 * PANEL + j) * 2 + k % 2] = j < count && k < K ? from[j * K + k] : 0;
  }
}

// y [M, N] = x [M, K] W^T + bias, as bf16, or as fp32 if `wide`. K is even, bias may be null.
void linear(const bf16* x, const bf16* packed, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t wide,
            int64_t threads) {
  if (wide) run((const Pair*)x, (const Pair*)packed, bias, (float*)y, M, N, K / 2, threads);
  else run((const Pair*)x, (const Pair*)packed, bias, (bf16*)y, M, N, K / 2, threads);
}

}  // extern "C"
