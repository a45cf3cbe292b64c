// The sums of a tile of rows and a panel of grouped weights, over one group of K: see grouped_weights.cpp. There is a
// form for vectors and one for AMX, each with a function `add_group`.
#pragma once
#include <algorithm>

#include "amx.h"
#include "tile.h"
#include "weight_codes.h"

constexpr long INT16_RUN = 64;  // pairs of 16 bits whose products with weights of 8 bits are added up in 32 bits

// Whether rows of x are integers
template <class Code> constexpr bool USES_INT16 = std::is_same_v<typename Code::Sum, Ints>;

// Pairs of K unpacked at once: they stay in the L1 cache for all tiles
template <class Code>
constexpr long UNPACKED_PAIRS = USES_INT16<Code> ? INT16_RUN : 16384 / WIDE_PANEL_VECTORS / sizeof(Pairs);

// Whether outputs need the groups' sums of x
template <class Code> constexpr bool NEEDS_X_SUMS = Code::Factors::X_SHIFT != XShift::NONE;

template <class Code> using UnpackedVector = decltype(Code::unpack(nullptr, 0, 0, 0));

// The sums of a tile: chains, stored in `group_sums` between runs of a group and added to `totals` after the last.
struct TileSums {
  float *group_sums, *totals;  // [rows][WIDE_PANEL]
  const float* x;              // the group's sum of each row, with stride `groups`
  const float* units;          // of integers: the value of one in the run of each row, with stride `runs`
  const uint32_t* scales;
  long groups, runs;
  bool first, last;
};

// f(k, count, sums) for each run of a group, of at most `most` pairs
template <class F> void for_each_run(long steps, long most, TileSums sums, F f) {
  for (long k = 0; k < steps; k += most, sums.units++) {
    long count = std::min(most, steps - k);
    sums.first = k == 0, sums.last = k + count == steps;
    f(k, count, sums);
  }
}

#if defined(PARLEY_AMX)
#include "amx_grouped_tiles.h"
#else
#include "vector_grouped_tiles.h"
#endif
