// The micro-kernel of linear layers: up to TILE_ROWS rows of x times one packed panel of PANEL outputs (MR and NR in
// the terms of GotoBLAS and BLIS), with all sums in registers.
//
// x is [rows][steps] and the panel [steps][PANEL], in 32-bit words. A word is one step of the inner dimension K: two
// adjacent bf16 (sums in fp32) or four adjacent int8 (sums in int32). A panel is two registers wide. Each step loads
// these two, broadcasts one word of each row, and multiplies it by both. TILE_ROWS is the number of rows whose sums
// still leave registers for that.
//
// Each sum is one SIMD lane's chain over the steps, from first to last. It can be stored between two blocks of K
// without loss, so the division of a larger product into tiles cannot change a bit.
#pragma once
#include "operands.h"

constexpr int PANEL = 2 * LANES;  // columns of a tile
constexpr int TILE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;
constexpr int STEP_BYTES = PANEL * sizeof(Pair);  // bytes of a panel in each step
constexpr long PREFETCH_DISTANCE = 4096;          // prefetch distance of OWN_WEIGHTS, in bytes

// The data that a tile prefetches while it computes
enum Prefetch {
  NO_PREFETCH,
  OWN_WEIGHTS,  // its own weights, just before it reads them, into the L1 cache
  LATER_DATA,  // later data, into the L2 cache: spread evenly it loads during the sums; the sums would wait for a burst
};

// The bytes for LATER_DATA: starting at `from`, `bytes_per_step` for each step.
struct PrefetchStream {
  const char* from;
  long bytes_per_step;
};

// The epilogue of another tile, done between the steps of this one: the products leave units of the CPU idle that
// suffice for it. Here there is none; linear.h has one that writes results.
struct NoEpilogue {
  static constexpr bool has_work() { return false; }
  void do_part() {}
  void continue_from(const NoEpilogue&) {}
};

// sums [ROWS][PANEL] = or += x [ROWS][steps] * w [steps][PANEL]; rows of x, expanded as Operands says (a single one as
// SingleRowOperands), are `stride` words apart. Each step does a part of the epilogue, if any is left.
template <class T, int ROWS, Prefetch PREFETCH, class Epilogue>
void micro_kernel(const Pair* x, long stride, const Pair* w, long steps, T* sums, bool fresh, PrefetchStream prefetch,
                  Epilogue& epilogue) {
  using O = std::conditional_t<ROWS == 1, SingleRowOperands<T>, Operands<T>>;
  Epilogue local = epilogue;  // a copy, so that it may be in registers
  using Sum = typename O::Sum;
  Sum acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = fresh ? Sum{} : load<Sum>(sums + r * PANEL + i * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * stride;
  for (long k = 0; k < steps; k++, w += PANEL, prefetch.from += prefetch.bytes_per_step) {
    if (PREFETCH == OWN_WEIGHTS) {
      __builtin_prefetch((const char*)w + PREFETCH_DISTANCE);
      if (STEP_BYTES > 64) __builtin_prefetch((const char*)w + PREFETCH_DISTANCE + 64);
    }
    if (PREFETCH == LATER_DATA) {
      __builtin_prefetch(prefetch.from, 0, 2);
      if (STEP_BYTES > 64) __builtin_prefetch(prefetch.from + 64, 0, 2);
    }
    if (local.has_work()) local.do_part();
#pragma GCC unroll 2
    for (int i = 0; i < O::WORDS; i++) {
      Bits left = O::part(w, i), right = O::part(w + LANES, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
        O::multiply_add(acc[r], rows[r / 3] + r % 3 * stride + O::WORDS * k + i, left, right);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) store(sums + r * PANEL + i * LANES, acc[r][i]);
  epilogue.continue_from(local);
}

template <class T, class Epilogue>
using MicroKernel = void (*)(const Pair*, long, const Pair*, long, T*, bool, PrefetchStream, Epilogue&);

// The micro-kernel for this number of rows, LEAST to MOST. Only these are compiled.
template <class T, Prefetch PREFETCH, class Epilogue, int LEAST, int MOST>
MicroKernel<T, Epilogue> choose_micro_kernel(long rows) {
  if constexpr (MOST > LEAST)
    if (rows < MOST) return choose_micro_kernel<T, PREFETCH, Epilogue, LEAST, MOST - 1>(rows);
  return micro_kernel<T, MOST, PREFETCH, Epilogue>;
}
