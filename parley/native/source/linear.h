// Divides the product of rows and a packed weight into tiles, for bf16 and int8 alike.
//
// Packed weights are [panels][steps][PANEL]: a panel is PANEL outputs, and each lane of a register holds one step of
// the inner dimension, which is two bf16 or four int8 adjacent in it. Each output is one lane's chain over the steps,
// so neither the number of rows, nor their division into tiles, nor the number of threads can change a bit.
#pragma once
#include <omp.h>

#include <algorithm>
#include <climits>
#include <type_traits>
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
constexpr long VECTORS = PANEL / LANES;  // of a row in a panel

// Sums of a panel that become results: write(sums, i) writes vector i of [rows][PANEL].
template <class T, class Write> struct FinishedSums {
  Write write;
  const T* sums;
  long written = 0, count = 0;  // vectors

  bool left() const { return written < count; }

  // Inline, since a call would save all registers of the tile
  __attribute__((always_inline)) void next() {
    write(sums + written * LANES, written);
    written++;
  }

  void write_all() {
    while (left()) next();
  }

  void continue_from(const FinishedSums& copy) { written = copy.written; }
};

// Computes the sums [rows][PANEL] of one panel. Memory delivers a stretch while tiles compute the one before. `after`: the
// panel that is needed next. If `writes`, sums are written, those of a tile while the next one computes.
template <class T, class Write>
void multiply(const Pair* x, const Pair* panel, long rows, long steps, const Pair* after, T* sums, Write write,
              bool writes = true) {
  // AVX2 has no registers left for other work
  using Other = std::conditional_t<LANES == 16, FinishedSums<T, Write>, NoOtherWork>;
  constexpr long WORDS = Operands<T>::WORDS;
  FinishedSums<T, Write> finished{write, sums};
  NoOtherWork none;
  if (rows <= TILE) {
    auto run = rows <= WAITING ? choose<T, ITSELF>(rows) : choose<T, OTHERS>(rows);
    run(x, WORDS * steps, panel, steps, sums, true, {(const char*)panel + EARLY, STEP}, none);
    finished.count = writes ? rows * VECTORS : 0;
    return finished.write_all();
  }
  Other* other;
  if constexpr (LANES == 16) other = &finished;
  else other = &none;
  long tiles = (rows + TILE - 1) / TILE, shares = std::min(tiles, SHARED), k = 0;
  do {
    long count = std::min(STRETCH, steps - k);
    bool last = k + count == steps;
    const Pair* here = panel + k * PANEL;
    const char* next = (const char*)(last ? after : here + count * PANEL);
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, end = rows * (t + 1) / tiles;
      auto run = t < shares ? choose<T, OTHERS, Other>(end - first) : choose<T, NOTHING, Other>(end - first);
      run(x + WORDS * (first * steps + k), WORDS * steps, here, count, sums + first * PANEL, k == 0,
          {next + count * STEP * t / shares, (STEP + shares - 1) / shares}, *other);
      if (!last || !writes) continue;
      finished.write_all();
      finished.count = end * VECTORS;
    }
    k += count;
  } while (k < steps);
  finished.write_all();
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

// A slice's rows, and a panel of its weight; of a gated product, the panel of gates and that of the same ups.
struct PanelTask {
  RowSlice slice;
  long panel;
};

// Calls compute(rows, task, next) for each of the slices and of `panels`, by a team. `rows` is x [M][steps] from the
// slice's first row on, spread; `next` is the task after it, or the same if it is the last.
template <class T, class Compute>
void each_panel(const Pair* x, Slices slices, long panels, long steps, int threads, Compute compute) {
  SpreadRows<T> spread(x, steps);
  std::vector<RowSlice> pieces = cut_slices(slices, panels, spread.fitting(PASS), threads);
  for (size_t begin = 0, end; begin < pieces.size(); begin = end) {  // pieces whose rows are spread at once
    long first = pieces[begin].first, rows = 0;
    auto rows_with = [&](size_t piece) { return pieces[piece].first + pieces[piece].rows - first; };
    for (end = begin; end < pieces.size() && (end == begin || rows_with(end) <= spread.fitting(LONG_MAX)); end++)
      rows = rows_with(end);
    spread.fill(x, first, rows, threads);
    Shares shares((end - begin) * panels, threads);
#pragma omp parallel num_threads(threads)
    for (Shares::Tasks some; (some = shares.take(omp_get_thread_num())).end;)
      for (long i = begin * panels + some.first, past = begin * panels + some.end; i < past; i++) {
        long next = some.last && i + 1 == past ? i : i + 1;
        PanelTask task{pieces[i / panels], i % panels};
        compute(spread.row(task.slice.first), task, PanelTask{pieces[next / panels], next % panels});
      }
  }
}

// The product of the rows x [M][steps] of each slice and its weight of w [weights][panels][steps][PANEL], by a team.
// writer(slice, n) returns the function that writes the sums of a slice's rows and of the panel whose first column is n, as
// in FinishedSums.
template <class T, class Writer>
void product(const Pair* x, const Pair* w, Slices slices, long N, long steps, int threads, Writer writer) {
  long panels = (N + PANEL - 1) / PANEL;
  auto panel_of = [=](const PanelTask& task) { return w + (task.slice.weight * panels + task.panel) * steps * PANEL; };
  each_panel<T>(x, slices, panels, steps, threads, [=](const Pair* rows, const PanelTask& task, const PanelTask& next) {
    alignas(64) T sums[PASS * PANEL];
    multiply(rows, panel_of(task), task.slice.rows, steps, panel_of(next), sums, writer(task.slice, task.panel * PANEL));
  });
}

// As product, of weights [gates | ups] with N outputs in each half; N is a multiple of PANEL. A task computes a panel of the
// gates and then that of the ups; writer(slice, n, gates) gets the sums of the gates.
template <class T, class Writer>
void gated_product(const Pair* x, const Pair* w, Slices slices, long N, long steps, int threads, Writer writer) {
  long panels = N / PANEL;
  auto gates_of = [=](const PanelTask& task) { return w + (task.slice.weight * 2 * panels + task.panel) * steps * PANEL; };
  each_panel<T>(x, slices, panels, steps, threads, [=](const Pair* rows, const PanelTask& task, const PanelTask& next) {
    alignas(64) T gates[PASS * PANEL], sums[PASS * PANEL];
    const Pair *panel = gates_of(task), *ups = panel + panels * steps * PANEL;
    auto write = writer(task.slice, task.panel * PANEL, (const T*)gates);
    multiply(rows, panel, task.slice.rows, steps, ups, gates, write, false);
    multiply(rows, ups, task.slice.rows, steps, gates_of(next), sums, write);
  });
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
