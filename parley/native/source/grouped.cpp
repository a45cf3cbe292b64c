// Linear layers with weights of 4 or 8 bits in groups: y = x W^T + bias with W[n][k] = scale (value(q) - zero). Scale and
// zero belong to an output and a group of adjacent numbers of K. Inputs stay bf16: the gain is that fewer bytes of
// weights are read. `Code` says what the bits mean: integers have zeros, floating-point numbers have none.
//
// An output element is computed group by group, from first to last: a chain of x times value over the group's pairs,
// starting at zero; for integers minus the group's sum of x times the zero; times the scale; added to the element. Each
// value is exact in bf16; integers count from the middle of their range. With few rows, weights become bf16 in registers;
// with more, once in a buffer that all tiles of rows read. The numbers and chains are the same, so the number of rows
// cannot change a bit.
//
// Numbers of 4 bits in small groups may have scales of 8 bits, which 16 bits hold, times one of 32 bits of the output.
//
// Packed weights are [panels][groups] of BLOCK scales and zeros, then [pairs of the group / Code::WORD][BLOCK]
// words of weights. A panel is BLOCK outputs. A word of weights holds adjacent pairs of K: the lowest bits of its low
// half are the first number of the first pair, those of its high half the second. A scale is a float, whose last bits are
// the zero of an integer, or a bf16.
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
// Up to this many rows, weights are unpacked again for each tile, which then costs less than a buffer: fewer rows if
// weights of 8 bits are unpacked
constexpr long NARROW = LANES == 16 ? 48 : 2, NARROW_8 = LANES == 16 ? FEW : 2;

#if defined(__AVX512BF16__)
typedef Bits Pairs;  // of weights as bf16, one pair per lane

// Bits 4 j to 4 j + 3 of each half of the words select an entry of `table`
static inline Pairs look_up(Bits words, int j, const bf16* table) {
  return (Bits)_mm512_permutexvar_epi16((__m512i)(words >> 4 * j), _mm512_load_si512(table));
}

// Numbers that bf16 has exactly
static inline Pairs pairs_of(Vec first, Vec second) { return ((Bits)second & 0xffff0000) | ((Bits)first >> 16); }

static inline Vec multiply(Vec sum, Bits x, Pairs weights) { return dot(sum, x, weights); }
#else
struct Pairs {  // as two floats
  Vec first, second;
};

static inline Pairs pairs_of(Vec first, Vec second) { return {first, second}; }

static inline Vec multiply(Vec sum, Bits x, Pairs weights) {
  return fma((Vec)(x & 0xffff0000), weights.second, fma((Vec)(x << 16), weights.first, sum));
}
#endif

// Number j of BITS bits in the low or high half of each word, moved to the top
template <int BITS> static inline Ints at_top(Bits words, int j, bool high) {
  return (Ints)(words << ((high ? 16 : 32) - BITS * (j + 1)));
}

// Integers of BITS bits, stored as the signed distance from the middle of their range
template <int BITS> struct Integers {
  static constexpr long WORD = 16 / BITS;  // pairs in a word
  static constexpr long SCALES = 1;        // in a word
  static constexpr uint32_t MIDDLE = 1 << (BITS - 1), FLIP = MIDDLE, ZERO = 2 * MIDDLE - 1;  // bits of the zero point

  // Pair j of each lane's word
  static inline Pairs unpack(Bits words, int j) {
#if defined(__AVX512BF16__)
    alignas(64) static const bf16 table[32] = {  // five bits select an entry, a number has four: doubled
        0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
        0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    if (BITS == 4) return look_up(words, j, table);
#endif
    Ints first = at_top<BITS>(words, j, false) >> (32 - BITS), second = at_top<BITS>(words, j, true) >> (32 - BITS);
    return pairs_of(__builtin_convertvector(first, Vec), __builtin_convertvector(second, Vec));
  }
};

// Floating-point numbers of a sign, EXPONENT bits and MANTISSA bits, without infinities. As the bits of a float they are
// 2^(BIAS - 127) of their value, also if subnormal.
template <int EXPONENT, int MANTISSA> struct Floats {
  static constexpr int BITS = 1 + EXPONENT + MANTISSA, BIAS = (1 << (EXPONENT - 1)) - 1;
  static constexpr long WORD = 16 / BITS, SCALES = BITS == 4 ? 2 : 1;
  static constexpr uint32_t MIDDLE = 0, FLIP = 0, ZERO = 0;

  static inline Vec widen(Ints top) {
    constexpr uint32_t keep = 0x80000000 | ((1 << (BITS - 1)) - 1) << (23 - MANTISSA);
    constexpr uint32_t factor = (254 - BIAS) << 23;  // 2^(127 - BIAS)
    float scale;
    memcpy(&scale, &factor, sizeof scale);
    return (Vec)((Bits)(top >> (8 - EXPONENT)) & keep) * scale;
  }

  static inline Pairs unpack(Bits words, int j) {
#if defined(__AVX512BF16__)
    if (BITS == 4) {
      alignas(64) static const bf16 table[32] = {
          0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
          0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
          0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
      return look_up(words, j, table);
    }
    if (EXPONENT == 4) {
      // In 16 bits, as that is half of the work. The product of bf16 takes subnormal numbers for zero, so they cannot be
      // scaled afterwards: those of the 8 bits are looked up.
      alignas(64) static const bf16 subnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
      __m512i top = (__m512i)(j ? words : words << 8), exponent = _mm512_set1_epi16(0x7800);
      __m512i normal = _mm512_add_epi16(_mm512_and_si512(_mm512_srli_epi16(top, 4), _mm512_set1_epi16(0x07f0)),
                                        _mm512_set1_epi16((127 - BIAS) << 7));
      __m512i both = _mm512_mask_permutexvar_epi16(normal, _mm512_testn_epi16_mask(top, exponent), _mm512_srli_epi16(top, 8),
                                                   _mm512_load_si512(subnormal));
      return (Bits)both | ((Bits)top & 0x80008000);
    }
#endif
    return pairs_of(widen(at_top<BITS>(words, j, false)), widen(at_top<BITS>(words, j, true)));
  }
};

using Int4 = Integers<4>;
using Int8 = Integers<8>;
using E4m3 = Floats<4, 3>;
using E2m1 = Floats<2, 1>;

// Vector i of a group's scales, with the zeros of integers in their last bits
template <class Code> static inline Bits scales_of(const uint32_t* scales, int i) {
  if (Code::SCALES == 2) return (Bits)load((const bf16*)scales + i * LANES);
  return read<Bits>(scales + i * LANES);
}

// Pairs of K unpacked at once: they stay in the L1 cache for all tiles
constexpr long STRETCH = 16384 / VECTORS / sizeof(Pairs);

// A panel's part of a group, packed: vector i of pair k + j
template <class Code> struct Narrow {
  const uint32_t* words;
  Pairs operator()(long k, int j, int i) const {
    const uint32_t* from = words + k / Code::WORD * BLOCK + i * LANES;
    if (j == 0 && i * LANES % 16 == 0) __builtin_prefetch((const char*)from + AHEAD);
    return Code::unpack(read<Bits>(from), j);
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
template <class Code, int ROWS, int WIDTH, class Weights>
void tile(const Pair* x, long stride, Weights weights, long steps, Sums sums) {
  Vec acc[ROWS][WIDTH];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < WIDTH; i++) acc[r][i] = sums.first ? Vec{} : read<Vec>(sums.rest + r * BLOCK + i * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * stride;
  for (long k = 0; k < steps; k += Code::WORD)
#pragma GCC unroll 4
    for (int j = 0; j < Code::WORD; j++) {
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
    Bits word = scales_of<Code>(sums.scales, i);
    Vec scale = (Vec)(word & ~Code::ZERO), zero = (float)Code::MIDDLE - __builtin_convertvector(word & Code::ZERO, Vec);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      long at = r * BLOCK + i * LANES;
      if (!sums.last) {
        put(sums.rest + at, acc[r][i]);
        continue;
      }
      Vec group = Code::ZERO ? fma(zero, fill(sums.x[r * sums.groups]), acc[r][i]) : acc[r][i];
      put(sums.totals + at, fma(group, scale, read<Vec>(sums.totals + at)));
    }
  }
}

template <class Weights> using Run = void (*)(const Pair*, long, Weights, long, Sums);

// The tile for this number of rows, 1 to ROWS
template <class Code, int ROWS, int WIDTH, class Weights> Run<Weights> pick(long rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return pick<Code, ROWS - 1, WIDTH, Weights>(rows);
  return tile<Code, ROWS, WIDTH, Weights>;
}

// One stretch for all rows, at most MOST at a time
template <class Code, int MOST, int WIDTH, class Weights>
void tiles(const Pair* x, long stride, Weights weights, long steps, Sums sums, long rows) {
  long count = (rows + MOST - 1) / MOST;
  for (long t = 0; t < count; t++) {
    long first = rows * t / count, end = rows * (t + 1) / count;
    Sums part = sums;
    part.rest += first * BLOCK, part.totals += first * BLOCK, part.x += first * sums.groups;
    pick<Code, MOST, WIDTH, Weights>(end - first)(x + first * stride, stride, weights, steps, part);
  }
}

// totals [rows][BLOCK] += one group
template <class Code> void add(const Pair* x, long stride, const uint32_t* words, long steps, Sums sums, long rows) {
  if (rows <= (Code::WORD == 2 ? NARROW_8 : NARROW))
    return tiles<Code, FEW, VECTORS>(x, stride, Narrow<Code>{words}, steps, sums, rows);
  Pairs wide[STRETCH * VECTORS];
  for (long k = 0; k < steps; k += STRETCH) {
    long count = std::min(STRETCH, steps - k);
    Narrow<Code> from = {words + k / Code::WORD * BLOCK};
    for (long s = 0; s < count; s += Code::WORD)
      for (int i = 0; i < VECTORS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < Code::WORD; j++) wide[(s + j) * VECTORS + i] = from(s, j, i);
    for (int i = 0; i < VECTORS; i += 2) {
      Sums half = sums;
      half.rest += i * LANES, half.totals += i * LANES, half.scales += i * LANES / Code::SCALES;
      half.first = k == 0, half.last = k + count == steps;
      tiles<Code, TILE, 2>(x + k, stride, Wide{wide + i}, count, half, rows);
    }
  }
}

// The groups of K: of `group` numbers each, a multiple of 8; the last is shorter and padded to such a multiple.
template <class Code> struct Cut {
  static constexpr long HEAD = BLOCK / Code::SCALES;  // words of scales
  long pairs, group, groups;                          // pairs of K and of a group
  Cut(long K, long size) : pairs((K + 7) / 8 * 4), group(size / 2), groups(group ? (pairs + group - 1) / group : 0) {}
  long words() const { return groups * HEAD + pairs / Code::WORD * BLOCK; }         // of a panel
  long at(long g) const { return g * HEAD + g * group / Code::WORD * BLOCK; }       // start of a group
  long steps(long g) const { return std::min(group, pairs - g * group); }
};

template <class Code, class T>
void run(const Pair* x, const uint32_t* packed, const float* scales, const bf16* bias, T* y, Slices slices, long N,
         Cut<Code> cut, int threads) {
  long panels = (N + BLOCK - 1) / BLOCK;
  std::vector<RowSlice> pieces = cut_slices(slices, panels, PASS, threads);
  if (pieces.empty()) return;
  long M = pieces.back().first + pieces.back().rows;
  Shares shares(pieces.size() * panels, threads);
  std::unique_ptr<float[]> sums(new float[M * cut.groups]);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long m = 0; m < (Code::ZERO ? M : 0); m++)
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
          add<Code>(x + first * cut.pairs + g * cut.group, cut.pairs, group + cut.HEAD, cut.steps(g), each, rows);
        }
        for (long r = 0; r < rows; r++)
          for (long i = 0; i < BLOCK && n + i < N; i += LANES) {
            Vec v = read<Vec>(totals + r * BLOCK + i);
            if (scales) v *= load(scales + weight * N + n + i, N - n - i);
            if (bias) v += load(bias + weight * N + n + i, N - n - i);
            store(y + (first + r) * N + n + i, v, N - n - i);
          }
      }
  }
}

template <class Code>
void pack(const uint8_t* q, const float* scales, const uint8_t* zeros, uint32_t* packed, long N, long K, long group,
          int threads) {
  constexpr int BITS = 16 / Code::WORD;
  Cut<Code> cut(K, group);
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < (N + BLOCK - 1) / BLOCK; p++)
    for (long g = 0; g < cut.groups; g++) {
      uint32_t *to = packed + p * cut.words() + cut.at(g), *words = to + cut.HEAD;
      for (long j = 0; j < BLOCK; j++) {
        long n = p * BLOCK + j;
        uint32_t bits = Code::MIDDLE;
        if (n < N) {
          memcpy(&bits, scales + n * cut.groups + g, sizeof bits);
          if (Code::ZERO) bits = ((bits + (Code::ZERO + 1) / 2) & ~Code::ZERO) | zeros[n * cut.groups + g];
        }
        if (Code::SCALES == 2) ((bf16*)to)[j] = bits >> 16;
        else to[j] = bits;
        for (long s = 0; s < cut.steps(g); s += Code::WORD) {
          uint32_t word = 0;
          for (long i = 0; i < 2 * Code::WORD; i++) {
            long k = 2 * (g * cut.group + s) + i;
            uint32_t value = n < N && k < K ? q[n * K + k] ^ Code::FLIP : 0;
            word |= value << (BITS * (i / 2) + 16 * (i % 2));
          }
          words[s / Code::WORD * BLOCK + j] = word;
        }
      }
    }
}

// f(code) for the code of this number, as Python counts them
template <class F> auto with_code(int64_t code, F f) {
  switch (code) {
    case 0: return f(Int4{});
    case 1: return f(Int8{});
    case 2: return f(E4m3{});
    default: return f(E2m1{});
  }
}

}  // namespace

void grouped_linear_slices(long code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias, void* y,
                           Slices slices, long N, long K, long group, bool wide, long threads) {
  with_code(code, [=](auto code) {
    Cut<decltype(code)> cut(K, group);
    if (wide) run((const Pair*)x, packed, scales, bias, (float*)y, slices, N, cut, threads);
    else run((const Pair*)x, packed, scales, bias, (bf16*)y, slices, N, cut, threads);
  });
}

extern "C" {

// Words of a packed weight [N, K] with groups of `group`, a multiple of 8.
int64_t grouped_size(int64_t code, int64_t N, int64_t K, int64_t group) {
  return with_code(code, [=](auto code) { return (N + BLOCK - 1) / BLOCK * Cut<decltype(code)>(K, group).words(); });
}

// q [N, K], scales [N, groups], zeros [N, groups] of integers -> packed
void grouped_pack(int64_t code, const uint8_t* q, const float* scales, const uint8_t* zeros, uint32_t* packed, int64_t N,
                  int64_t K, int64_t group, int64_t threads) {
  with_code(code, [=](auto code) { pack<decltype(code)>(q, scales, zeros, packed, N, K, group, threads); });
}

// y [M, N] = x [M, K] W^T + bias, as bf16, or as fp32 if `wide`. K is a multiple of 8; bias may be null, and so may the
// scales of outputs.
void grouped_linear(int64_t code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias, void* y, int64_t M, int64_t N,
                    int64_t K, int64_t group, int64_t wide, int64_t threads) {
  RowSlice all{0, M, 0};
  grouped_linear_slices(code, x, packed, scales, bias, y, {&all, M > 0}, N, K, group, wide, threads);
}

}  // extern "C"
