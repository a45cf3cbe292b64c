// The rows of a batch when several weights, stored one after another, multiply them: those of the experts of a mixture
// (often called a grouped GEMM), or those of the heads.
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

// Slices of at most `max_rows` rows. They are smaller than that only if there would be less work than threads.
inline std::vector<RowSlice> split_slices(Slices slices, long panels, long max_rows, long threads) {
  std::vector<RowSlice> pieces;
  long tasks = slices.count * panels;
  if (!tasks) return pieces;
  for (const RowSlice* slice = slices.first; slice < slices.first + slices.count; slice++) {
    long rows = slice->rows, for_threads = std::min((rows + TILE_ROWS - 1) / TILE_ROWS, (threads + tasks - 1) / tasks);
    long count = std::max((rows + max_rows - 1) / max_rows, for_threads);
    for (long i = 0; i < count; i++)
      pieces.push_back({slice->first + rows * i / count, rows * (i + 1) / count - rows * i / count, slice->weight});
  }
  return pieces;
}
