// The largest logits of rows and their ids: one pass over the vocabulary finds blocks with candidates, which are then
// searched. Also softmax totals, and masks of forbidden tokens.
//
// NaN counts as the largest number, as in torch. One thread searches a row.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "threads.h"
#include "vector.h"

namespace {

constexpr long TOP_K_BLOCK = 64;         // top_k first looks only at the maximum of each block of this many logits
constexpr long ARGMAX_BLOCK = 1024;      // the same for argmax
constexpr long SERIAL_LOGITS = 1 << 16;  // logits below which a second thread costs more than it gains

// Rows are long, so there may be fewer rows than threads.
int threads_for(long rows, long width, long threads) {
  return rows * width < SERIAL_LOGITS ? 1 : (int)std::min(rows, threads);
}

float rank(float x) { return x != x ? INFINITY : x; }

// The largest of COUNT adjacent numbers; not_finite becomes NaN if one of them is +inf or NaN.
template <long COUNT> float block_max(const float* x, Vec& not_finite) {
  Vec most[4];
  for (int j = 0; j < 4; j++) most[j] = broadcast(-INFINITY);
  for (long i = 0; i < COUNT; i += 4 * LANES)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      Vec v = load<Vec>(x + i + j * LANES);
      most[j] = max_of(v, most[j]);
      not_finite += max_of(broadcast(-FLT_MAX), v) * 0.f;  // -inf is normal: the token is masked
    }
  return largest(max_of(max_of(most[0], most[1]), max_of(most[2], most[3])));
}

constexpr float NEGLIGIBLE = -28;                // anything below weighs 0: e^-28 is less than 2^-40
constexpr long INT32_LOGITS = 64 * LANES;        // numbers whose weights are summed in 32 bits
constexpr long TASK_LOGITS = 16 * INT32_LOGITS;  // of a row: summed by a thread at a time

// The sum of weights floor(2^40 e^(x - largest)) of numbers not above `largest`, as high * 2^24 + low.
struct Weights {
  Ints high = {}, low = {};

  void add(Vec x, float largest) {
    x -= largest;
    Vec weight = exp(x < NEGLIGIBLE ? broadcast(NEGLIGIBLE) : x) * 65536.f;
    Ints whole = __builtin_convertvector(weight, Ints);
    weight = (weight - __builtin_convertvector(whole, Vec)) * 16777216.f;  // the fraction has at most these bits
    high += whole, low += __builtin_convertvector(weight, Ints);
  }

  int64_t total() const {
    int64_t total = 0;
    for (int j = 0; j < LANES; j++) total += (int64_t)high[j] * (1 << 24) + low[j];
    return total;
  }
};

// The sum over at most INT32_LOGITS numbers.
int64_t sum_weights(const float* x, long count, float largest) {
  Weights weights;
  long i = 0;
  for (; i + LANES <= count; i += LANES) weights.add(load<Vec>(x + i), largest);
  if (i < count) {
    float rest[LANES];
    for (long j = 0; j < LANES; j++) rest[j] = i + j < count ? x[i + j] : -INFINITY;
    weights.add(load<Vec>(rest), largest);
  }
  return weights.total();
}

// The largest of every COUNT numbers of a row. NaN counts as infinite.
template <long COUNT> void find_block_maxima(const float* row, long count, std::vector<float>& peaks) {
  Vec not_finite = {};
  long i = 0;
  peaks.clear();
  for (; i + COUNT <= count; i += COUNT) peaks.push_back(block_max<COUNT>(row + i, not_finite));
  float total = sum(not_finite);
  if (total != total) peaks.clear(), i = 0;  // some number is +inf or NaN: compare one by one
  for (; i < count; i += COUNT) {
    float most = -INFINITY;
    for (long j = i; j < std::min(count, i + COUNT); j++) most = std::max(most, rank(row[j]));
    peaks.push_back(most);
  }
}

}  // namespace

extern "C" {

// values [M], ids [M]: the largest number of each row of x [M, N] and its first index. N > 0.
void argmax(const float* x, float* values, int64_t* ids, int64_t M, int64_t N, int64_t threads) {
  run_parallel(threads_for(M, N, threads), [=] {
    std::vector<float> peaks;
#pragma omp for
    for (long m = 0; m < M; m++) {
      const float* row = x + m * N;
      find_block_maxima<ARGMAX_BLOCK>(row, N, peaks);
      auto most = std::max_element(peaks.begin(), peaks.end());
      long where = (most - peaks.begin()) * ARGMAX_BLOCK;
      while (rank(row[where]) != *most) where++;
      if (*most == INFINITY) {  // NaN ranks above infinity
        long odd = 0;
        while (odd < N && row[odd] == row[odd]) odd++;
        if (odd < N) where = odd;
      }
      values[m] = row[where];
      ids[m] = where;
    }
  });
}

// values, ids [M, count]: the largest numbers of each row of x [M, N], descending; of equal ones, the lowest ids first.
// 0 < count <= N.
void top_k(const float* x, float* values, int64_t* ids, int64_t M, int64_t N, int64_t count, int64_t threads) {
  run_parallel(threads_for(M, N, threads), [=] {
    std::vector<float> peaks, sorted;
    std::vector<std::pair<float, long>> found;
#pragma omp for
    for (long m = 0; m < M; m++) {
      const float* row = x + m * N;
      find_block_maxima<TOP_K_BLOCK>(row, N, peaks);
      // If the count-th largest block maximum is `least`, then at least `count` numbers are >= least.
      float least = -INFINITY;
      if ((long)peaks.size() >= count) {
        sorted = peaks;
        std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<float>());
        least = sorted[count - 1];
      }
      found.clear();
      for (long block = 0; block < (long)peaks.size(); block++)
        if (peaks[block] >= least)
          for (long i = block * TOP_K_BLOCK; i < std::min(N, block * TOP_K_BLOCK + TOP_K_BLOCK); i++)
            if (rank(row[i]) >= least) found.emplace_back(-rank(row[i]), i);
      std::partial_sort(found.begin(), found.begin() + count, found.end());
      for (long i = 0; i < count; i++) {
        ids[m * count + i] = found[i].second;
        values[m * count + i] = row[found[i].second];
      }
    }
  });
}

// totals [M]: the sum of weights floor(2^40 e^(x - peak)) of each row of x [M, N]. peaks [M] are the largest numbers of
// the rows, and finite. Integer sums are the same in any order, so threads may share a row.
void softmax_totals(const float* x, const float* peaks, int64_t* totals, int64_t M, int64_t N, int64_t threads) {
  long parts = (N + TASK_LOGITS - 1) / TASK_LOGITS;
  std::fill(totals, totals + M, 0);
  run_parallel(M * N < SERIAL_LOGITS ? 1 : threads, [=] {
#pragma omp for
    for (long task = 0; task < M * parts; task++) {
      long m = task / parts, first = task % parts * TASK_LOGITS, end = std::min(N, first + TASK_LOGITS);
      int64_t total = 0;
      for (long i = first; i < end; i += INT32_LOGITS)
        total += sum_weights(x + m * N + i, std::min(INT32_LOGITS, end - i), peaks[m]);
#pragma omp atomic
      totals[m] += total;
    }
  });
}

// The first index of the largest number of x [N] among those whose bit is 1, or -1 if there is none. Bits as in
// apply_mask. x has no NaN.
int64_t masked_argmax(const float* x, const uint8_t* bits, int64_t N) {
  int64_t where = -1;
  for (int64_t i = 0; i < N; i += 64) {
    uint64_t word = 0;
    memcpy(&word, bits + i / 8, std::min<int64_t>(8, (N - i + 7) / 8));
    for (; word; word &= word - 1) {
      int64_t at = i + __builtin_ctzll(word);
      if (where < 0 || x[at] > x[where]) where = at;
    }
  }
  return where;
}

// Sets numbers of x [N] whose bit is 0 to -inf. bits [N / 8, rounded up], lowest bit of each byte first.
void apply_mask(float* x, const uint8_t* bits, int64_t N) {
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
