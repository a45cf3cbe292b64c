// What kernels of layers with a state share: spans of sequences, and tasks over the parts of a state.
//
// spans [count][4]: the first row of a sequence in the batch, its number of rows, its slot in the states, and whether it
// begins with these rows, and thus with a state of zeros. States of slots are `stride` floats apart.
#pragma once
#include <cmath>

#include "../shares.h"
#include "../vector.h"

struct StateSpan {
  int64_t first, count, slot, begins;
};

// Calls f(span, part) for all parts of all spans, by a team. `work`: multiplications of a token.
template <class F> void each_part(const StateSpan* spans, long count, long parts, long work, long threads, F f) {
  constexpr long FEW = 32768;  // multiplications below which a second thread costs more than it gains
  long tokens = 0;
  for (long i = 0; i < count; i++) tokens += spans[i].count;
  together(tokens * work < FEW ? 1 : threads, [=] {
#pragma omp for schedule(dynamic)
    for (long task = 0; task < count * parts; task++) f(spans[task / parts], task % parts);
  });
}

// softplus(x) = log(1 + e^x)
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
