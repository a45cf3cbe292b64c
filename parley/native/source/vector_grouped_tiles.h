// The sums of grouped weights on vectors. Included by grouped_tiles.h.
#pragma once
#include "grouped_tiles.h"

constexpr int FUSED_TILE_ROWS = LANES == 16 ? 6 : 2;  // rows whose sums, with a panel's numbers, fill the registers
// Up to this many rows, weights are unpacked again for each tile, which then costs less than a buffer: fewer rows if
// that is more work
constexpr long FUSED_MAX_ROWS = LANES == 16 ? 48 : 2, FUSED_MAX_ROWS_WIDE_CODES = LANES == 16 ? FUSED_TILE_ROWS : 2;

// Rows whose sums, with half of a panel's numbers, fill the registers; and up to how many rows such tiles are faster.
// Not for floats and for blocks of GGUF files with numbers in two parts, which take more registers to unpack.
template <class Code> constexpr bool IS_BLOCK = false;
template <int HIGH_BITS, int GROUP, int BLOCK_SIZE, bool HAS_MINIMUMS, class Codebook>
constexpr bool IS_BLOCK<Blocks<HIGH_BITS, GROUP, BLOCK_SIZE, HAS_MINIMUMS, Codebook>> = true;
template <class Code> constexpr int HALF_TILE_ROWS = LANES == 8 && USES_INT16<Code> && !IS_BLOCK<Code> ? 5 : 0;
constexpr long HALVES_MAX_ROWS = 10;

// As FUSED_TILE_ROWS, of unpacked weights
template <class Code> constexpr int UNPACKED_TILE_ROWS = LANES == 16 || USES_INT16<Code> ? TILE_ROWS : 4;

// A panel's part of a group, packed: vector i of pair k + j
template <class Code> struct PackedWeights {
  const uint32_t* words;
  auto operator()(long k, int j, int i) const { return Code::unpack(words, k, j, i); }
};

// The same, unpacked
template <class Vector> struct UnpackedWeights {
  const Vector* pairs;
  Vector operator()(long k, int j, int i) const { return pairs[(k + j) * WIDE_PANEL_VECTORS + i]; }
};

// The same, multiplied half by half of the panel: so the sums of more rows fill the registers
template <class Code> struct HalvedWeights : PackedWeights<Code> {};

template <class Weights> constexpr bool ARE_HALVED = false;
template <class Code> constexpr bool ARE_HALVED<HalvedWeights<Code>> = true;

// Vectors FIRST to FIRST + WIDTH of a panel for ROWS rows of x with this stride, over one run of a group
template <class Code, int ROWS, int WIDTH, class Weights, int FIRST = 0>
__attribute__((always_inline)) inline void multiply_tile(const Pair* x, long stride, Weights weights, long steps,
                                                         TileSums sums) {
  using Sum = typename Code::Sum;
  Sum acc[ROWS][WIDTH];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < WIDTH; i++)
      acc[r][i] =
          USES_INT16<Code> || sums.first ? Sum{} : load<Sum>(sums.group_sums + r * WIDE_PANEL + (FIRST + i) * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * stride;
  for (long k = 0; k < steps; k += Code::WORD_PAIRS)
#pragma GCC unroll 16
    for (int j = 0; j < Code::WORD_PAIRS; j++) {
      decltype(weights(k, j, 0)) weight[WIDTH];
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; i++) weight[i] = weights(k, j, FIRST + i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const Pair* from = rows[r / 3] + r % 3 * stride + k + j;
#if defined(SIXTEEN_REGISTERS)
        if constexpr (USES_INT16<Code> && WIDTH == 2) {
          multiply_add_int16(acc[r], from, weight[0], weight[1]);
          continue;
        }
#endif
        Bits pair = broadcast(*from);
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) acc[r][i] = multiply(acc[r][i], pair, weight[i]);
      }
    }
#pragma GCC unroll 4
  for (int i = 0; i < WIDTH; i++) {
    typename Code::Factors factors(sums.scales, FIRST + i);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      long at = r * WIDE_PANEL + (FIRST + i) * LANES;
      Vec sum = __builtin_convertvector(acc[r][i], Vec);
      if (USES_INT16<Code>) {
        sum *= sums.units[r * sums.runs];
        if (!sums.first) sum += load<Vec>(sums.group_sums + at);
      }
      if (!sums.last) {
        store(sums.group_sums + at, sum);
        continue;
      }
      float x_sum = NEEDS_X_SUMS<Code> ? sums.x[r * sums.groups] : 0;
      store(sums.totals + at, factors.add(load<Vec>(sums.totals + at), sum, x_sum));
    }
  }
}

template <class Weights> using TileFunction = void (*)(const Pair*, long, Weights, long, TileSums);

template <class Code, int ROWS>
void multiply_halves(const Pair* x, long stride, HalvedWeights<Code> weights, long steps, TileSums sums) {
  constexpr int WIDTH = WIDE_PANEL_VECTORS / 2;
  multiply_tile<Code, ROWS, WIDTH, HalvedWeights<Code>, 0>(x, stride, weights, steps, sums);
  multiply_tile<Code, ROWS, WIDTH, HalvedWeights<Code>, WIDTH>(x, stride, weights, steps, sums);
}

// The tile for this number of rows, 1 to ROWS; if weights are halved, FUSED_TILE_ROWS + 1 to ROWS
template <class Code, int ROWS, int WIDTH, class Weights> TileFunction<Weights> choose_tile(long rows) {
  if constexpr (ROWS > (ARE_HALVED<Weights> ? FUSED_TILE_ROWS + 1 : 1))
    if (rows < ROWS) return choose_tile<Code, ROWS - 1, WIDTH, Weights>(rows);
  if constexpr (ARE_HALVED<Weights>) return multiply_halves<Code, ROWS>;
  else return multiply_tile<Code, ROWS, WIDTH, Weights>;
}

// One run for all rows, at most MOST at a time. Inline, because a call for each group would take a tenth of the time of
// few rows
template <class Code, int MOST, int WIDTH, class Weights>
__attribute__((always_inline)) inline void multiply_rows(const Pair* x, long stride, Weights weights, long steps,
                                                         TileSums sums, long rows) {
  long count = (rows + MOST - 1) / MOST;
  for (long t = 0; t < count; t++) {
    long first = rows * t / count, end = rows * (t + 1) / count;
    TileSums part = sums;
    part.group_sums += first * WIDE_PANEL, part.totals += first * WIDE_PANEL;
    part.x += first * sums.groups, part.units += first * sums.runs;
    choose_tile<Code, MOST, WIDTH, Weights>(end - first)(x + first * stride, stride, weights, steps, part);
  }
}

// What tiles of unpacked numbers need to know of a code. Many codes share it, so that there is less to compile. Scales
// are factors as floats: [2][WIDE_PANEL] scales and shifts.
template <class SumVector, XShift SHIFT> struct UnpackedCode {
  using Sum = SumVector;
  static constexpr long WORD_PAIRS = 4;  // a run is a multiple of 4 pairs, as groups are padded to 8 numbers

  struct Factors : GroupFactors<SHIFT> {
    Factors(const uint32_t* scales, int i) {
      this->scale = load<Vec>(scales + i * LANES);
      if (SHIFT != XShift::NONE) this->shift = load<Vec>(scales + WIDE_PANEL + i * LANES);
    }
  };
};

// totals [rows][WIDE_PANEL] += one group
template <class Code>
void add_group(const Pair* x, long stride, const uint32_t* words, long steps, TileSums sums, long rows,
               MatrixRegisters&) {
  if (rows <= (Code::BITS <= 4 ? FUSED_MAX_ROWS : FUSED_MAX_ROWS_WIDE_CODES))
    return for_each_run(steps, USES_INT16<Code> ? INT16_RUN : steps, sums,
                        [=](long k, long count, const TileSums& part) {
                          multiply_rows<Code, FUSED_TILE_ROWS, WIDE_PANEL_VECTORS>(
                              x + k, stride, PackedWeights<Code>{words + k / Code::WORD_PAIRS * ROW_WORDS<Code::BITS>},
                              count, part, rows);
                        });
  if constexpr (HALF_TILE_ROWS<Code> > 0)
    if (rows <= HALVES_MAX_ROWS)
      return for_each_run(steps, INT16_RUN, sums, [=](long k, long count, const TileSums& part) {
        HalvedWeights<Code> weights{{words + k / Code::WORD_PAIRS * ROW_WORDS<Code::BITS>}};
        multiply_rows<Code, HALF_TILE_ROWS<Code>, WIDE_PANEL_VECTORS>(x + k, stride, weights, count, part, rows);
      });
  alignas(64) float factors[2][WIDE_PANEL];
  for (int i = 0; i < WIDE_PANEL_VECTORS; i++) {
    typename Code::Factors from(sums.scales, i);
    store(factors[0] + i * LANES, from.scale), store(factors[1] + i * LANES, from.shift);
  }
  sums.scales = (const uint32_t*)factors[0];
  for_each_run(steps, UNPACKED_PAIRS<Code>, sums, [=](long k, long count, const TileSums& part) {
    UnpackedVector<Code> unpacked[UNPACKED_PAIRS<Code> * WIDE_PANEL_VECTORS];
    for (long s = 0; s < count; s += Code::WORD_PAIRS)
      for (int i = 0; i < WIDE_PANEL_VECTORS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < Code::WORD_PAIRS; j++)
          unpacked[(s + j) * WIDE_PANEL_VECTORS + i] = Code::unpack(words, k + s, j, i);
    for (int i = 0; i < WIDE_PANEL_VECTORS; i += 2) {
      TileSums half = part;
      half.group_sums += i * LANES, half.totals += i * LANES, half.scales += i * LANES;
      multiply_rows<UnpackedCode<typename Code::Sum, Code::Factors::X_SHIFT>, UNPACKED_TILE_ROWS<Code>, 2>(
          x + k, stride, UnpackedWeights<UnpackedVector<Code>>{unpacked + i}, count, half, rows);
    }
  });
}
