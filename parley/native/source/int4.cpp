// Linear layers with weights of 4-bit integers: y = x W^T + bias with W[n][k] = scale (q - zero). Scale and zero belong
// to an output and a group of adjacent numbers of K. Inputs stay bf16: the gain is that fewer bytes of weights are
// read.
//
// An output element is computed group by group, from first to last: a chain of x (q - 8) over the group's pairs,
// starting at zero; minus the group's sum of x times (zero - 8); times the scale; added to the element. q - 8 is exact
// in bf16. With few rows, weights become bf16 in registers; with more, once in a buffer that all tiles of rows read.
// The numbers and chains are the same, so the number of rows cannot change a bit.
//
// Packed weights are [panels][groups] of BLOCK words of scale and zero, then [pairs of the group / 4][BLOCK] words of
// weights. A panel is BLOCK outputs. A word of weights holds four adjacent pairs of K: bits 4 j of its low half are the
// first number of pair j, those of its high half the second. A word of scale and zero is a float whose last four bits
// are the zero.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "kernels.h"
#include "shares.h"
#include "tile.h"
#include "weight.h"

namespace {

constexpr int VECTORS = 4;                // of a panel: fewer parallel chains would wait for each other
constexpr int BLOCK = VECTORS * LANES;    // columns of a panel
constexpr int FEW = LANES == 16 ? 6 : 2;  // rows whose sums, with a panel's numbers, fill the registers
constexpr long PASS = 256;                // rows whose sums are kept at once
constexpr long WORD = 4;                  // pairs in a word
// Up to this many rows, weights are unpacked again for each tile, which then costs less than a buffer
constexpr long NARROW = LANES == 16 ? 48 : 2;

#if defined(__AVX512BF16__)
typedef Bits Pairs;  // of weights as bf16, one pair per lane

// Pair j of each lane's word
static inline Pairs unpack(Bits words, int j) {
  alignas(64) static const bf16 table[32] = {  // five bits select an entry, a number has four: doubled
      0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
      0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  return (Bits)_mm512_permutexvar_epi16((__m512i)(words >> 4 * j), _mm512_load_si512(table));
}

static inline Vec multiply(Vec sum, Bits x, Pairs weights) { return dot(sum, x, weights); }
#else
struct Pairs {  // as two floats
  Vec first, second;
};

static inline Pairs unpack(Bits words, int j) {
  typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
  Ints first = (Ints)(words << (28 - 4 * j)) >> 28, second = (Ints)(words << (12 - 4 * j)) >> 28;
  return {__builtin_convertvector(first, Vec), __builtin_convertvector(second, Vec)};
}

static inline Vec multiply(Vec sum, Bits x, Pairs weights) {
  return fma((Vec)(x & 0xffff0000), weights.second, fma((Vec)(x << 16), weights.first, sum));
}
#endif

// Pairs of K unpacked at once: they stay in the L1 cache for all tiles
constexpr long STRETCH = 16384 / VECTORS / sizeof(Pairs);

// A panel's part of a group, packed: vector i of pair k + j
struct Narrow {
  const uint32_t* words;
  Pairs operator()(long k, int j, int i) const {
    const uint32_t* from = words + k / WORD * BLOCK + i * LANES;
    if (j == 0 && i * LANES % 16 == 0) __builtin_prefetch((const char*)from + AHEAD);
    return unpack(read<Bits>(from), j);
  }
};

// The same, unpacked
struct Wide {
  const Pairs* pairs;
  Pairs operator()(long k, int j, int i) const { return pairs[(k + j) * VECTORS + i]; }
};

// The sums of a tile: chains, stored in `rest` between stretches of a group and added to `totals` after the last.
struct Sums {
  float *rest, *totals;  // [rows][BLOCK]
  const float* x;        // the group's sum of each row, with stride `groups`
  const uint32_t* scales;
  long groups;
  bool first, last;
};

// WIDTH vectors of a panel for ROWS rows of x with this stride, over one stretch of a group
template <int ROWS, int WIDTH, class Weights> void tile(const Pair* x, long stride, Weights weights, long steps, Sums sums) {
  Vec acc[ROWS][WIDTH];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < WIDTH; i++) acc[r][i] = sums.first ? Vec{} : read<Vec>(sums.rest + r * BLOCK + i * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * stride;
  for (long k = 0; k < steps; k += WORD)
#pragma GCC unroll 4
    for (int j = 0; j < WORD; j++) {
      Pairs each[WIDTH];
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; i++) each[i] = weights(k, j, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Bits pair = fill(rows[r / 3][r % 3 * stride + k + j]);
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) acc[r][i] = multiply(acc[r][i], pair, each[i]);
      }
    }
#pragma GCC unroll 4
  for (int i = 0; i < WIDTH; i++) {
    Bits word = read<Bits>(sums.scales + i * LANES);
    Vec scale = (Vec)(word & ~15u), zero = 8.f - __builtin_convertvector(word & 15, Vec);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      long at = r * BLOCK + i * LANES;
      if (!sums.last) {
        put(sums.rest + at, acc[r][i]);
        continue;
      }
      Vec group = fma(zero, fill(sums.x[r * sums.groups]), acc[r][i]);
      put(sums.totals + at, fma(group, scale, read<Vec>(sums.totals + at)));
    }
  }
}

template <class Weights> using Run = void (*)(const Pair*, long, Weights, long, Sums);

// The tile for this number of rows, 1 to ROWS
template <int ROWS, int WIDTH, class Weights> Run<Weights> pick(long rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return pick<ROWS - 1, WIDTH, Weights>(rows);
  return tile<ROWS, WIDTH, Weights>;
}

// One stretch for all rows, at most MOST at a time
template <int MOST, int WIDTH, class Weights>
void tiles(const Pair* x, long stride, Weights weights, long steps, Sums sums, long rows) {
  long count = (rows + MOST - 1) / MOST;
  for (long t = 0; t < count; t++) {
    long first = rows * t / count, end = rows * (t + 1) / count;
    Sums part = sums;
    part.rest += first * BLOCK, part.totals += first * BLOCK, part.x += first * sums.groups;
    pick<MOST, WIDTH, Weights>(end - first)(x + first * stride, stride, weights, steps, part);
  }
}

// totals [rows][BLOCK] += one group
void add(const Pair* x, long stride, const uint32_t* words, long steps, Sums sums, long rows) {
  if (rows <= NARROW) return tiles<FEW, VECTORS>(x, stride, Narrow{words}, steps, sums, rows);
  Pairs wide[STRETCH * VECTORS];
  for (long k = 0; k < steps; k += STRETCH) {
    long count = std::min(STRETCH, steps - k);
    Narrow from = {words + k / WORD * BLOCK};
    for (long s = 0; s < count; s += WORD)
      for (int i = 0; i < VECTORS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < WORD; j++) wide[(s + j) * VECTORS + i] = from(s, j, i);
    for (int i = 0; i < VECTORS; i += 2) {
      Sums half = sums;
      half.rest += i * LANES, half.totals += i * LANES, half.scales += i * LANES;
      half.first = k == 0, half.last = k + count == steps;
      tiles<TILE, 2>(x + k, stride, Wide{wide + i}, count, half, rows);
    }
  }
}

// The groups of K: of `group` numbers each, a multiple of 8; the last is shorter and padded to such a multiple.
struct Cut {
  long pairs, group, groups;  // pairs of K and of a group
  Cut(long K, long size) : pairs((K + 7) / 8 * WORD), group(size / 2), groups(group ? (pairs + group - 1) / group : 0) {}
  long words() const { return (groups + pairs / WORD) * BLOCK; }                          // of a panel
  long at(long g) const { return (g + g * group / WORD) * BLOCK; }                        // start of a group
  long steps(long g) const { return std::min(group, pairs - g * group); }
};

template <class T>
void run(const Pair* x, const uint32_t* packed, const bf16* bias, T* y, Slices slices, long N, Cut cut,
         int threads) {
  long panels = (N + BLOCK - 1) / BLOCK;
  std::vector<RowSlice> pieces = cut_slices(slices, panels, PASS, threads);
  if (pieces.empty()) return;
  long M = pieces.back().first + pieces.back().rows;
  Shares shares(pieces.size() * panels, threads);
  std::unique_ptr<float[]> sums(new float[M * cut.groups]);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long m = 0; m < M; m++)
      for (long g = 0; g < cut.groups; g++) {
        const bf16* from = (const bf16*)(x + m * cut.pairs + g * cut.group);
        Vec v = {};
        for (long i = 0, count = 2 * cut.steps(g); i < count; i += LANES) v += load(from + i, count - i);
        sums[m * cut.groups + g] = sum(v);
      }
    alignas(64) float totals[PASS * BLOCK], rest[PASS * BLOCK];
    for (Shares::Tasks some; (some = shares.take(omp_get_thread_num())).end;)
      for (long task = some.first; task < some.end; task++) {
        auto [first, rows, weight] = pieces[task / panels];
        long panel = weight * panels + task % panels, n = task % panels * BLOCK;
        std::fill(totals, totals + rows * BLOCK, 0.f);
        for (long g = 0; g < cut.groups; g++) {
          const uint32_t* group = packed + panel * cut.words() + cut.at(g);
          Sums each = {rest, totals, sums.get() + first * cut.groups + g, group, cut.groups, true, true};
          add(x + first * cut.pairs + g * cut.group, cut.pairs, group + BLOCK, cut.steps(g), each, rows);
        }
        for (long r = 0; r < rows; r++)
          for (long i = 0; i < BLOCK && n + i < N; i += LANES) {
            Vec v = read<Vec>(totals + r * BLOCK + i);
            if (bias) v += load(bias + weight * N + n + i, N - n - i);
            store(y + (first + r) * N + n + i, v, N - n - i);
          }
      }
  }
}

}  // namespace

void int4_linear_slices(const bf16* x, const uint32_t* packed, const bf16* bias, void* y, Slices slices, long N,
                       long K, long group, bool wide, long threads) {
  Cut cut(K, group);
  if (wide) run((const Pair*)x, packed, bias, (float*)y, slices, N, cut, threads);
  else run((const Pair*)x, packed, bias, (bf16*)y, slices, N, cut, threads);
}

extern "C" {

// Words of a packed weight [N, K] with groups of `group`, a multiple of 8.
int64_t int4_size(int64_t N, int64_t K, int64_t group) { return (N + BLOCK - 1) / BLOCK * Cut(K, group).words(); }

// q [N, K] of 0..15, scales [N, groups], zeros [N, groups] of 0..15 -> packed
void int4_pack(const uint8_t* q, const float* scales, const uint8_t* zeros, uint32_t* packed, int64_t N, int64_t K,
               int64_t group, int64_t threads) {
  Cut cut(K, group);
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < (N + BLOCK - 1) / BLOCK; p++)
    for (long g = 0; g < cut.groups; g++) {
      uint32_t *to = packed + p * cut.words() + cut.at(g), *words = to + BLOCK;
      for (long j = 0; j < BLOCK; j++) {
        long n = p * BLOCK + j;
        uint32_t bits = 8;
        if (n < N) {
          memcpy(&bits, scales + n * cut.groups + g, sizeof bits);
          bits = ((bits + 8) & ~15u) | zeros[n * cut.groups + g];
        }
        to[j] = bits;
        for (long s = 0; s < cut.steps(g); s += WORD) {
          uint32_t word = 0;
          for (long i = 0; i < 2 * WORD; i++) {
            long k = 2 * (g * cut.group + s) + i;
            uint32_t value = n < N && k < K ? q[n * K + k] ^ 8 : 0;
            word |= value << (4 * (i / 2) + 16 * (i % 2));
          }
          words[s / WORD * BLOCK + j] = word;
        }
      }
    }
}

// y [M, N] = x [M, K] W^T + bias, as bf16, or as fp32 if `wide`. K is a multiple of 8; bias may be null.
void int4_linear(const bf16* x, const uint32_t* packed, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K,
                 int64_t group, int64_t wide, int64_t threads) {
  RowSlice all{0, M, 0};
  int4_linear_slices(x, packed, bias, y, {&all, M > 0}, N, K, group, wide, threads);
}

}  // extern "C"
