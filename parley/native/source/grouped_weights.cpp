// Linear layers whose weights have 1 to 8 bits in groups: y = x W^T + bias. A number of W is a scale times a value of
// few bits, and for some codes plus a shift. Both belong to an output and a group of adjacent numbers of K. Activations
// stay bf16: the gain is that fewer bytes of weights are read. `Code` says what the bits mean (weight_codes.h).
//
// Computation. An output is computed group by group, from first to last: a chain of x times value over the group's
// pairs, starting at zero; plus the group's sum of x times the shift; times the scale; added to the output. Each value
// is exact in bf16; integers count from the middle of their range. There are two paths with the same numbers and
// chains, so the number of rows cannot change a bit:
//
//   fused     up to FUSED_MAX_ROWS rows: weights are dequantized in registers, again for each tile of rows
//   unpacked  more rows: a run of a group is dequantized into a buffer that stays in the L1 cache for all tiles
//
// On AMX, whose chains have another order, the second path computes any number of rows.
//
// Where 16-bit integers are multiplied at twice the rate of floats (INT16_PRODUCTS), the chains of integer codes are
// sums of integers, which are exact. INT16_RUN adjacent pairs of x, or those of a smaller group, are rounded to
// integers times a power of two: the largest has 15 bits. So only numbers below 1/128 of the largest lose bits of their
// bf16. The runs of a group are added up as floats.
//
// Numbers of 4 bits in small groups may have scales of 8 bits, which 16 bits hold, times one of 32 bits of the output.
//
// Layout. Packed weights are [panels][groups] of WIDE_PANEL scales and zeros, then [pairs of the group / WORD_PAIRS]
// [WIDE_PANEL] words of weights. A panel is WIDE_PANEL outputs. A word of weights holds adjacent pairs of K: the lowest
// bits of its low half are the first number of the first pair, those of its high half the second. A scale is a float,
// whose last bits are the zero of an integer, or a bf16 or a float16; or a word holds a scale and a zero or shift as
// floats of 16 bits. Of numbers of 3 bits the words hold two bits, and each row of WIDE_PANEL words is followed by
// WIDE_PANEL half words with the third: bit 4 * (j / 2) + j % 2 has that of the second number of pair j, and two bits
// above it lies that of the first.
//
// Blocks of GGUF files are [panels][blocks] of HEAD_ROWS rows of WIDE_PANEL words and then [groups] of GROUP_WORDS
// words. The first word of a head holds the scale as float16 and above it the minimum. The others hold the groups'
// integers, of 8 or 4 bits each, that of the scale before that of the minimum. A group has words of four low bits, as
// above, and a word of the others: in each half of it, those of pair 4 s + j begin at bit 4 j + HIGH_BITS s. Numbers of
// 2 and 3 bits lie as above.
//
// A weight of several codes begins with a row of HEADER_WORDS words: the number of parts, then code, group and number
// of outputs of each. The parts follow, packed as weights of their own.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "grouped_tiles.h"
#include "kernels.h"
#include "threads.h"
#include "weight.h"

namespace {

constexpr long ROW_BLOCK = HAS_AMX ? 128 : 256;  // rows whose sums are kept at once
constexpr long HEADER_WORDS = 16;                // words before the parts of a weight of several codes

// The groups of K: of `group` numbers each, a multiple of 8; the last is shorter and padded to such a multiple.
template <class Code> struct GroupLayout {
  static constexpr long SCALE_WORDS = WIDE_PANEL / Code::SCALES_PER_WORD;  // words of scales
  long pairs, group, groups;                                               // pairs of K and of a group
  GroupLayout(long K, long size)
      : pairs((K + 7) / 8 * 4), group(size / 2), groups(group ? (pairs + group - 1) / group : 0) {}
  long runs() const { return (group + INT16_RUN - 1) / INT16_RUN; }                                       // of a group
  long words() const { return groups * SCALE_WORDS + pairs / Code::WORD_PAIRS * ROW_WORDS<Code::BITS>; }  // of a panel
  long at(long g) const {
    return g * SCALE_WORDS + g * group / Code::WORD_PAIRS * ROW_WORDS<Code::BITS>;
  }  // start of a group
  long steps(long g) const { return std::min(group, pairs - g * group); }
};

// K is whole blocks
template <int HIGH_BITS, int GROUP, int BLOCK_SIZE, bool HAS_MINIMUMS, class Codebook>
struct GroupLayout<Blocks<HIGH_BITS, GROUP, BLOCK_SIZE, HAS_MINIMUMS, Codebook>> {
  using Code = Blocks<HIGH_BITS, GROUP, BLOCK_SIZE, HAS_MINIMUMS, Codebook>;
  static constexpr long group = GROUP / 2;
  long pairs, groups;
  GroupLayout(long K, long) : pairs(K / 2), groups(K / GROUP) {}
  long runs() const { return 1; }
  long words() const { return groups / Code::GROUPS * Code::BLOCK_WORDS; }
  long steps(long) const { return group; }
};

// f(x, words, steps, sums) for each group of a panel, with its scales in sums.scales
template <class Code, class F>
void for_each_group(const Pair* x, const uint32_t* panel, GroupLayout<Code> layout, TileSums sums, F f) {
  for (long g = 0; g < layout.groups; g++, sums.x++, sums.units += layout.runs()) {
    sums.scales = panel + layout.at(g);
    f(x + g * layout.group, sums.scales + layout.SCALE_WORDS, layout.steps(g), sums);
  }
}

template <int HIGH_BITS, int GROUP, int BLOCK_SIZE, bool HAS_MINIMUMS, class Codebook, class F>
void for_each_group(const Pair* x, const uint32_t* panel,
                    GroupLayout<Blocks<HIGH_BITS, GROUP, BLOCK_SIZE, HAS_MINIMUMS, Codebook>> layout, TileSums sums,
                    F f) {
  using Code = Blocks<HIGH_BITS, GROUP, BLOCK_SIZE, HAS_MINIMUMS, Codebook>;
  for (long b = 0; b < layout.groups / Code::GROUPS; b++, panel += Code::BLOCK_WORDS) {
    typename Code::Head head(panel);
    for (long g = 0; g < Code::GROUPS; g++, sums.x++, sums.units++, x += layout.group) {
      sums.scales = (const uint32_t*)head.scales[g];
      f(x, panel + Code::HEAD_ROWS * WIDE_PANEL + g * Code::GROUP_WORDS, layout.group, sums);
    }
  }
}

// totals [rows][WIDE_PANEL] += the product of rows of x and a panel. sums.scales: unused
template <class Code>
void multiply_panel(const Pair* x, const uint32_t* panel, GroupLayout<Code> layout, TileSums sums, long rows,
                    MatrixRegisters& registers) {
#if !defined(PARLEY_AMX)
  // One row has the same sums without `add_group`, whose choice of a tile for each group would take a tenth of the time
  // or more. Without SIMD that matters less than the time to compile it
  if constexpr (LANES > 4)
    if (rows == 1)
      return for_each_group(
          x, panel, layout, sums, [&](const Pair* part, const uint32_t* words, long steps, const TileSums& some) {
            for_each_run(steps, USES_INT16<Code> ? INT16_RUN : steps, some,
                         [&](long k, long count, const TileSums& sums) {
                           multiply_tile<Code, 1, WIDE_PANEL_VECTORS>(
                               part + k, layout.pairs,
                               PackedWeights<Code>{words + k / Code::WORD_PAIRS * ROW_WORDS<Code::BITS>}, count, sums);
                         });
          });
#endif
  for_each_group(x, panel, layout, sums,
                 [&](const Pair* part, const uint32_t* words, long steps, const TileSums& some) {
                   add_group<Code>(part, layout.pairs, words, steps, some, rows, registers);
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
    case 13: return f(Iq2{});
    case 14: return f(Iq3Xxs{});
    case 15: return f(Iq3S{});
    case 16: return f(Q4_0{});
    case 17: return f(Q8_0{});
    case 18: return f(Iq4Nl{});
    case 19: return f(Nf4{});
    case 20: return f(Fp4{});
    case 21: return f(Zero4F16{});
    case 22: return f(Zero4Bf16{});
    case 23: return f(Zero8F16{});
    case 24: return f(Zero8Bf16{});
    case 25: return f(Shift4F16{});
    case 26: return f(Shift4Bf16{});
    case 27: return f(Zero1F16{});
    case 28: return f(Zero1Bf16{});
    case 29: return f(Zero2F16{});
    case 30: return f(Zero2Bf16{});
    case 31: return f(Zero3F16{});
    case 32: return f(Zero3Bf16{});
    case 33: return f(Least4F16{});
    case 34: return f(Least4Bf16{});
    case 35: return f(Least8F16{});
    case 36: return f(Least8Bf16{});
    case 37: return f(Int2{});
    default: return f(Int3{});
  }
}

constexpr long MIXED_CODES = 39;  // the code of weights whose parts have codes of their own

long panels_of(long outputs) { return (outputs + WIDE_PANEL - 1) / WIDE_PANEL; }

template <class Code> GroupLayout<Code> layout_of(Code, long K, long group) { return GroupLayout<Code>(K, group); }

// Words of a panel
long panel_words(long code, long K, long group) {
  return with_code(code, [=](auto code) { return layout_of(code, K, group).words(); });
}

// Outputs that have the same code.
struct CodePart {
  long code, group, first, outputs;  // the first output
  long panel, start, words;          // the first panel, its place, the words of a panel
  std::shared_ptr<float[]> sums;     // of x, [rows][groups], if the code needs them
  std::shared_ptr<uint32_t[]> rows;  // x as integers, and their units [rows][groups][runs], if the code needs them
  std::shared_ptr<float[]> units;
};

struct CodeParts {
  std::vector<CodePart> list;
  long outputs = 0, panels = 0, words = 0;

  CodeParts(long code, const uint32_t* packed, long N, long K, long group) {
    words = code == MIXED_CODES ? HEADER_WORDS : 0;
    if (code != MIXED_CODES) add(code, group, N, K);
    else
      for (uint32_t i = 0; i < packed[0]; i++) add(packed[3 * i + 1], packed[3 * i + 2], packed[3 * i + 3], K);
  }

  void add(long code, long group, long count, long K) {
    list.push_back({code, group, outputs, count, panels, words, panel_words(code, K, group), {}, {}, {}});
    outputs += count, panels += panels_of(count), words += panels_of(count) * list.back().words;
  }

  const CodePart& with_panel(long panel) const {
    auto part = list.begin();
    while (panel >= part->panel + panels_of(part->outputs)) part++;
    return *part;
  }
};

// The sums over the groups of rows of x, by a team
template <class Code> void sum_groups(const Pair* x, long M, GroupLayout<Code> layout, float* sums) {
#pragma omp for
  for (long m = 0; m < M; m++)
    for (long g = 0; g < layout.groups; g++) {
      const bf16* from = (const bf16*)(x + m * layout.pairs + g * layout.group);
      Vec v = {};
      for (long i = 0, count = 2 * layout.steps(g); i < count; i += LANES) v += load(from + i, count - i);
      sums[m * layout.groups + g] = sum(v);
    }
}

// The power of two for which numbers below the largest in size are integers of at most 15 bits and a sign; NaN if one
// is infinite or NaN
static inline float unit_of(uint32_t largest) {
  uint32_t exponent = largest >> 7, bits = exponent == 255 ? 0x7fc00000 : (std::max(exponent, 15u) - 14) << 23;
  float unit;
  memcpy(&unit, &bits, sizeof unit);
  return unit;
}

// x as integers, and their sums over the groups, by a team. Products with the zero of a group must cancel out exactly
// what they are taken from: so the sums are those of the integers.
template <class Code>
void round_rows(const Pair* x, long M, GroupLayout<Code> layout, Pair* rows, float* units, float* sums) {
  const float round = 12582912.f;  // 1.5 * 2^23: after adding it, the low bits are the nearest integer
#pragma omp for
  for (long m = 0; m < M; m++)
    for (long g = 0; g < layout.groups; g++) {
      float total = 0;
      for (long k = 0, number = 0; k < layout.steps(g); k += INT16_RUN, number++) {
        long first = m * layout.pairs + g * layout.group + k, count = 2 * std::min(INT16_RUN, layout.steps(g) - k);
        const bf16* from = (const bf16*)(x + first);
        uint16_t* to = (uint16_t*)(rows + first);
        uint32_t largest = 0;
        for (long i = 0; i < count; i++) largest = std::max<uint32_t>(largest, from[i] & 0x7fff);
        float unit = units[(m * layout.groups + g) * layout.runs() + number] = unit_of(largest);
        float factor = 1 / unit;
        Vec integers = {};
        for (long i = 0; i < count; i += LANES) {
          Vec moved = load(from + i, count - i) * factor + round;
          Half rounded = __builtin_convertvector((Bits)moved & 0xffff, Half);
          memcpy(to + i, &rounded, std::min<long>(LANES, count - i) * sizeof *to);
          integers += moved - round;
        }
        total += sum(integers) * unit;
      }
      if (sums) sums[m * layout.groups + g] = total;
    }
}

template <class T>
void run_gemm(const Pair* x, const uint32_t* packed, CodeParts parts, const float* scales, const bf16* bias, T* y,
              Slices slices, long N, long K, int threads) {
  std::vector<RowSlice> pieces = split_slices(slices, parts.panels, ROW_BLOCK, threads);
  if (pieces.empty()) return;
  long M = pieces.back().first + pieces.back().rows;
  for (CodePart& part : parts.list)
    with_code(part.code, [&](auto code) {
      auto layout = layout_of(code, K, part.group);
      if (NEEDS_X_SUMS<decltype(code)>) part.sums.reset(new float[M * layout.groups]);
      if (!USES_INT16<decltype(code)>) return;
      part.rows.reset(new uint32_t[M * layout.pairs]);
      part.units.reset(new float[M * layout.groups * layout.runs()]);
    });
  WorkStealing queue(pieces.size() * parts.panels, threads);
#pragma omp parallel num_threads(threads)
  {
    for (const CodePart& part : parts.list)
      with_code(part.code, [&](auto code) {
        auto layout = layout_of(code, K, part.group);
        if constexpr (USES_INT16<decltype(code)>)
          round_rows(x, M, layout, part.rows.get(), part.units.get(), part.sums.get());
        else if (NEEDS_X_SUMS<decltype(code)>) sum_groups(x, M, layout, part.sums.get());
      });
    alignas(64) float totals[ROW_BLOCK * WIDE_PANEL], group_sums[ROW_BLOCK * WIDE_PANEL];
    MatrixRegisters registers;
    for (WorkStealing::Tasks some; (some = queue.next_tasks(omp_get_thread_num())).end;)
      for (long task = some.first; task < some.end; task++) {
        auto [first, rows, weight] = pieces[task / parts.panels];
        const CodePart& part = parts.with_panel(task % parts.panels);
        long number = task % parts.panels - part.panel, n = number * WIDE_PANEL, count = part.outputs - n;
        std::fill(totals, totals + rows * WIDE_PANEL, 0.f);
        with_code(part.code, [&, first = first, rows = rows, weight = weight](auto code) {
          auto layout = layout_of(code, K, part.group);
          long runs = layout.groups * layout.runs();
          const float* x_sums = NEEDS_X_SUMS<decltype(code)> ? part.sums.get() + first * layout.groups : nullptr;
          const float* units = USES_INT16<decltype(code)> ? part.units.get() + first * runs : nullptr;
          const Pair* from = USES_INT16<decltype(code)> ? part.rows.get() : x;
          multiply_panel(from + first * layout.pairs, packed + weight * parts.words + part.start + number * part.words,
                         layout, {group_sums, totals, x_sums, units, nullptr, layout.groups, runs, true, true}, rows,
                         registers);
        });
        n += part.first;
        for (long r = 0; r < rows; r++)
          for (long i = 0; i < WIDE_PANEL && i < count; i += LANES) {
            Vec v = load<Vec>(totals + r * WIDE_PANEL + i);
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
void pack(const uint8_t* q, const float* scales, const uint8_t* zeros, uint32_t* packed, long N, long K,
          GroupLayout<Code> layout, int threads) {
  constexpr int SIZE = WORD_BITS<Code::BITS>;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels_of(N); p++)
    for (long g = 0; g < layout.groups; g++) {
      uint32_t *to = packed + p * layout.words() + layout.at(g), *words = to + layout.SCALE_WORDS;
      for (long j = 0; j < WIDE_PANEL; j++) {
        long n = p * WIDE_PANEL + j;
        uint32_t bits = Code::MIDDLE;
        if (n < N) {
          memcpy(&bits, scales + n * layout.groups + g, sizeof bits);
          if (Code::ZERO_MASK)
            bits = ((bits + (Code::ZERO_MASK + 1) / 2) & ~Code::ZERO_MASK) | zeros[n * layout.groups + g];
        }
        if (Code::SCALES_PER_WORD == 2) ((bf16*)to)[j] = Code::HAS_F16_SCALES ? half_of(bits) : bits >> 16;
        else to[j] = bits;
        for (long s = 0; s < layout.steps(g); s += Code::WORD_PAIRS) {
          uint32_t word = 0, third = 0;
          for (long i = 0; i < 2 * Code::WORD_PAIRS; i++) {
            long k = 2 * (g * layout.group + s) + i;
            uint32_t value = n < N && k < K ? q[n * K + k] ^ Code::FLIP : 0;
            word |= (value & ((1 << SIZE) - 1)) << (SIZE * (i / 2) + 16 * (i % 2));
            if (Code::BITS == 3) third |= (value >> 2 & 1) << third_bit(i / 2, i % 2);
          }
          uint32_t* row = words + s / Code::WORD_PAIRS * ROW_WORDS<Code::BITS>;
          row[j] = word;
          if (Code::BITS == 3) ((bf16*)(row + WIDE_PANEL))[j] = third;
        }
      }
    }
}

template <int HIGH_BITS, int GROUP, int BLOCK_SIZE, bool HAS_MINIMUMS, class Codebook>
void pack(const uint8_t* q, const uint32_t* heads, const uint8_t*, uint32_t* packed, long N, long K,
          GroupLayout<Blocks<HIGH_BITS, GROUP, BLOCK_SIZE, HAS_MINIMUMS, Codebook>> layout, int threads) {
  using Code = Blocks<HIGH_BITS, GROUP, BLOCK_SIZE, HAS_MINIMUMS, Codebook>;
  constexpr int SIZE = Code::IS_SUB4BIT ? 2 : 4;
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < panels_of(N); p++) {
    uint32_t* to = packed + p * layout.words();
    std::fill(to, to + layout.words(), 0);
    for (long j = 0; j < WIDE_PANEL && p * WIDE_PANEL + j < N; j++)
      for (long b = 0; b < K / BLOCK_SIZE; b++) {
        long n = p * WIDE_PANEL + j, block = n * (K / BLOCK_SIZE) + b;
        uint32_t *head = to + b * Code::BLOCK_WORDS, *groups = head + Code::HEAD_ROWS * WIDE_PANEL;
        for (long i = 0; i < Code::HEAD_ROWS; i++) head[i * WIDE_PANEL + j] = heads[block * Code::HEAD_ROWS + i];
        for (long k = 0; k < BLOCK_SIZE; k++) {
          uint32_t value = q[block * BLOCK_SIZE + k] ^ Code::FLIP;
          long pair = k % GROUP / 2, s = pair / Code::WORD_PAIRS, at = pair % Code::WORD_PAIRS,
               half = SIZE * at + 16 * (k % 2);
          uint32_t* group = groups + k / GROUP * Code::GROUP_WORDS;
          group[s * WIDE_PANEL + j] |= (value & ((1 << SIZE) - 1)) << half;
          if (HIGH_BITS > 0) group[Code::LOW_ROWS * WIDE_PANEL + j] |= (value >> 4) << (half + HIGH_BITS * s);
          if (HIGH_BITS == -1) ((bf16*)(group + WIDE_PANEL))[j] |= (value >> 2 & 1) << third_bit(at, k % 2);
        }
      }
  }
}

}  // namespace

void grouped_linear_slices(long code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias,
                           void* y, Slices slices, long N, long K, long group, bool as_fp32, long threads) {
  CodeParts parts(code, packed, N, K, group);
  if (as_fp32) run_gemm((const Pair*)x, packed, parts, scales, bias, (float*)y, slices, N, K, threads);
  else run_gemm((const Pair*)x, packed, parts, scales, bias, (bf16*)y, slices, N, K, threads);
}

extern "C" {

// Outputs that are packed together: a part of a weight that begins at a multiple of them can be packed alone.
int64_t grouped_panel() { return WIDE_PANEL; }

// Words of a packed weight [N, K] with groups of `group`, a multiple of 8.
int64_t grouped_size(int64_t code, int64_t N, int64_t K, int64_t group) {
  return panels_of(N) * panel_words(code, K, group);
}

// q [N, K], scales [N, groups], zeros [N, groups] of integers -> packed. Scales may be words with zeros.
// Blocks have heads [N, blocks, Code::HEAD_ROWS] instead of scales, and no zeros.
void grouped_pack(int64_t code, const uint8_t* q, const void* scales, const uint8_t* zeros, uint32_t* packed, int64_t N,
                  int64_t K, int64_t group, int64_t threads) {
  with_code(code, [=](auto code) {
    using Scale = std::conditional_t<code.IS_BLOCK, uint32_t, float>;
    pack(q, (const Scale*)scales, zeros, packed, N, K, layout_of(code, K, group), threads);
  });
}

// y [M, N] = x [M, K] W^T + bias, as bf16, or as fp32 if `as_fp32`. K is a multiple of 8; bias may be null, and so may
// the scales of outputs.
void grouped_linear(int64_t code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias, void* y,
                    int64_t M, int64_t N, int64_t K, int64_t group, int64_t as_fp32, int64_t threads) {
  RowSlice all{0, M, 0};
  grouped_linear_slices(code, x, packed, scales, bias, y, {&all, M > 0}, N, K, group, as_fp32, threads);
}

}  // extern "C"
