// The products of attention on vectors: micro-kernels as in tile.h, which read pages instead of packed panels. Included
// by products.h.
#pragma once
#include "products.h"

// acc += x [ROWS][steps] * two vectors of columns. Each step calls interleaved_work().
template <int ROWS, int PREFETCHES, class Work>
__attribute__((always_inline)) inline void accumulate(Vec (&acc)[ROWS][2], const Pair* x, long x_stride,
                                                      const ColumnPair& columns, long steps, long w_stride,
                                                      Work interleaved_work) {
  using O = Operands<float>;
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * x_stride;
  for (long k = 0; k < steps; k++) {
    __builtin_prefetch(columns.prefetch_from + k * columns.bytes_per_step, 0, 2);
    if (PREFETCHES == 2) __builtin_prefetch(columns.prefetch_from + k * columns.bytes_per_step + 64, 0, 2);
    interleaved_work();
#pragma GCC unroll 2
    for (int i = 0; i < O::WORDS; i++) {
      Bits left = O::part(columns.left + k * w_stride, i), right = O::part(columns.right + k * w_stride, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
        O::multiply_add(acc[r], rows[r / 3] + r % 3 * x_stride + O::WORDS * k + i, left, right);
    }
  }
}

// scores [ROWS][KEY_BLOCK] = x [ROWS][pairs] * the keys of `count` column pairs. Returns whether one exceeds the limit
// of its row. Where the registers suffice, each step also weighs a vector of the tile before: that uses other units of
// the CPU than the product does.
template <int ROWS, int PREFETCHES>
bool score_tile(const Pair* x, long pairs, const ColumnPair* columns, long count, float* scores, const float* limits,
                SoftmaxStage& other) {
  SoftmaxStage softmax = other;
  Vec excess = {};
  for (long s = 0; s < count; s++, scores += PANEL) {
    Vec acc[ROWS][2] = {};
    accumulate<ROWS, PREFETCHES>(acc, x, pairs * Operands<float>::WORDS, columns[s], pairs, PAGE, [&] {
      if (LANES == 16 && softmax.at < softmax.overlapped) softmax.next();
    });
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      store(scores + r * KEY_BLOCK, acc[r][0]), store(scores + r * KEY_BLOCK + LANES, acc[r][1]);
      excess = max_of(max_of(acc[r][0], acc[r][1]) - broadcast(limits[r]), excess);
    }
  }
  other = softmax;
  return any((Bits)(excess > 0));
}

// sums [ROWS][PANEL] += weights [ROWS][KEY_BLOCK] * a panel of the values of `count` column pairs
template <int ROWS, int PREFETCHES>
void sum_tile(const Pair* weights, const ColumnPair* columns, long count, long wide, float* sums) {
  Vec acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = load<Vec>(sums + r * PANEL + i * LANES);
  constexpr long WORDS = Operands<float>::WORDS;
  for (long s = 0; s < count; s++)
    accumulate<ROWS, PREFETCHES>(acc, weights + s * PAGE / 2 * WORDS, KEY_BLOCK / 2 * WORDS, columns[s], PAGE / 2, wide,
                                 [] {});
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) store(sums + r * PANEL + i * LANES, acc[r][i]);
}

using ScoreTile = bool (*)(const Pair*, long, const ColumnPair*, long, float*, const float*, SoftmaxStage&);
using SumTile = void (*)(const Pair*, const ColumnPair*, long, long, float*);

// The products for this number of rows, 1 to TILE_ROWS
struct TileKernels {
  ScoreTile score;
  SumTile sum;

  template <int PREFETCHES, int ROWS = TILE_ROWS> static TileKernels choose(long rows) {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return choose<PREFETCHES, ROWS - 1>(rows);
    return {score_tile<ROWS, PREFETCHES>, sum_tile<ROWS, PREFETCHES>};
  }
};

class AttentionProducts {
  const long pairs;
  const bool is_single;

  // A single tile has to prefetch twice as fast as its products step.
  TileKernels kernels(long rows) const {
    return is_single ? TileKernels::choose<2>(rows) : TileKernels::choose<1>(rows);
  }

 public:
  // `pairs` of a query and of a key; is_single: each block of keys has one tile of rows
  AttentionProducts(long pairs, bool is_single) : pairs(pairs), is_single(is_single) {}

  // scores [rows][KEY_BLOCK] = x [rows][pairs] * the keys of `count` column pairs. Returns whether one exceeds the
  // limit of its row. Meanwhile it does what it can of `softmax`.
  bool score(long rows, const Pair* x, const ColumnPair* columns, long count, float* scores, const float* limits,
             SoftmaxStage& softmax) {
    return kernels(rows).score(x, pairs, columns, count, scores, limits, softmax);
  }

  // sums [rows][PANEL] += weights [rows][KEY_BLOCK] * a panel of the values of `count` column pairs
  void sum(long rows, const Pair* weights, const ColumnPair* columns, long count, long wide, float* sums) {
    kernels(rows).sum(weights, columns, count, wide, sums);
  }
};
