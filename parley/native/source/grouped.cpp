// Linear layers with weights of 1 to 8 bits in groups: y = x W^T + bias. A number of W is a scale times a value of few bits,
// and for some codes plus a shift. Both belong to an output and a group of adjacent numbers of K. Inputs stay bf16: the
// gain is that fewer bytes of weights are read. `Code` says what the bits mean (codes.h).
//
// An output element is computed group by group, from first to last: a chain of x times value over the group's pairs,
// starting at zero; with the group's sum of x times the shift; times the scale; added to the element. Each value is exact
// in bf16; integers count from the middle of their range. With few rows, weights become bf16 in registers; with more,
// once in a buffer that all tiles of rows read. The numbers and chains are the same, so the number of rows cannot change
// a bit.
//
// Where 16-bit integers are multiplied at twice the rate of floats (SHORT_PRODUCTS), the chains of integer codes are sums of
// integers, which are exact. RUN adjacent pairs of x, or those of a smaller group, are rounded to integers times a power
// of two: the largest has 15 bits. So only numbers below 1/128 of the largest lose bits of their bf16. The runs of a
// group are added up as floats.
//
// Numbers of 4 bits in small groups may have scales of 8 bits, which 16 bits hold, times one of 32 bits of the output.
//
// Packed weights are [panels][groups] of BLOCK scales and zeros, then [pairs of the group / Code::WORD][BLOCK]
// words of weights. A panel is BLOCK outputs. A word of weights holds adjacent pairs of K: the lowest bits of its low
// half are the first number of the first pair, those of its high half the second. A scale is a float, whose last bits are
// the zero of an integer, or a bf16 or a float16; or a word holds a scale and a zero or shift as floats of 16 bits. Of
// numbers of 3 bits the words hold two bits, and each row of BLOCK words is followed by BLOCK half words with the third: bit
// 4 * (j / 2) + j % 2 has that of the second number of pair j, and two bits above it lies that of the first.
//
// Blocks of GGUF files are [panels][blocks] of Code::HEAD rows of BLOCK words and then [groups] of Code::PART words. The
// first word of a head holds the scale as float16 and above it the minimum. The others hold the groups' integers, of 8 or 4
// bits each, that of the scale before that of the minimum. A group has words of four low bits, as above, and a word of the
// others: in each half of it, those of pair 4 s + j begin at bit 4 j + HIGH s. Numbers of 2 and 3 bits lie as above.
//
// A weight of several codes begins with a row of HEADER words: the number of parts, then code, group and number of outputs
// of each. The parts follow, packed as weights of their own.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "codes.h"
#include "kernels.h"
#include "shares.h"
#include "tile.h"
#include "weight.h"

namespace {

constexpr int FEW = LANES == 16 ? 6 : 2;  // rows whose sums, with a panel's numbers, fill the registers
constexpr long PASS = 256;                // rows whose sums are kept at once
// Up to this many rows, weights are unpacked again for each tile, which then costs less than a buffer: fewer rows if
// that is more work
constexpr long NARROW = LANES == 16 ? 48 : 2, NARROW_HARD = LANES == 16 ? FEW : 2;
constexpr long HEADER = 16;  // words before the parts of a weight of several codes
constexpr long RUN = 64;     // pairs of 16 bits whose products with weights of 8 bits are added up in 32 bits

// Whether rows of x are integers
template <class Code> constexpr bool SHORT = std::is_same_v<typename Code::Sum, Ints>;

// As FEW, of unpacked weights
template <class Code> constexpr int MANY = LANES == 16 || SHORT<Code> ? TILE : 4;

// Pairs of K unpacked at once: they stay in the L1 cache for all tiles
template <class Code> constexpr long STRETCH = SHORT<Code> ? RUN : 16384 / VECTORS / sizeof(Pairs);

// A panel's part of a group, packed: vector i of pair k + j
template <class Code> struct Narrow {
  const uint32_t* words;
  auto operator()(long k, int j, int i) const { return Code::unpack(words, k, j, i); }
};

template <class Code> using Unpacked = decltype(Code::unpack(nullptr, 0, 0, 0));

// The same, unpacked
template <class Code> struct Wide {
  const Unpacked<Code>* pairs;
  Unpacked<Code> operator()(long k, int j, int i) const { return pairs[(k + j) * VECTORS + i]; }
};

// The sums of a tile: chains, stored in `rest` between stretches of a group and added to `totals` after the last.
struct Sums {
  float *rest, *totals;  // [rows][BLOCK]
  const float* x;        // the group's sum of each row, with stride `groups`
  const float* units;    // of integers: the value of one in the run of each row, with stride `runs`
  const uint32_t* scales;
  long groups, runs;
  bool first, last;
};

// WIDTH vectors of a panel for ROWS rows of x with this stride, over one stretch of a group
template <class Code, int ROWS, int WIDTH, class Weights>
__attribute__((always_inline)) inline void tile(const Pair* x, long stride, Weights weights, long steps, Sums sums) {
  using Sum = typename Code::Sum;
  Sum acc[ROWS][WIDTH];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < WIDTH; i++)
      acc[r][i] = SHORT<Code> || sums.first ? Sum{} : read<Sum>(sums.rest + r * BLOCK + i * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * stride;
  for (long k = 0; k < steps; k += Code::WORD)
#pragma GCC unroll 16
    for (int j = 0; j < Code::WORD; j++) {
      Unpacked<Code> each[WIDTH];
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; i++) each[i] = weights(k, j, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const Pair* from = rows[r / 3] + r % 3 * stride + k + j;
#if defined(SIXTEEN_REGISTERS)
        if constexpr (SHORT<Code> && WIDTH == 2) {
          Operands<int32_t>::add(acc[r], from, each[0], each[1]);
          continue;
        }
#endif
        Bits pair = fill(*from);
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; i++) acc[r][i] = multiply(acc[r][i], pair, each[i]);
      }
    }
#pragma GCC unroll 4
  for (int i = 0; i < WIDTH; i++) {
    typename Code::Factors factors(sums.scales, i);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      long at = r * BLOCK + i * LANES;
      Vec sum = __builtin_convertvector(acc[r][i], Vec);
      if (SHORT<Code>) {
        sum *= sums.units[r * sums.runs];
        if (!sums.first) sum += read<Vec>(sums.rest + at);
      }
      if (!sums.last) {
        put(sums.rest + at, sum);
        continue;
      }
      float x_sum = Code::SHIFTED ? sums.x[r * sums.groups] : 0;
      put(sums.totals + at, factors.add(read<Vec>(sums.totals + at), sum, x_sum));
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

// One stretch for all rows, at most MOST at a time. Inline, because a call for each group would take a tenth of the time of
// few rows
template <class Code, int MOST, int WIDTH, class Weights>
__attribute__((always_inline)) inline void tiles(const Pair* x, long stride, Weights weights, long steps, Sums sums, long rows) {
  long count = (rows + MOST - 1) / MOST;
  for (long t = 0; t < count; t++) {
    long first = rows * t / count, end = rows * (t + 1) / count;
    Sums part = sums;
    part.rest += first * BLOCK, part.totals += first * BLOCK;
    part.x += first * sums.groups, part.units += first * sums.runs;
    pick<Code, MOST, WIDTH, Weights>(end - first)(x + first * stride, stride, weights, steps, part);
  }
}

// The code whose tiles compute unpacked numbers: for fewer bits those of 4, so that there is less to compile
template <class Code, bool IS_FEW> struct SummedCode { using Type = Code; };
template <class Code> struct SummedCode<Code, true> { using Type = typename Code::Wider; };
template <class Code> using Summed = typename SummedCode<Code, (Code::BITS < 4)>::Type;

// f(k, count, sums) for each stretch of a group, of at most `most` pairs
template <class F> void each_stretch(long steps, long most, Sums sums, F f) {
  for (long k = 0; k < steps; k += most, sums.units++) {
    long count = std::min(most, steps - k);
    sums.first = k == 0, sums.last = k + count == steps;
    f(k, count, sums);
  }
}

// totals [rows][BLOCK] += one group
template <class Code> void add(const Pair* x, long stride, const uint32_t* words, long steps, Sums sums, long rows) {
  if (rows <= (Code::BITS <= 4 ? NARROW : NARROW_HARD))
    return each_stretch(steps, SHORT<Code> ? RUN : steps, sums, [=](long k, long count, const Sums& part) {
      tiles<Code, FEW, VECTORS>(x + k, stride, Narrow<Code>{words + k / Code::WORD * ROW<Code::BITS>}, count, part, rows);
    });
  each_stretch(steps, STRETCH<Code>, sums, [=](long k, long count, const Sums& part) {
    Unpacked<Code> wide[STRETCH<Code> * VECTORS];
    for (long s = 0; s < count; s += Code::WORD)
      for (int i = 0; i < VECTORS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < Code::WORD; j++) wide[(s + j) * VECTORS + i] = Code::unpack(words, k + s, j, i);
    for (int i = 0; i < VECTORS; i += 2) {
      Sums half = part;
      half.rest += i * LANES, half.totals += i * LANES, half.scales += i * LANES / Code::SCALES;
      tiles<Summed<Code>, MANY<Code>, 2>(x + k, stride, Wide<Code>{wide + i}, count, half, rows);
    }
  });
}

// The groups of K: of `group` numbers each, a multiple of 8; the last is shorter and padded to such a multiple.
template <class Code> struct Cut {
  static constexpr long HEAD = BLOCK / Code::SCALES;  // words of scales
  long pairs, group, groups;                          // pairs of K and of a group
  Cut(long K, long size) : pairs((K + 7) / 8 * 4), group(size / 2), groups(group ? (pairs + group - 1) / group : 0) {}
  long runs() const { return (group + RUN - 1) / RUN; }                                // of a group
  long words() const { return groups * HEAD + pairs / Code::WORD * ROW<Code::BITS>; }  // of a panel
  long at(long g) const { return g * HEAD + g * group / Code::WORD * ROW<Code::BITS>; }  // start of a group
  long steps(long g) const { return std::min(group, pairs - g * group); }
};

// K is whole blocks
template <int HIGH, int GROUP, int NUMBERS, bool MINIMUMS, class Chosen>
struct Cut<Blocks<HIGH, GROUP, NUMBERS, MINIMUMS, Chosen>> {
  using Code = Blocks<HIGH, GROUP, NUMBERS, MINIMUMS, Chosen>;
  static constexpr long group = GROUP / 2;
  long pairs, groups;
  Cut(long K, long) : pairs(K / 2), groups(K / GROUP) {}
  long runs() const { return 1; }
  long words() const { return groups / Code::GROUPS * Code::WORDS; }
  long steps(long) const { return group; }
};

// f(x, words, steps, sums) for each group of a panel, with its scales in sums.scales
template <class Code, class F> void each_group(const Pair* x, const uint32_t* panel, Cut<Code> cut, Sums sums, F f) {
  for (long g = 0; g < cut.groups; g++, sums.x++, sums.units += cut.runs()) {
    sums.scales = panel + cut.at(g);
    f(x + g * cut.group, sums.scales + cut.HEAD, cut.steps(g), sums);
  }
}

template <int HIGH, int GROUP, int NUMBERS, bool MINIMUMS, class Chosen, class F>
void each_group(const Pair* x, const uint32_t* panel, Cut<Blocks<HIGH, GROUP, NUMBERS, MINIMUMS, Chosen>> cut, Sums sums,
                F f) {
  using Code = Blocks<HIGH, GROUP, NUMBERS, MINIMUMS, Chosen>;
  for (long b = 0; b < cut.groups / Code::GROUPS; b++, panel += Code::WORDS) {
    typename Code::Head head(panel);
    for (long g = 0; g < Code::GROUPS; g++, sums.x++, sums.units++, x += cut.group) {
      sums.scales = (const uint32_t*)head.scales[g];
      f(x, panel + Code::HEAD * BLOCK + g * Code::PART, cut.group, sums);
    }
  }
}

// totals [rows][BLOCK] += the product of rows of x and a panel. sums.scales: unused
template <class Code> void multiply_panel(const Pair* x, const uint32_t* panel, Cut<Code> cut, Sums sums, long rows) {
  // One row has the same sums without `add`, whose choice of a tile for each group would take a tenth of the time or more.
  // Without SIMD that matters less than the time to compile it
  if constexpr (LANES > 4)
    if (rows == 1)
      return each_group(x, panel, cut, sums, [&](const Pair* part, const uint32_t* words, long steps, const Sums& some) {
        each_stretch(steps, SHORT<Code> ? RUN : steps, some, [&](long k, long count, const Sums& sums) {
          tile<Code, 1, VECTORS>(part + k, cut.pairs, Narrow<Code>{words + k / Code::WORD * ROW<Code::BITS>}, count, sums);
        });
      });
  each_group(x, panel, cut, sums, [&](const Pair* part, const uint32_t* words, long steps, const Sums& some) {
    add<Code>(part, cut.pairs, words, steps, some, rows);
  });
}

// f(code) for the code of this number, as Python counts them
template <class F> auto with_code(int64_t code, F f) {
  switch (code) {
    case 0: return f(Int4{});
    case 1: return f(Int8{});
    case 2: return f(E4m3{});
    case 3: return f(E2m1{});
    case 4: return f(Q2K{});
    case 5: return f(Q3K{});
    case 6: return f(Q4K{});
    case 7: return f(Q5K{});
    case 8: return f(Q6K{});
    case 9: return f(Q4_1{});
    case 10: return f(Q5_0{});
    case 11: return f(Q5_1{});
    case 12: return f(Iq4Xs{});
    case 13: return f(Q4_0{});
    case 14: return f(Q8_0{});
    case 15: return f(Iq4Nl{});
    case 16: return f(Nf4{});
    case 17: return f(Fp4{});
    case 18: return f(Zero4F16{});
    case 19: return f(Zero4Bf16{});
    case 20: return f(Zero8F16{});
    case 21: return f(Zero8Bf16{});
    case 22: return f(Shift4F16{});
    case 23: return f(Shift4Bf16{});
    case 24: return f(Zero1F16{});
    case 25: return f(Zero1Bf16{});
    case 26: return f(Zero2F16{});
    case 27: return f(Zero2Bf16{});
    case 28: return f(Zero3F16{});
    case 29: return f(Zero3Bf16{});
    case 30: return f(Int2{});
    default: return f(Int3{});
  }
}

constexpr long SEVERAL = 32;  // the code of weights whose parts have codes of their own

long panels_of(long outputs) { return (outputs + BLOCK - 1) / BLOCK; }

template <class Code> Cut<Code> cut_of(Code, long K, long group) { return Cut<Code>(K, group); }

// Words of a panel
long panel_words(long code, long K, long group) {
  return with_code(code, [=](auto code) { return cut_of(code, K, group).words(); });
}

// Outputs that have the same code.
struct Part {
  long code, group, first, outputs;  // the first output
  long panel, start, words;          // the first panel, its place, the words of a panel
  std::shared_ptr<float[]> sums;     // of x, [rows][groups], if the code needs them
  std::shared_ptr<uint32_t[]> rows;     // x as integers, and their units [rows][groups][runs], if the code needs them
  std::shared_ptr<float[]> units;
};

struct Parts {
  std::vector<Part> list;
  long outputs = 0, panels = 0, words = 0;

  Parts(long code, const uint32_t* packed, long N, long K, long group) {
    words = code == SEVERAL ? HEADER : 0;
    if (code != SEVERAL) add(code, group, N, K);
    else for (uint32_t i = 0; i < packed[0]; i++) add(packed[3 * i + 1], packed[3 * i + 2], packed[3 * i + 3], K);
  }

  void add(long code, long group, long count, long K) {
    list.push_back({code, group, outputs, count, panels, words, panel_words(code, K, group), {}, {}, {}});
    outputs += count, panels += panels_of(count), words += panels_of(count) * list.back().words;
  }

  const Part& with_panel(long panel) const {
    auto part = list.begin();
    while (panel >= part->panel + panels_of(part->outputs)) part++;
    return *part;
  }
};

// The sums over the groups of rows of x, by a team
template <class Code> void sum_groups(const Pair* x, long M, Cut<Code> cut, float* sums) {
#pragma omp for
  for (long m = 0; m < M; m++)
    for (long g = 0; g < cut.groups; g++) {
      const bf16* from = (const bf16*)(x + m * cut.pairs + g * cut.group);
      Vec v = {};
      for (long i = 0, count = 2 * cut.steps(g); i < count; i += LANES) v += load(from + i, count - i);
      sums[m * cut.groups + g] = sum(v);
    }
}

// The power of two for which numbers below the largest in size are integers of at most 15 bits and a sign; NaN if one is
// infinite or NaN
static inline float unit_of(uint32_t largest) {
  uint32_t exponent = largest >> 7, bits = exponent == 255 ? 0x7fc00000 : (std::max(exponent, 15u) - 14) << 23;
  float unit;
  memcpy(&unit, &bits, sizeof unit);
  return unit;
}

// x as integers, and their sums over the groups, by a team. Products with the zero of a group must cancel out exactly
// what they are taken from: so the sums are those of the integers.
template <class Code> void round_rows(const Pair* x, long M, Cut<Code> cut, Pair* rows, float* units, float* sums) {
  const float round = 12582912.f;  // 1.5 * 2^23: after adding it, the low bits are the nearest integer
#pragma omp for
  for (long m = 0; m < M; m++)
    for (long g = 0; g < cut.groups; g++) {
      float total = 0;
      for (long k = 0, run = 0; k < cut.steps(g); k += RUN, run++) {
        long first = m * cut.pairs + g * cut.group + k, count = 2 * std::min(RUN, cut.steps(g) - k);
        const bf16* from = (const bf16*)(x + first);
        uint16_t* to = (uint16_t*)(rows + first);
        uint32_t largest = 0;
        for (long i = 0; i < count; i++) largest = std::max<uint32_t>(largest, from[i] & 0x7fff);
        float unit = units[(m * cut.groups + g) * cut.runs() + run] = unit_of(largest);
        float factor = 1 / unit;
        Vec integers = {};
        for (long i = 0; i < count; i += LANES) {
          Vec moved = load(from + i, count - i) * factor + round;
          Half each = __builtin_convertvector((Bits)moved & 0xffff, Half);
          memcpy(to + i, &each, std::min<long>(LANES, count - i) * sizeof *to);
          integers += moved - round;
        }
        total += sum(integers) * unit;
      }
      if (sums) sums[m * cut.groups + g] = total;
    }
}

template <class T>
void run(const Pair* x, const uint32_t* packed, Parts parts, const float* scales, const bf16* bias, T* y, Slices slices,
         long N, long K, int threads) {
  std::vector<RowSlice> pieces = cut_slices(slices, parts.panels, PASS, threads);
  if (pieces.empty()) return;
  long M = pieces.back().first + pieces.back().rows;
  for (Part& part : parts.list)
    with_code(part.code, [&](auto code) {
      auto cut = cut_of(code, K, part.group);
      if (code.SHIFTED) part.sums.reset(new float[M * cut.groups]);
      if (!SHORT<decltype(code)>) return;
      part.rows.reset(new uint32_t[M * cut.pairs]);
      part.units.reset(new float[M * cut.groups * cut.runs()]);
    });
  Shares shares(pieces.size() * parts.panels, threads);
#pragma omp parallel num_threads(threads)
  {
    for (const Part& part : parts.list)
      with_code(part.code, [&](auto code) {
        auto cut = cut_of(code, K, part.group);
        if constexpr (SHORT<decltype(code)>) round_rows(x, M, cut, part.rows.get(), part.units.get(), part.sums.get());
        else if (code.SHIFTED) sum_groups(x, M, cut, part.sums.get());
      });
    alignas(64) float totals[PASS * BLOCK], rest[PASS * BLOCK];
    for (Shares::Tasks some; (some = shares.take(omp_get_thread_num())).end;)
      for (long task = some.first; task < some.end; task++) {
        auto [first, rows, weight] = pieces[task / parts.panels];
        const Part& part = parts.with_panel(task % parts.panels);
        long number = task % parts.panels - part.panel, n = number * BLOCK, count = part.outputs - n;
        std::fill(totals, totals + rows * BLOCK, 0.f);
        with_code(part.code, [&, first = first, rows = rows, weight = weight](auto code) {
          auto cut = cut_of(code, K, part.group);
          long runs = cut.groups * cut.runs();
          const float* x_sums = code.SHIFTED ? part.sums.get() + first * cut.groups : nullptr;
          const float* units = SHORT<decltype(code)> ? part.units.get() + first * runs : nullptr;
          const Pair* from = SHORT<decltype(code)> ? part.rows.get() : x;
          multiply_panel(from + first * cut.pairs, packed + weight * parts.words + part.start + number * part.words, cut,
                         {rest, totals, x_sums, units, nullptr, cut.groups, runs, true, true}, rows);
        });
        n += part.first;
        for (long r = 0; r < rows; r++)
          for (long i = 0; i < BLOCK && i < count; i += LANES) {
            Vec v = read<Vec>(totals + r * BLOCK + i);
            if (scales) v *= load(scales + weight * N + n + i, count - i);
            if (bias) v += load(bias + weight * N + n + i, count - i);
            store(y + (first + r) * N + n + i, v, count - i);
          }
      }
  }
}

// Where the third bit of a number lies: the first or second of a pair
long third_bit(long pair, long second) { return pair / 2 * 4 + pair % 2 + (second ? 0 : 2); }

template <class Code>
void pack(const uint8_t* q, const float* scales, const uint8_t* zeros, uint32_t* packed, long N, long K, Cut<Code> cut,
          int threads) {
  constexpr int SIZE = WORD_BITS<Code::BITS>;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels_of(N); p++)
    for (long g = 0; g < cut.groups; g++) {
      uint32_t *to = packed + p * cut.words() + cut.at(g), *words = to + cut.HEAD;
      for (long j = 0; j < BLOCK; j++) {
        long n = p * BLOCK + j;
        uint32_t bits = Code::MIDDLE;
        if (n < N) {
          memcpy(&bits, scales + n * cut.groups + g, sizeof bits);
          if (Code::ZERO) bits = ((bits + (Code::ZERO + 1) / 2) & ~Code::ZERO) | zeros[n * cut.groups + g];
        }
        if (Code::SCALES == 2) ((bf16*)to)[j] = Code::HALVES ? half_of(bits) : bits >> 16;
        else to[j] = bits;
        for (long s = 0; s < cut.steps(g); s += Code::WORD) {
          uint32_t word = 0, third = 0;
          for (long i = 0; i < 2 * Code::WORD; i++) {
            long k = 2 * (g * cut.group + s) + i;
            uint32_t value = n < N && k < K ? q[n * K + k] ^ Code::FLIP : 0;
            word |= (value & ((1 << SIZE) - 1)) << (SIZE * (i / 2) + 16 * (i % 2));
            if (Code::BITS == 3) third |= (value >> 2 & 1) << third_bit(i / 2, i % 2);
          }
          uint32_t* row = words + s / Code::WORD * ROW<Code::BITS>;
          row[j] = word;
          if (Code::BITS == 3) ((bf16*)(row + BLOCK))[j] = third;
        }
      }
    }
}

template <int HIGH, int GROUP, int NUMBERS, bool MINIMUMS, class Chosen>
void pack(const uint8_t* q, const uint32_t* heads, const uint8_t*, uint32_t* packed, long N, long K,
          Cut<Blocks<HIGH, GROUP, NUMBERS, MINIMUMS, Chosen>> cut, int threads) {
  using Code = Blocks<HIGH, GROUP, NUMBERS, MINIMUMS, Chosen>;
  constexpr int SIZE = Code::IS_FEW ? 2 : 4;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels_of(N); p++) {
    uint32_t* to = packed + p * cut.words();
    std::fill(to, to + cut.words(), 0);
    for (long j = 0; j < BLOCK && p * BLOCK + j < N; j++)
      for (long b = 0; b < K / NUMBERS; b++) {
        long n = p * BLOCK + j, block = n * (K / NUMBERS) + b;
        uint32_t *head = to + b * Code::WORDS, *groups = head + Code::HEAD * BLOCK;
        for (long i = 0; i < Code::HEAD; i++) head[i * BLOCK + j] = heads[block * Code::HEAD + i];
        for (long k = 0; k < NUMBERS; k++) {
          uint32_t value = q[block * NUMBERS + k] ^ Code::FLIP;
          long pair = k % GROUP / 2, s = pair / Code::WORD, at = pair % Code::WORD, half = SIZE * at + 16 * (k % 2);
          uint32_t* group = groups + k / GROUP * Code::PART;
          group[s * BLOCK + j] |= (value & ((1 << SIZE) - 1)) << half;
          if (HIGH > 0) group[Code::LOW * BLOCK + j] |= (value >> 4) << (half + HIGH * s);
          if (HIGH == -1) ((bf16*)(group + BLOCK))[j] |= (value >> 2 & 1) << third_bit(at, k % 2);
        }
      }
  }
}

}  // namespace

void grouped_linear_slices(long code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias, void* y,
                           Slices slices, long N, long K, long group, bool wide, long threads) {
  Parts parts(code, packed, N, K, group);
  if (wide) run((const Pair*)x, packed, parts, scales, bias, (float*)y, slices, N, K, threads);
  else run((const Pair*)x, packed, parts, scales, bias, (bf16*)y, slices, N, K, threads);
}

extern "C" {

// Outputs that are packed together: a part of a weight that begins at a multiple of them can be packed alone.
int64_t grouped_panel() { return BLOCK; }

// Words of a packed weight [N, K] with groups of `group`, a multiple of 8.
int64_t grouped_size(int64_t code, int64_t N, int64_t K, int64_t group) { return panels_of(N) * panel_words(code, K, group); }

// q [N, K], scales [N, groups], zeros [N, groups] of integers -> packed. Scales may be words with zeros. Blocks have heads [N, blocks, Code::HEAD] instead
// of scales, and no zeros.
void grouped_pack(int64_t code, const uint8_t* q, const void* scales, const uint8_t* zeros, uint32_t* packed, int64_t N,
                  int64_t K, int64_t group, int64_t threads) {
  with_code(code, [=](auto code) {
    using Scale = std::conditional_t<code.IS_BLOCK, uint32_t, float>;
    pack(q, (const Scale*)scales, zeros, packed, N, K, cut_of(code, K, group), threads);
  });
}

// y [M, N] = x [M, K] W^T + bias, as bf16, or as fp32 if `wide`. K is a multiple of 8; bias may be null, and so may the
// scales of outputs.
void grouped_linear(int64_t code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias, void* y, int64_t M, int64_t N,
                    int64_t K, int64_t group, int64_t wide, int64_t threads) {
  RowSlice all{0, M, 0};
  grouped_linear_slices(code, x, packed, scales, bias, y, {&all, M > 0}, N, K, group, wide, threads);
}

}  // extern "C"
