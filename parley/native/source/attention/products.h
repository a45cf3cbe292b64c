// The two products of attention, of a tile of rows and a block of keys: scores = queries * keys, and sums += weights *
// values. Keys and values are read from pages. There is a form for vectors and one for AMX, and both have a class
// `AttentionProducts` with the same functions.
#pragma once
#include "../amx.h"
#include "../pages.h"
#include "../tile.h"
#include "softmax.h"

constexpr long SCORE_ROWS = HAS_AMX ? MATRIX_ROWS : TILE_ROWS;  // of a tile

// Two vectors of columns in a page, and what is prefetched meanwhile, `bytes_per_step` bytes in a step.
struct ColumnPair {
  const Pair *left, *right;
  const char* prefetch_from;
  long bytes_per_step;
};

#if defined(PARLEY_AMX)
#include "amx_products.h"
#else
#include "vector_products.h"
#endif
