// The product that linear layers and attention are made of: a few rows by a panel of columns, in lanes of 32 bits that hold
// two bf16 (sums in fp32) or four int8 (sums in int32).
//
// Each sum is one SIMD lane's chain over the steps, from first to last. It may rest in memory between two stretches of
// them, which loses nothing; so how a larger product is cut into tiles cannot change a bit.
#pragma once
#include "vector.h"

constexpr int PANEL = 2 * LANES;               // columns of a tile
constexpr int TILE = LANES == 16 ? 12 : 4;     // rows whose sums, with a panel's numbers, fill the registers
constexpr long AHEAD = 8192;                   // bytes by which a panel that follows itself in memory is fetched early

// A register of sums
template <class T> struct Wide { typedef Vec type; };
template <> struct Wide<int32_t> { typedef Ints type; };

// sums [ROWS][PANEL] = or += x [ROWS][steps] * w [steps][PANEL] in pairs or fours; strides are from row to row
template <class T, int ROWS, bool FETCH>
void tile(const Pair* x, long x_stride, const Pair* w, long w_stride, long steps, T* sums, long stride, bool fresh) {
  using Sum = typename Wide<T>::type;
  Sum acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = fresh ? Sum{} : read<Sum>(sums + r * stride + i * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // a pointer for three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * x_stride;
  for (long k = 0; k < steps; k++, w += w_stride) {
    Bits left = read<Bits>(w), right = read<Bits>(w + LANES);
    if (FETCH) {
      __builtin_prefetch((const char*)w + AHEAD);
      if (LANES == 16) __builtin_prefetch((const char*)(w + LANES) + AHEAD);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      Bits each = fill(rows[r / 3][r % 3 * x_stride + k]);
      acc[r][0] = dot(acc[r][0], each, left);
      acc[r][1] = dot(acc[r][1], each, right);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) put(sums + r * stride + i * LANES, acc[r][i]);
}

template <class T> using TileOf = void (*)(const Pair*, long, const Pair*, long, long, T*, long, bool);
using Tile = TileOf<float>;

// The tile for so many rows, 1 to TILE.
template <bool FETCH, class T = float, int ROWS = TILE> TileOf<T> choose(long rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return choose<FETCH, T, ROWS - 1>(rows);
  return tile<T, ROWS, FETCH>;
}
