// The largest logits of rows, and where they are: one pass over the vocabulary, then a look at the few places in question.
// And striking out those that may not come.
//
// What is not a number counts as the largest, as torch has it. A row is searched by one thread, by itself.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "team.h"
#include "vector.h"

namespace {

constexpr long BLOCK = 64;       // logits of which only the largest is looked at first
constexpr long STRETCH = 1024;   // the same where one is wanted
constexpr long SMALL = 1 << 16;  // logits below which a second thread costs more than it gains

// Rows are long, so there may be few of them for many threads.
int team(long rows, long width, long threads) { return rows * width < SMALL ? 1 : (int)std::min(rows, threads); }

float rank(float x) { return x != x ? INFINITY : x; }

// The largest of COUNT numbers that follow each other; strange becomes NaN where one is inf or no number.
template <long COUNT> float peak(const float* x, Vec& strange) {
  Vec most[4];
  for (int j = 0; j < 4; j++) most[j] = fill(-INFINITY);
  for (long i = 0; i < COUNT; i += 4 * LANES)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      Vec v = read<Vec>(x + i + j * LANES);
      most[j] = larger(v, most[j]);
      strange += larger(fill(-FLT_MAX), v) * 0.f;  // what cannot come is -inf, which is in order
    }
  return largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

// The largest of every COUNT numbers of a row, what is not a number as if it were infinite.
template <long COUNT> void find_peaks(const float* row, long count, std::vector<float>& peaks) {
  Vec strange = {};
  long i = 0;
  peaks.clear();
  for (; i + COUNT <= count; i += COUNT) peaks.push_back(peak<COUNT>(row + i, strange));
  float total = sum(strange);
  if (total != total) peaks.clear(), i = 0;  // one has to look
  for (; i < count; i += COUNT) {
    float most = -INFINITY;
    for (long j = i; j < std::min(count, i + COUNT); j++) most = std::max(most, rank(row[j]));
    peaks.push_back(most);
  }
}

}  // namespace

extern "C" {

// values [M], ids [M]: the largest number of each row of x [M, N] and the first place where it is. N > 0.
void argmax(const float* x, float* values, int64_t* ids, int64_t M, int64_t N, int64_t threads) {
  together(team(M, N, threads), [=] {
    std::vector<float> peaks;
#pragma omp for
    for (long m = 0; m < M; m++) {
      const float* row = x + m * N;
      find_peaks<STRETCH>(row, N, peaks);
      auto most = std::max_element(peaks.begin(), peaks.end());
      long where = (most - peaks.begin()) * STRETCH;
      while (rank(row[where]) != *most) where++;
      if (*most == INFINITY) {  // a NaN goes before what is infinite
        long odd = 0;
        while (odd < N && row[odd] == row[odd]) odd++;
        if (odd < N) where = odd;
      }
      values[m] = row[where];
      ids[m] = where;
    }
  });
}

// values, ids [M, count]: the largest numbers of each row of x [M, N], descending; of equal ones the first come first.
// 0 < count <= N.
void top_k(const float* x, float* values, int64_t* ids, int64_t M, int64_t N, int64_t count, int64_t threads) {
  together(team(M, N, threads), [=] {
    std::vector<float> peaks, sorted;
    std::vector<std::pair<float, long>> found;
#pragma omp for
    for (long m = 0; m < M; m++) {
      const float* row = x + m * N;
      find_peaks<BLOCK>(row, N, peaks);
      // So many blocks have a number at least as large as the one in place `count` of their peaks.
      float least = -INFINITY;
      if ((long)peaks.size() >= count) {
        sorted = peaks;
        std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<float>());
        least = sorted[count - 1];
      }
      found.clear();
      for (long block = 0; block < (long)peaks.size(); block++)
        if (peaks[block] >= least)
          for (long i = block * BLOCK; i < std::min(N, block * BLOCK + BLOCK); i++)
            if (rank(row[i]) >= least) found.emplace_back(-rank(row[i]), i);
      std::partial_sort(found.begin(), found.begin() + count, found.end());
      for (long i = 0; i < count; i++) {
        ids[m * count + i] = found[i].second;
        values[m * count + i] = row[found[i].second];
      }
    }
  });
}

// Those of x [N] whose bit is 0 become -inf: bits [N / 8, rounded up], of each byte the lowest is the first.
void strike(float* x, const uint8_t* bits, int64_t N) {
  for (int64_t i = 0; i < N; i += 8) {
    uint8_t byte = bits[i / 8];
    if (byte == 0xff) continue;
    if (byte == 0 && i + 8 <= N) {
      for (int j = 0; j < 8; j++) x[i + j] = -INFINITY;
      continue;
    }
    for (int64_t j = i; j < std::min(N, i + 8); j++)
      if (!(byte >> (j - i) & 1)) x[j] = -INFINITY;
  }
}

}  // extern "C"
