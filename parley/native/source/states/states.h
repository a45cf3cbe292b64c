// What kernels of layers with a state share: spans of sequences, and tasks over the parts of a state.
//
// spans [count][5]: the first row of a span in the batch, its number of rows, the row of the state before it (-1: a state
// of zeros), the row that gets the state after it, and whether it continues the sequence of the span before: then its
// first state is the other's last. Rows of states are `stride` floats apart.
#pragma once
#include <cmath>

#include "../shares.h"
#include "../vector.h"

struct StateSpan {
  int64_t first, count, source, target, continues;
};

// Calls f(span, part) for all parts of all spans, by a team: for spans of one sequence in order. `work`: multiplications
// of a token.
template <class F> void each_part(const StateSpan* spans, long count, long parts, long work, long threads, F f) {
  constexpr long FEW = 32768;  // multiplications below which a second thread costs more than it gains
  long tokens = 0;
  for (long i = 0; i < count; i++) tokens += spans[i].count;
  together(tokens * work < FEW ? 1 : threads, [=] {
#pragma omp for schedule(dynamic)
    for (long task = 0; task < count * parts; task++) {
      long i = task / parts;
      if (spans[i].continues) continue;  // computed with the first span of its sequence
      do f(spans[i], task % parts);
      while (++i < count && spans[i].continues);
    }
  });
}

// softplus(x) = log(1 + e^x)
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
