// The product that linear layers and attention consist of: a few rows times a panel of columns, in lanes of 32 bits
// that hold two bf16 (sums in fp32) or four int8 (sums in int32).
//
// Each sum is one SIMD lane's chain over the steps, from first to last. It can be stored between two stretches of steps
// without loss, so the division of a larger product into tiles cannot change a bit.
#pragma once
#include "operands.h"

constexpr int PANEL = 2 * LANES;               // columns of a tile
constexpr int TILE = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // rows whose sums, with a panel's numbers, fill the registers
constexpr int STEP = PANEL * sizeof(Pair);     // bytes of a panel in each step
constexpr long AHEAD = 4096;                   // prefetch distance of ITSELF, in bytes

// The data that a tile prefetches while it computes
enum Asks {
  NOTHING,
  ITSELF,  // its own weights, just before it reads them, into the L1 cache
  OTHERS,  // later data, into the L2 cache: spread evenly it loads during the sums; the sums would wait for a burst
};

// The bytes for OTHERS: starting at `from`, `pace` for each step.
struct Fetch {
  const char* from;
  long pace;
};

// Work that a tile does between its steps, in small parts: the products leave units of the CPU idle that suffice for it.
// Here there is none.
struct NoOtherWork {
  static constexpr bool left() { return false; }
  void next() {}
  void continue_from(const NoOtherWork&) {}
};

// sums [ROWS][PANEL] = or += x [ROWS][steps] * w [steps][PANEL]; rows of x, spread as Operands says, are `stride` words
// apart. Each step does a part of the other work, if any is left.
template <class T, int ROWS, Asks ASKS, class Other>
void tile(const Pair* x, long stride, const Pair* w, long steps, T* sums, bool fresh, Fetch fetch, Other& others) {
  using O = Operands<T>;
  Other other = others;  // a copy, so that it may be in registers
  using Sum = typename O::Sum;
  Sum acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = fresh ? Sum{} : read<Sum>(sums + r * PANEL + i * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * stride;
  for (long k = 0; k < steps; k++, w += PANEL, fetch.from += fetch.pace) {
    if (ASKS == ITSELF) {
      __builtin_prefetch((const char*)w + AHEAD);
      if (STEP > 64) __builtin_prefetch((const char*)w + AHEAD + 64);
    }
    if (ASKS == OTHERS) {
      __builtin_prefetch(fetch.from, 0, 2);
      if (STEP > 64) __builtin_prefetch(fetch.from + 64, 0, 2);
    }
    if (other.left()) other.next();
#pragma GCC unroll 2
    for (int i = 0; i < O::WORDS; i++) {
      Bits left = O::part(w, i), right = O::part(w + LANES, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) O::add(acc[r], rows[r / 3] + r % 3 * stride + O::WORDS * k + i, left, right);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) put(sums + r * PANEL + i * LANES, acc[r][i]);
  others.continue_from(other);
}

template <class T, class Other> using Tile = void (*)(const Pair*, long, const Pair*, long, T*, bool, Fetch, Other&);

// The tile for this number of rows, 1 to ROWS
template <class T, Asks ASKS, class Other = NoOtherWork, int ROWS = TILE> Tile<T, Other> choose(long rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return choose<T, ASKS, Other, ROWS - 1>(rows);
  return tile<T, ROWS, ASKS, Other>;
}
