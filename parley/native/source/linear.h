// The matrix product of linear layers (GEMM): rows of x times a packed weight, for bf16 and int8 alike.
//
// A packed weight is [panels][steps][PANEL]: a panel is PANEL outputs, and each lane of a register holds one step of
// the inner dimension K, which is two bf16 or four int8 adjacent in it. Blocking, from the outside in:
//
//   tasks     up to ROW_BLOCK rows times one panel, whose sums [rows][PANEL] a thread keeps; divided among the threads
//   K blocks  K_BLOCK steps of the panel, which stay in the L2 cache while all tiles read them and the next ones load
//   tiles     up to TILE_ROWS rows: the micro-kernel of tile.h
//
// The last two are in panel_product.h, which also has a form for AMX with blocks of its own. Each output is one chain
// over the steps, so neither the number of rows, nor their division into tiles, nor the number of threads can change a
// bit.
#pragma once
#include <omp.h>

#include <algorithm>
#include <climits>
#include <type_traits>
#include <vector>

#include "panel_product.h"
#include "row_slices.h"
#include "threads.h"

constexpr long ROW_BLOCK = 512;         // rows whose sums are kept at once
constexpr long L2_WORDS = 1 << 18;      // words of rows that a pass reads, so that they stay in the L2 cache
constexpr long SERIAL_WORDS = 1 << 14;  // words that one thread expands sooner than several

// Rows of x, expanded as the micro-kernel reads them. One that does not need that reads them where they are.
template <class T> class ExpandedRows {
  static constexpr long WORDS = Operands<T>::WORDS;
  static constexpr bool IN_PLACE = WORDS == 1 && !HAS_REMAINDERS<T>;
  InputRows<T> rows;
  long first = 0, steps;

 public:
  ExpandedRows(const Pair* x, long steps) : rows(x), steps(steps) {}

  // The first of this number of rows that fit the L2 cache. Rows that are not expanded may come from the L3 cache,
  // which is too slow only for AMX.
  long rows_in_l2(long count) const {
    if (IN_PLACE && !HAS_AMX) return count;
    constexpr long ROWS = HAS_AMX ? 2 * MATRIX_ROWS : TILE_ROWS;
    return std::clamp(L2_WORDS / std::max(1l, WORDS * steps) / ROWS * ROWS, 4 * ROWS, count);
  }

  InputRows<T> from(long m) const { return rows.from(m - first, steps); }

  // Spreads `count` rows of x from `from` on.
  void fill(const Pair* x, long from, long count, int threads) {
    if constexpr (IN_PLACE) return;
    static thread_local std::vector<uint32_t> words, counts;
    static thread_local std::vector<Remainder> remainders;
    auto grow = [](auto& memory, long size) {
      if ((long)memory.size() < size) memory.resize(size);
      return memory.data();
    };
    Pair* to = grow(words, WORDS * count * steps);
    first = from;
    int team = count * steps < SERIAL_WORDS ? 1 : threads;
    if constexpr (HAS_REMAINDERS<T>) {
      Remainder* rest = grow(remainders, count * steps);
      uint32_t* rest_counts = grow(counts, count);
      rows = {to, x + from * steps, rest, rest_counts};
#pragma omp parallel for num_threads(team)
      for (long m = 0; m < count; m++)
        rest_counts[m] = split_remainders(x + (from + m) * steps, steps, to + m * steps, rest + m * steps);
    } else {
      rows = InputRows<T>(to);
#pragma omp parallel for num_threads(team)
      for (long m = 0; m < count; m++) expand<T>(x + (from + m) * steps, steps, to + WORDS * m * steps);
    }
  }
};

// A slice's rows, and a panel of its weight; of a gated product, the panel of gates and that of the same ups.
struct PanelTask {
  RowSlice slice;
  long panel;
};

// Calls compute(rows, task, next, registers) for each of the slices and of `panels`, by a team. `rows` is x [M][steps]
// from the slice's first row on, expanded; `next` is the task after it, or the same if it is the last.
template <class T, class Compute>
void for_each_panel(const Pair* x, Slices slices, long panels, long steps, int threads, Compute compute) {
  ExpandedRows<T> expanded(x, steps);
  std::vector<RowSlice> pieces = split_slices(slices, panels, expanded.rows_in_l2(ROW_BLOCK), threads);
  for (size_t begin = 0, end; begin < pieces.size(); begin = end) {  // pieces whose rows are expanded at once
    long first = pieces[begin].first, rows = 0;
    auto rows_with = [&](size_t piece) { return pieces[piece].first + pieces[piece].rows - first; };
    for (end = begin; end < pieces.size() && (end == begin || rows_with(end) <= expanded.rows_in_l2(LONG_MAX)); end++)
      rows = rows_with(end);
    expanded.fill(x, first, rows, threads);
    WorkStealing queue((end - begin) * panels, threads);
    run_parallel(threads, [&] {
      MatrixRegisters registers;
      for (WorkStealing::Tasks some; (some = queue.next_tasks(omp_get_thread_num())).end;)
        for (long i = begin * panels + some.first, past = begin * panels + some.end; i < past; i++) {
          long next = some.last && i + 1 == past ? i : i + 1;
          PanelTask task{pieces[i / panels], i % panels};
          compute(expanded.from(task.slice.first), task, PanelTask{pieces[next / panels], next % panels}, registers);
        }
    });
  }
}

// The product of the rows x [M][steps] of each slice and its weight of w [weights][panels][steps][PANEL], by a team.
// writer(slice, n) returns the function that writes the sums of a slice's rows and of the panel whose first column is
// n, as in WriteEpilogue.
template <class T, class Writer>
void gemm(const Pair* x, const Pair* w, Slices slices, long N, long steps, int threads, Writer writer) {
  long panels = (N + PANEL - 1) / PANEL;
  auto panel_of = [=](const PanelTask& task) { return w + (task.slice.weight * panels + task.panel) * steps * PANEL; };
  for_each_panel<T>(x, slices, panels, steps, threads,
                    [=](InputRows<T> rows, const PanelTask& task, const PanelTask& next, MatrixRegisters& registers) {
                      alignas(64) T sums[ROW_BLOCK * PANEL];
                      multiply_panel(rows, panel_of(task), task.slice.rows, steps, panel_of(next), sums, registers,
                                     writer(task.slice, task.panel * PANEL));
                    });
}

// As gemm, of weights [gates | ups] with N outputs in each half; N is a multiple of PANEL. A task computes a panel of
// the gates and then that of the ups; writer(slice, n, gates) gets the sums of the gates.
template <class T, class Writer>
void gated_gemm(const Pair* x, const Pair* w, Slices slices, long N, long steps, int threads, Writer writer) {
  long panels = N / PANEL;
  auto gates_of = [=](const PanelTask& task) {
    return w + (task.slice.weight * 2 * panels + task.panel) * steps * PANEL;
  };
  for_each_panel<T>(x, slices, panels, steps, threads,
                    [=](InputRows<T> rows, const PanelTask& task, const PanelTask& next, MatrixRegisters& registers) {
                      alignas(64) T gates[ROW_BLOCK * PANEL], sums[ROW_BLOCK * PANEL];
                      const Pair *panel = gates_of(task), *ups = panel + panels * steps * PANEL;
                      auto write = writer(task.slice, task.panel * PANEL, (const T*)gates);
                      multiply_panel(rows, panel, task.slice.rows, steps, ups, gates, registers, write, false);
                      multiply_panel(rows, ups, task.slice.rows, steps, gates_of(next), sums, registers, write);
                    });
}

// Packs rows of a weight, N of `width` bytes, into [panels][steps][PANEL]. The padding of N and of the last step is
// zero, and each step is XORed with `flip`.
inline void pack_panels(const void* w, Pair* packed, long N, long width, Pair flip, int threads) {
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
