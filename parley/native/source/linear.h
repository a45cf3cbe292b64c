// How the product of rows and a packed weight is cut into tiles, for bf16 and int8 alike.
//
// Packed weights are [panels][steps][PANEL]: a panel is PANEL outputs, and a register holds for each of its lanes a step of
// the inner dimension, which is two bf16 or four int8 that are neighbours in it. Each output is one lane's chain over the
// steps; so neither the number of rows, nor how they are cut into tiles, nor the number of threads can change a bit.
#pragma once
#include <omp.h>

#include <algorithm>

#include "shares.h"
#include "tile.h"

constexpr long STRETCH = 32 * LANES;  // steps: a panel's part of them and the next one stay in the second cache
constexpr long SHARED = 4;     // tiles that ask for the next stretch: with more there is time to spare
constexpr long WAITING = TILE * 5 / 12;  // rows up to which a tile that is alone waits for memory more than it computes
constexpr long EARLY = 8192;   // bytes by which one of more rows asks for what it reads
constexpr long PASS = 512;     // rows whose sums are kept at once

// sums [rows][PANEL] of one panel. Memory delivers a stretch while tiles compute the one before. `last`: what follows the
// panel in memory is not needed.
template <class T> void multiply(const Pair* x, const Pair* panel, long rows, long steps, bool last, T* sums) {
  if (rows <= TILE) {
    auto run = rows <= WAITING ? choose<T, ITSELF>(rows) : choose<T, OTHERS>(rows);
    return run(x, steps, panel, steps, sums, true, {(const char*)panel + EARLY, STEP});
  }
  long tiles = (rows + TILE - 1) / TILE, shares = std::min(tiles, SHARED), k = 0;
  do {
    long count = std::min(STRETCH, steps - k);
    const Pair* here = panel + k * PANEL;
    const char* next = (const char*)(last && k + count == steps ? here : here + count * PANEL);
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, some = rows * (t + 1) / tiles - first;
      auto run = t < shares ? choose<T, OTHERS>(some) : choose<T, NOTHING>(some);
      run(x + first * steps + k, steps, here, count, sums + first * PANEL, k == 0,
          {next + count * STEP * t / shares, (STEP + shares - 1) / shares});
    }
    k += count;
  } while (k < steps);
}

// All sums of x [M][steps] and w [panels][steps][PANEL], by a team: finish(sums [rows][PANEL], m, rows, n) gets those of
// `rows` rows from m on and of a panel that begins with column n.
template <class T, class Finish>
void product(const Pair* x, const Pair* w, long M, long N, long steps, int threads, Finish finish) {
  long panels = (N + PANEL - 1) / PANEL;
  if (!M || !panels) return;
  // Rows are cut into groups so that their sums fit, and so that no thread is left without work.
  long groups = std::max((M + PASS - 1) / PASS, std::min((M + TILE - 1) / TILE, (threads + panels - 1) / panels));
  Shares shares(groups * panels, threads);
#pragma omp parallel num_threads(threads)
  {
    alignas(64) T sums[PASS * PANEL];
    for (Shares::Tasks some; (some = shares.take(omp_get_thread_num())).end;)
      for (long task = some.first; task < some.end; task++) {
        long group = task / panels, panel = task % panels;
        long first = M * group / groups, rows = M * (group + 1) / groups - first;
        multiply(x + first * steps, w + panel * steps * PANEL, rows, steps, some.last && task + 1 == some.end, sums);
        finish(sums, first, rows, panel * PANEL);
      }
  }
}

// Rows of a weight, N of `width` bytes, -> [panels][steps][PANEL]. What is beyond N or fills up a last step is zero, and
// each step has the bits of `flip` turned over.
inline void lay(const void* w, Pair* packed, long N, long width, Pair flip, int threads) {
  long panels = (N + PANEL - 1) / PANEL, steps = (width + 3) / 4;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels; p++) {
    const char* from = (const char*)w + p * PANEL * width;
    Pair* to = packed + p * steps * PANEL;
    long count = std::min<long>(PANEL, N - p * PANEL);
    for (long k = 0; k < steps; k++)
      for (long j = 0; j < PANEL; j++) {
        Pair step = 0;
        if (j < count && 4 * k + 4 <= width) memcpy(&step, from + j * width + 4 * k, 4);
        else if (j < count) memcpy(&step, from + j * width + 4 * k, width - 4 * k);
        to[k * PANEL + j] = step ^ flip;
      }
  }
}
