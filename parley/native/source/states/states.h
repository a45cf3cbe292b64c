// What kernels of layers with a state share: spans of sequences, and tasks over the parts of a state.
//
// spans [count][5]: the first row of a span in the batch, its number of rows, the row of the state before it (-1: a
// state of zeros), the row that gets the state after it, and whether it continues the sequence of the span before: then
// its first state is the other's last. Rows of states are `stride` floats apart.
#pragma once
#include <cmath>

#include "../threads.h"
#include "../vector.h"

struct StateSpan {
  int64_t first, count, source, target, continues;
};

// Calls f(span, part) for all parts of all spans, by a team: for spans of one sequence in order. `work`:
// multiplications of a token.
template <class F> void each_part(const StateSpan* spans, long count, long parts, long work, long threads, F f) {
  constexpr long SERIAL_WORK = 32768;  // multiplications below which a second thread costs more than it gains
  long tokens = 0;
  for (long i = 0; i < count; i++) tokens += spans[i].count;
  run_parallel(tokens * work < SERIAL_WORK ? 1 : threads, [=] {
#pragma omp for schedule(dynamic)
    for (long task = 0; task < count * parts; task++) {
      long i = task / parts;
      if (spans[i].continues) continue;  // computed with the first span of its sequence
      do f(spans[i], task % parts);
      while (++i < count && spans[i].continues);
    }
  });
}

// Recurrent states [rows][width] are computed in strips of columns. For several tokens, a strip is copied to adjacent
// memory that fits the first-level cache: a state's rows are often 512 bytes apart, and share few sets of it. For a
// single token, a wide strip is computed in place.
constexpr int STRIP_VECTORS = LANES == 16 ? 2 : 4, WIDE_VECTORS = 4;
constexpr long STRIP = STRIP_VECTORS * LANES, WIDE = WIDE_VECTORS * LANES;
constexpr long BLOCK_TOKENS = 64;  // that are computed before the next strip

// to [rows][STRIP] = `count` columns of from, whose rows are `stride` numbers apart; the other columns are 0
inline void read_strip(const float* from, long rows, long stride, long count, float* to) {
  for (long n = 0; n < rows; n++)
    for (int v = 0; v < STRIP_VECTORS; v++) {
      long left = count - v * LANES;
      store(to + n * STRIP + v * LANES, left > 0 ? load(from + n * stride + v * LANES, left) : Vec{});
    }
}

inline void write_strip(const float* from, long rows, long stride, long count, float* to) {
  for (long n = 0; n < rows; n++)
    for (long i = 0; i < count; i += LANES) store(to + n * stride + i, load<Vec>(from + n * STRIP + i), count - i);
}

// softplus(x) = log(1 + e^x) with a relative error of about 4e-7. With u = e^-|x| it is the larger of x and 0, plus
// log(1 + u) = 2 (s + s^3 / 3 + s^5 / 5 + ...) where s = u / (2 + u), which is at most 1 / 3.
static inline Vec softplus(Vec x) {
  Vec u = exp(x > 0.f ? -x : x), s = u / (u + 2.f), z = s * s, p = broadcast(1.f / 13);
  p = fma(p, z, broadcast(1.f / 11));
  p = fma(p, z, broadcast(1.f / 9));
  p = fma(p, z, broadcast(1.f / 7));
  p = fma(p, z, broadcast(1.f / 5));
  p = fma(p, z, broadcast(1.f / 3));
  p = fma(p, z, broadcast(1.f));
  return fma(s + s, p, x > 0.f ? x : Vec{});
}
