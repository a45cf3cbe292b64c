// The product of rows and one packed panel, block of K by block, and its epilogue: what becomes of the sums.
//
// With one tile of rows, each weight is read once, and the product waits for memory: tiles prefetch. With many, the
// product is limited by multiplications, and the epilogue (bias, scales, activation, rounding) of a tile is computed
// between the steps of the next one.
//
// There are two forms with the same arguments: one for the micro-kernel of tile.h, and one for AMX.
#pragma once
#include <algorithm>

#include "amx.h"
#include "input_rows.h"
#include "tile.h"

constexpr long PANEL_VECTORS = PANEL / LANES;  // of a row in a panel

// The epilogue: sums of a panel become results. write(sums, i) writes vector i of [rows][PANEL].
template <class T, class Write> struct WriteEpilogue {
  Write write;
  const T* sums;
  long written = 0, count = 0;  // vectors

  bool has_work() const { return written < count; }

  // Inline, since a call would save all registers of the tile
  __attribute__((always_inline)) void do_part() {
    write(sums + written * LANES, written);
    written++;
  }

  void write_all() {
    while (has_work()) do_part();
  }

  // One of `shares` equal parts of what is left
  __attribute__((always_inline)) void do_share(long shares) {
    for (long parts = (count - written + shares - 1) / shares; parts > 0; parts--) do_part();
  }

  void continue_from(const WriteEpilogue& copy) { written = copy.written; }
};

#if defined(PARLEY_AMX)
constexpr long BLOCK_ROWS = 2 * MATRIX_ROWS;       // rows whose sums with a panel fill four registers
constexpr long MATRIX_K_BLOCK = 8 * MATRIX_STEPS;  // steps: a panel's part of K stays in the L1 cache for all rows
constexpr long SINGLE_BLOCK_K = 4 * MATRIX_STEPS;  // of a single block, which prefetches as far ahead: 8 KiB
static_assert(PANEL == 2 * LANES && LANES == MATRIX_STEPS);

// Rows of x in blocks of the same number of rows, up to BLOCK_ROWS, and their sums.
template <class T> struct RowBlocks {
  const Pair* x;
  T* sums;
  long block_rows, blocks;
};

// Sets the registers that `multiply_block` uses for blocks of `rows` and `steps` of K at a time.
inline void set_block_registers(MatrixRegisters& registers, long rows, long steps) {
  registers.set(rows, steps, [=](RegisterShapes& shapes) {
    long upper = std::min(rows, MATRIX_ROWS), lower = rows - upper;
    shapes.set({0, 1}, upper, LANES), shapes.set({2, 3}, lower, LANES);
    shapes.set({4}, upper, steps), shapes.set({5}, lower, steps), shapes.set({6, 7}, steps, LANES);
  });
}

// sums [rows][PANEL] = or += x [rows][count * steps] * w [count * steps][PANEL], for as many rows and steps as the
// registers are set for; HAS_LOWER: more than MATRIX_ROWS rows. Rows of x are `stride` words apart. Each of the `count`
// products does a part of the epilogue and of the prefetches, which are `bytes_per_step` long for each: into the L1
// cache for a single block, which waits for memory, else into the L2 cache.
template <class T, bool HAS_LOWER, class Epilogue>
void multiply_block(const Pair* x, long stride, const Pair* w, long count, T* sums, bool fresh, PrefetchStream prefetch,
                    bool is_single, Epilogue& epilogue) {
  constexpr long SUM_BYTES = PANEL * sizeof(T);
  const Pair* lower_x = x + MATRIX_ROWS * stride;
  T* lower_sums = sums + MATRIX_ROWS * PANEL;
  if (fresh) {
    clear_register<0>(), clear_register<1>();
    if constexpr (HAS_LOWER) clear_register<2>(), clear_register<3>();
  } else {
    load_register<0>(sums, SUM_BYTES), load_register<1>(sums + LANES, SUM_BYTES);
    if constexpr (HAS_LOWER) load_register<2>(lower_sums, SUM_BYTES), load_register<3>(lower_sums + LANES, SUM_BYTES);
  }
  for (long i = 0; i < count; i++, prefetch.from += prefetch.bytes_per_step) {
    for (long at = 0; at < prefetch.bytes_per_step; at += 64)
      if (is_single) __builtin_prefetch(prefetch.from + at);
      else __builtin_prefetch(prefetch.from + at, 0, 2);
    long k = i * MATRIX_STEPS;
    load_register<6>(w + k * PANEL, STEP_BYTES);
    load_register<4>(x + k, stride * sizeof(Pair));
    multiply_registers<T, 0, 4, 6>();
    load_register<7>(w + k * PANEL + LANES, STEP_BYTES);
    multiply_registers<T, 1, 4, 7>();
    if constexpr (HAS_LOWER) {
      load_register<5>(lower_x + k, stride * sizeof(Pair));
      multiply_registers<T, 2, 5, 6>();
      multiply_registers<T, 3, 5, 7>();
    }
    epilogue.do_share(count - i);
  }
  store_register<0>(sums, SUM_BYTES), store_register<1>(sums + LANES, SUM_BYTES);
  if constexpr (HAS_LOWER) store_register<2>(lower_sums, SUM_BYTES), store_register<3>(lower_sums + LANES, SUM_BYTES);
}

// As multiply_panel, of rows in blocks. If `writes`, their sums are given to the epilogue.
template <class T, class Epilogue>
void multiply_row_blocks(RowBlocks<T> rows, const Pair* panel, long steps, const Pair* next_panel,
                         MatrixRegisters& registers, Epilogue& epilogue, bool writes) {
  auto multiply =
      rows.block_rows > MATRIX_ROWS ? multiply_block<T, true, Epilogue> : multiply_block<T, false, Epilogue>;
  bool is_single = rows.blocks == 1;
  for (long k = 0, count, width; k < steps; k += count * width) {
    long k_block = is_single ? SINGLE_BLOCK_K : MATRIX_K_BLOCK;
    width = std::min(MATRIX_STEPS, steps - k), count = std::min(k_block, steps - k) / width;
    set_block_registers(registers, rows.block_rows, width);
    bool last = k + count * width == steps;
    const char* next = (const char*)(last ? next_panel : panel + (k + count * width) * PANEL);
    long products = count * rows.blocks, lines = (count * width * STEP_BYTES / 64 + products - 1) / products;
    for (long b = 0; b < rows.blocks; b++) {
      multiply(rows.x + b * rows.block_rows * steps + k, steps, panel + k * PANEL, count,
               rows.sums + b * rows.block_rows * PANEL, k == 0, {next + b * count * lines * 64, lines * 64}, is_single,
               epilogue);
      if (last && writes) epilogue.count += rows.block_rows * PANEL_VECTORS;
    }
  }
}

// Computes the sums [rows][PANEL] of one panel. Memory delivers a K block while blocks of rows compute the one before.
// `next_panel`: the panel that is needed next. If `writes`, sums are written, those of a block while the next one
// computes. The rows beyond whole blocks come last, since the registers have to be set for them.
template <class T, class Write>
void multiply_panel(InputRows<T> x, const Pair* panel, long rows, long steps, const Pair* next_panel, T* sums,
                    MatrixRegisters& registers, Write write, bool writes = true) {
  WriteEpilogue<T, Write> epilogue{write, sums};
  long blocks = rows / BLOCK_ROWS, whole = blocks * BLOCK_ROWS;
  if (!steps) {
    std::fill(sums, sums + rows * PANEL, T{});
    epilogue.count = writes ? rows * PANEL_VECTORS : 0;
  }
  if (blocks)
    multiply_row_blocks<T>({x.words, sums, BLOCK_ROWS, blocks}, panel, steps, next_panel, registers, epilogue, writes);
  if (rows > whole)
    multiply_row_blocks<T>({x.words + whole * steps, sums + whole * PANEL, rows - whole, 1}, panel, steps, next_panel,
                           registers, epilogue, writes);
  epilogue.write_all();
}
#else
constexpr long K_BLOCK = LANES == 4 ? 128 : 512;  // steps: a panel's part of K and the next one fit in the L2 cache
constexpr long PREFETCHING_TILES = 4;  // tiles that prefetch the next K block; with more there is time to spare
constexpr int MEMORY_BOUND_ROWS = TILE_ROWS * 5 / 12;  // so few rows wait for memory more than they compute
constexpr long PANEL_PREFETCH_DISTANCE = 8192;         // prefetch distance of a single tile with more rows, in bytes

// Computes the sums [rows][PANEL] of one panel. Memory delivers a K block while tiles compute the one before.
// `next_panel`: the panel that is needed next. If `writes`, sums are written, those of a tile while the next one
// computes.
template <class T, class Write>
void multiply_panel(InputRows<T> x, const Pair* panel, long rows, long steps, const Pair* next_panel, T* sums,
                    MatrixRegisters&, Write write, bool writes = true) {
  // AVX2 has no registers left for it
  using Overlapped = std::conditional_t<LANES == 16, WriteEpilogue<T, Write>, NoEpilogue>;
  constexpr long WORDS = Operands<T>::WORDS;
  WriteEpilogue<T, Write> epilogue{write, sums};
  NoEpilogue none;
  if (rows <= TILE_ROWS) {
    auto micro_kernel = rows <= MEMORY_BOUND_ROWS
                            ? choose_micro_kernel<T, OWN_WEIGHTS, NoEpilogue, 1, MEMORY_BOUND_ROWS>(rows)
                            : choose_micro_kernel<T, LATER_DATA, NoEpilogue, MEMORY_BOUND_ROWS + 1, TILE_ROWS>(rows);
    micro_kernel(rows == 1 ? x.unsplit : x.words, WORDS * steps, panel, steps, sums, true,
                 {(const char*)panel + PANEL_PREFETCH_DISTANCE, STEP_BYTES}, none);
    if (rows > 1) x.add_remainders(0, rows, steps, panel, sums);
    epilogue.count = writes ? rows * PANEL_VECTORS : 0;
    return epilogue.write_all();
  }
  Overlapped* overlapped;
  if constexpr (LANES == 16) overlapped = &epilogue;
  else overlapped = &none;
  constexpr int LEAST = TILE_ROWS / 2;  // of two tiles or more, which differ by at most a row
  long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, prefetching = std::min(tiles, PREFETCHING_TILES), k = 0;
  do {
    long count = std::min(K_BLOCK, steps - k);
    bool last = k + count == steps;
    const Pair* here = panel + k * PANEL;
    const char* next = (const char*)(last ? next_panel : here + count * PANEL);
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, end = rows * (t + 1) / tiles;
      auto micro_kernel = t < prefetching
                              ? choose_micro_kernel<T, LATER_DATA, Overlapped, LEAST, TILE_ROWS>(end - first)
                              : choose_micro_kernel<T, NO_PREFETCH, Overlapped, LEAST, TILE_ROWS>(end - first);
      micro_kernel(x.words + WORDS * (first * steps + k), WORDS * steps, here, count, sums + first * PANEL, k == 0,
                   {next + count * STEP_BYTES * t / prefetching, (STEP_BYTES + prefetching - 1) / prefetching},
                   *overlapped);
      if (!last) continue;
      x.add_remainders(first, end, steps, panel, sums);
      if (!writes) continue;
      epilogue.write_all();
      epilogue.count = end * PANEL_VECTORS;
    }
    k += count;
  } while (k < steps);
  epilogue.write_all();
}
#endif
