// Divides the product of rows and a packed weight into tiles, for bf16 and int8 alike.
//
// Packed weights are [panels][steps][PANEL]: a panel is PANEL outputs, and each lane of a register holds one step of
// the inner dimension, which is two bf16 or four int8 adjacent in it. Each output is one lane's chain over the steps,
// so neither the number of rows, nor their division into tiles, nor the number of threads can change a bit.
#pragma once
#include <omp.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "slices.h"
#include "shares.h"
#include "tile.h"

constexpr long STRETCH = 32 * LANES;  // steps: a panel's slice of them and the next one fit in the L2 cache
constexpr long SHARED = 4;     // tiles that prefetch the next stretch; with more there is time to spare
constexpr long WAITING = TILE * 5 / 12;  // up to this many rows, a single tile waits for memory more than it computes
constexpr long EARLY = 8192;   // prefetch distance of a single tile with more rows, in bytes
constexpr long PASS = 512;     // rows whose sums are kept at once
constexpr long NEAR = 1 << 18; // words of spread rows that a pass has, so that they stay in the L2 cache
constexpr long ALONE = 1 << 14;  // words that one thread spreads sooner than several

// sums [rows][PANEL] of one panel. Memory delivers a stretch while tiles compute the one before. `after`: the panel that
// is needed next.
template <class T> void multiply(const Pair* x, const Pair* panel, long rows, long steps, const Pair* after, T* sums) {
  constexpr long WORDS = Operands<T>::WORDS;
  if (rows <= TILE) {
    auto run = rows <= WAITING ? choose<T, ITSELF>(rows) : choose<T, OTHERS>(rows);
    return run(x, WORDS * steps, panel, steps, sums, true, {(const char*)panel + EARLY, STEP});
  }
  long tiles = (rows + TILE - 1) / TILE, shares = std::min(tiles, SHARED), k = 0;
  do {
    long count = std::min(STRETCH, steps - k);
    const Pair* here = panel + k * PANEL;
    const char* next = (const char*)(k + count == steps ? after : here + count * PANEL);
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, some = rows * (t + 1) / tiles - first;
      auto run = t < shares ? choose<T, OTHERS>(some) : choose<T, NOTHING>(some);
      run(x + WORDS * (first * steps + k), WORDS * steps, here, count, sums + first * PANEL, k == 0,
          {next + count * STEP * t / shares, (STEP + shares - 1) / shares});
    }
    k += count;
  } while (k < steps);
}

// Rows of a product, spread as it reads them. A product that does not need that reads them where they are.
template <class T> class SpreadRows {
  static constexpr long WORDS = Operands<T>::WORDS;
  const Pair* rows;
  long first = 0, steps;

 public:
  SpreadRows(const Pair* x, long steps) : rows(x), steps(steps) {}

  // The first of this number of rows that fit the L2 cache
  long fitting(long count) const {
    return WORDS == 1 ? count : std::clamp(NEAR / std::max(1l, WORDS * steps) / TILE * TILE, 4l * TILE, count);
  }

  const Pair* row(long m) const { return rows + WORDS * (m - first) * steps; }

  // Spreads `count` rows of x from `from` on.
  void fill(const Pair* x, long from, long count, int threads) {
    if constexpr (WORDS > 1) {
      static thread_local std::vector<uint32_t> memory;
      if ((long)memory.size() < WORDS * count * steps) memory.resize(WORDS * count * steps);
      Pair* to = memory.data();
      rows = to, first = from;
#pragma omp parallel for num_threads(count * steps < ALONE ? 1 : threads)
      for (long m = 0; m < count; m++) spread<T>(x + (from + m) * steps, steps, to + WORDS * m * steps);
    }
  }
};

// All sums of the rows x [M][steps] of each slice and its weight of w [weights][panels][steps][PANEL], by a team.
// finish(sums [rows][PANEL], slice, n) receives those of a slice's rows and of the panel whose first column is n.
template <class T, class Finish>
void product(const Pair* x, const Pair* w, Slices slices, long N, long steps, int threads, Finish finish) {
  long panels = (N + PANEL - 1) / PANEL;
  SpreadRows<T> spread(x, steps);
  std::vector<RowSlice> pieces = cut_slices(slices, panels, spread.fitting(PASS), threads);
  auto panel_of = [&](long task) { return w + (pieces[task / panels].weight * panels + task % panels) * steps * PANEL; };
  for (size_t begin = 0, end; begin < pieces.size(); begin = end) {  // pieces whose rows are spread at once
    long first = pieces[begin].first, rows = 0;
    auto rows_with = [&](size_t piece) { return pieces[piece].first + pieces[piece].rows - first; };
    for (end = begin; end < pieces.size() && (end == begin || rows_with(end) <= spread.fitting(LONG_MAX)); end++)
      rows = rows_with(end);
    spread.fill(x, first, rows, threads);
    Shares shares((end - begin) * panels, threads);
#pragma omp parallel num_threads(threads)
    {
      alignas(64) T sums[PASS * PANEL];
      for (Shares::Tasks some; (some = shares.take(omp_get_thread_num())).end;)
        for (long task = begin * panels + some.first, past = begin * panels + some.end; task < past; task++) {
          const RowSlice& slice = pieces[task / panels];
          bool last = some.last && task + 1 == past;
          multiply(spread.row(slice.first), panel_of(task), slice.rows, steps, panel_of(last ? task : task + 1), sums);
          finish(sums, slice, task % panels * PANEL);
        }
    }
  }
}

// Packs rows of a weight, N of `width` bytes, into [panels][steps][PANEL]. The padding of N and of the last step is
// zero, and each step is XORed with `flip`.
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
