// The products of attention on AMX, with the arguments of vector_products.h. Included by products.h.
//
// Sums are in registers 0 and 1. 16 pairs of queries and of keys are in 2 and 3, and those beyond the last 16 in 4 and
// 5. The weights and values of a page's 8 pairs are in 6 and 7.
#pragma once
#include "products.h"

// Registers 0 and 1 += queries * two vectors of columns; X and W are the registers for them
template <int X, int W>
__attribute__((always_inline)) inline void multiply_columns(const Pair* x, long x_stride, const Pair* left,
                                                            const Pair* right, long w_stride) {
  load_register<X>(x, x_stride * sizeof(Pair));
  load_register<W>(left, w_stride * sizeof(Pair));
  multiply_registers<float, 0, X, W>();
  load_register<W>(right, w_stride * sizeof(Pair));
  multiply_registers<float, 1, X, W>();
}

class AttentionProducts {
  const long pairs;
  MatrixRegisters registers;

  void set_registers(long rows) {
    registers.set(rows, pairs, [=](RegisterShapes& shapes) {
      long left = pairs % MATRIX_STEPS;
      shapes.set({0, 1}, rows, LANES);
      shapes.set({2}, rows, MATRIX_STEPS), shapes.set({3}, MATRIX_STEPS, LANES);
      shapes.set({4}, rows, left), shapes.set({5}, left, LANES);
      shapes.set({6}, rows, PAGE / 2), shapes.set({7}, PAGE / 2, LANES);
    });
  }

  static void prefetch(const ColumnPair& columns, long first, long steps) {
    for (long at = first * columns.bytes_per_step, end = at + steps * columns.bytes_per_step; at < end; at += 64)
      __builtin_prefetch(columns.prefetch_from + at, 0, 2);
  }

  // The larger of `excess` and of what the scores of a column pair exceed the limits of their rows by. They were stored
  // a while ago, because a load waits for a matrix register that is being stored.
  static Vec fold_excess(long rows, const float* scores, long pair, const float* limits, Vec excess) {
    for (long r = 0; r < rows; r++) {
      const float* row = scores + r * KEY_BLOCK + pair * PANEL;
      excess = max_of(max_of(load<Vec>(row), load<Vec>(row + LANES)) - broadcast(limits[r]), excess);
    }
    return excess;
  }

 public:
  AttentionProducts(long pairs, bool) : pairs(pairs) {}

  bool score(long rows, const Pair* x, const ColumnPair* columns, long count, float* scores, const float* limits,
             SoftmaxStage& softmax) {
    set_registers(rows);
    Vec excess = {};
    long whole = pairs / MATRIX_STEPS * MATRIX_STEPS, shares = count * ((pairs + MATRIX_STEPS - 1) / MATRIX_STEPS);
    for (long s = 0; s < count; s++) {
      const Pair *left = columns[s].left, *right = columns[s].right;
      clear_register<0>(), clear_register<1>();
      for (long k = 0; k < whole; k += MATRIX_STEPS, shares--) {
        prefetch(columns[s], k, MATRIX_STEPS);
        multiply_columns<2, 3>(x + k, pairs, left + k * PAGE, right + k * PAGE, PAGE);
        softmax.do_share(shares);
      }
      if (whole < pairs) {
        prefetch(columns[s], whole, pairs - whole);
        multiply_columns<4, 5>(x + whole, pairs, left + whole * PAGE, right + whole * PAGE, PAGE);
        softmax.do_share(shares--);
      }
      if (s) excess = fold_excess(rows, scores, s - 1, limits, excess);
      store_register<0>(scores + s * PANEL, KEY_BLOCK * sizeof(float));
      store_register<1>(scores + s * PANEL + LANES, KEY_BLOCK * sizeof(float));
    }
    return any((Bits)(fold_excess(rows, scores, count - 1, limits, excess) > 0));
  }

  void sum(long rows, const Pair* weights, const ColumnPair* columns, long count, long wide, float* sums) {
    constexpr long SUM_BYTES = PANEL * sizeof(float);
    set_registers(rows);
    load_register<0>(sums, SUM_BYTES), load_register<1>(sums + LANES, SUM_BYTES);
    for (long s = 0; s < count; s++) {
      prefetch(columns[s], 0, PAGE / 2);
      multiply_columns<6, 7>(weights + s * PAGE / 2, KEY_BLOCK / 2, columns[s].left, columns[s].right, wide);
    }
    store_register<0>(sums, SUM_BYTES), store_register<1>(sums + LANES, SUM_BYTES);
  }
};
