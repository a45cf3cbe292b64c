// The sums of grouped weights on AMX, which unpacks weights for any number of rows. Included by grouped_tiles.h.
#pragma once
#include "grouped_tiles.h"

// Sets the registers of AMX for `rows` rows, and `steps` of K at a time: sums of a panel's vectors for MATRIX_ROWS rows
// are 0 to 3, x is 4, weights are 5. The sums and x of fewer rows, which come last, are in 6 and 7.
inline void set_group_registers(MatrixRegisters& registers, long rows, long steps) {
  registers.set(rows, steps, [=](RegisterShapes& shapes) {
    long first = std::min(rows, MATRIX_ROWS), last = rows % MATRIX_ROWS;
    shapes.set({0, 1, 2, 3}, first, LANES), shapes.set({4}, first, steps), shapes.set({5}, steps, LANES);
    shapes.set({6}, last, LANES), shapes.set({7}, last, steps);
  });
}

// sums [rows of a register][WIDE_PANEL] = or += x [rows][count * width] * weights [count * width][WIDE_PANEL]
inline void multiply_register_rows(const Pair* x, long stride, const Pair* weights, long count, long width, float* sums,
                                   bool fresh) {
  constexpr long BYTES = WIDE_PANEL * sizeof(float);
  if (fresh) clear_register<0>(), clear_register<1>(), clear_register<2>(), clear_register<3>();
  else {
    load_register<0>(sums, BYTES), load_register<1>(sums + LANES, BYTES);
    load_register<2>(sums + 2 * LANES, BYTES), load_register<3>(sums + 3 * LANES, BYTES);
  }
  for (long i = 0; i < count; i++, x += width, weights += width * WIDE_PANEL) {
    load_register<4>(x, stride * sizeof(Pair));
    load_register<5>(weights, BYTES);
    multiply_registers<float, 0, 4, 5>();
    load_register<5>(weights + LANES, BYTES);
    multiply_registers<float, 1, 4, 5>();
    load_register<5>(weights + 2 * LANES, BYTES);
    multiply_registers<float, 2, 4, 5>();
    load_register<5>(weights + 3 * LANES, BYTES);
    multiply_registers<float, 3, 4, 5>();
  }
  store_register<0>(sums, BYTES), store_register<1>(sums + LANES, BYTES);
  store_register<2>(sums + 2 * LANES, BYTES), store_register<3>(sums + 3 * LANES, BYTES);
}

// The same for fewer rows after those of a full register
inline void multiply_last_rows(const Pair* x, long stride, const Pair* weights, long count, long width, float* sums,
                               bool fresh) {
  constexpr long BYTES = WIDE_PANEL * sizeof(float);
  for (long i = 0; i < WIDE_PANEL_VECTORS; i++) {
    if (fresh) clear_register<6>();
    else load_register<6>(sums + i * LANES, BYTES);
    for (long j = 0; j < count; j++) {
      load_register<7>(x + j * width, stride * sizeof(Pair));
      load_register<5>(weights + j * width * WIDE_PANEL + i * LANES, BYTES);
      multiply_registers<float, 6, 7, 5>();
    }
    store_register<6>(sums + i * LANES, BYTES);
  }
}

// totals [rows][WIDE_PANEL] += a group, whose sums are in group_sums
template <class Code> void add_group_sums(TileSums sums, long rows) {
  for (long i = 0; i < WIDE_PANEL_VECTORS; i++) {
    typename Code::Factors factors(sums.scales, i);
    for (long r = 0; r < rows; r++) {
      long at = r * WIDE_PANEL + i * LANES;
      float x_sum = NEEDS_X_SUMS<Code> ? sums.x[r * sums.groups] : 0;
      store(sums.totals + at, factors.add(load<Vec>(sums.totals + at), load<Vec>(sums.group_sums + at), x_sum));
    }
  }
}

// totals [rows][WIDE_PANEL] += one group
template <class Code>
void add_group(const Pair* x, long stride, const uint32_t* words, long steps, TileSums sums, long rows,
               MatrixRegisters& registers) {
  for_each_run(steps, UNPACKED_PAIRS<Code>, sums, [&](long k, long count, const TileSums& run) {
    alignas(64) UnpackedVector<Code> unpacked[UNPACKED_PAIRS<Code> * WIDE_PANEL_VECTORS];
    for (long s = 0; s < count; s += Code::WORD_PAIRS)
      for (int i = 0; i < WIDE_PANEL_VECTORS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < Code::WORD_PAIRS; j++)
          unpacked[(s + j) * WIDE_PANEL_VECTORS + i] = Code::unpack(words, k + s, j, i);
    for (long s = 0, width = MATRIX_STEPS, products; s < count; s += products * width) {
      width = std::min(width, count - s), products = (count - s) / width;
      bool fresh = run.first && s == 0, whole = run.last && s + products * width == count;
      set_group_registers(registers, rows, width);
      for (long r = 0; r < rows; r += MATRIX_ROWS) {
        auto multiply = r && r + MATRIX_ROWS > rows ? multiply_last_rows : multiply_register_rows;
        TileSums block = run;
        block.totals += r * WIDE_PANEL, block.x += r * run.groups;
        if (!run.first || !run.last || products * width < count) block.group_sums += r * WIDE_PANEL;
        multiply(x + r * stride + k + s, stride, (const Pair*)unpacked + s * WIDE_PANEL, products, width,
                 block.group_sums, fresh);
        if (whole) add_group_sums<Code>(block, std::min(MATRIX_ROWS, rows - r));
      }
    }
  });
}
