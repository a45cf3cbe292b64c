// The rows of a batch when several weights, stored one after another, multiply them: those of the experts of a mixture.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "tile.h"

// Rows `first` to `first + rows` of a batch, and the number of the weight that multiplies them.
struct RowSlice {
  int64_t first, rows, weight;
};

struct Slices {
  const RowSlice* first;
  long count;
};

// Slices of at most `most` rows. They are smaller than that only if there would be less work than threads.
inline std::vector<RowSlice> cut_slices(Slices slices, long panels, long most, long threads) {
  std::vector<RowSlice> pieces;
  long tasks = slices.count * panels;
  if (!tasks) return pieces;
  for (const RowSlice* slice = slices.first; slice < slices.first + slices.count; slice++) {
    long rows = slice->rows, enough = std::min((rows + TILE - 1) / TILE, (threads + tasks - 1) / tasks);
    long cuts = std::max((rows + most - 1) / most, enough);
    for (long i = 0; i < cuts; i++)
      pieces.push_back({slice->first + rows * i / cuts, rows * (i + 1) / cuts - rows * i / cuts, slice->weight});
  }
  return pieces;
}
