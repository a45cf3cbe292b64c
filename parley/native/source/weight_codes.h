// What the bits of a weight in groups mean: integers, floating-point numbers, codebooks (NF4, IQ4), or the blocks of
// GGUF files. A code is one struct: it unpacks words of bits into pairs of numbers adjacent in K, exact in bf16, and
// adds the sum of a group to an output (`Factors`). grouped_weights.cpp says how words lie and multiplies them.
#pragma once
#include "packed_bits.h"

// The codebook of IQ4_NL and IQ4_XS
struct Iq4Codebook {
  static constexpr CodebookValues VALUES = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
};

// Of IQ1 and IQ2, and of both kinds of IQ3: sizes, then the same with the other sign
struct Iq2Codebook {
  static constexpr CodebookValues VALUES = {
      {1, 3.125f, 5.375f, 0.125f, 0.875f, 1.125f, 0, 0, -1, -3.125f, -5.375f, -0.125f, -0.875f, -1.125f, 0, 0}};
};
struct Iq3XxsCodebook {
  static constexpr CodebookValues VALUES = {{1, 3, 5, 7, 9, 11, 13, 15.5f, -1, -3, -5, -7, -9, -11, -13, -15.5f}};
};
struct Iq3SCodebook {
  static constexpr CodebookValues VALUES = {{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}};
};

// Of bitsandbytes' nf4 (arXiv 2305.14314, appendix E), rounded to bf16
struct Nf4Codebook {
  static constexpr CodebookValues VALUES = {{-1, -0.6953125f, -0.5234375f, -0.39453125f, -0.28515625f, -0.1845703125f,
                                             -0.0908203125f, 0, 0.07958984375f, 0.1611328125f, 0.24609375f,
                                             0.337890625f, 0.44140625f, 0.5625f, 0.72265625f, 1}};
};

// Of bitsandbytes' fp4, times 12: exact in bf16
struct Fp4Codebook {
  static constexpr CodebookValues VALUES = {{0, 0.0625f, 8, 12, 4, 6, 2, 3, -0.f, -0.0625f, -8, -12, -4, -6, -2, -3}};
};

// Whether the sum of x times a shift is added: to the sum of a group before it is scaled, or to the output
enum class XShift { NONE, OF_SUM, OF_OUTPUT };

// What a group of weights adds to outputs. `Code::Factors` makes them of its scales and zeros.
template <XShift SHIFT> struct GroupFactors {
  static constexpr XShift X_SHIFT = SHIFT;
  Vec scale, shift = {};
  // total + the part of a group, whose sum of x times values is `sum` and whose sum of x is `x`
  Vec add(Vec total, Vec sum, float x) const {
    if (SHIFT == XShift::OF_SUM) sum = fma(shift, broadcast(x), sum);
    if (SHIFT == XShift::OF_OUTPUT) total = fma(shift, broadcast(x), total);
    return fma(sum, scale, total);
  }
};

using ScaleFactors = GroupFactors<XShift::NONE>;

// Indices of 4 bits into a codebook of 16 numbers, times a scale of 32 bits
template <class Codebook> struct Codebook4 {
  typedef Vec Sum;
  static constexpr int BITS = 4;
  static constexpr long WORD_PAIRS = 4, SCALES_PER_WORD = 1;
  static constexpr uint32_t MIDDLE = 0, FLIP = 0, ZERO_MASK = 0;
  static constexpr bool IS_BLOCK = false, HAS_F16_SCALES = false;

  struct Factors : ScaleFactors {
    Factors(const uint32_t* scales, int i) : ScaleFactors{load<Vec>(scales + i * LANES)} {}
  };

  static inline Pairs unpack(const uint32_t* words, long k, int j, int i) {
    return look_up_pair<Codebook>(read_words(words, k / WORD_PAIRS, i, j == 0), j);
  }
};

// The same with a scale that is a float16
template <class Codebook> struct HalfScaleCodebook4 : Codebook4<Codebook> {
  static constexpr long SCALES_PER_WORD = 2;
  static constexpr bool HAS_F16_SCALES = true;

  struct Factors : ScaleFactors {
    Factors(const uint32_t* scales, int i) : ScaleFactors{load_halves(scales + i * LANES / 2)} {}
  };
};

// Integers of BITS bits, stored as the signed distance from the middle of their range
template <int SIZE> struct Integers {
  typedef IntegerSum Sum;
  static constexpr int BITS = SIZE;
  static constexpr long WORD_PAIRS = 16 / BITS;  // pairs in a word
  static constexpr long SCALES_PER_WORD = 1;     // in a word
  static constexpr uint32_t MIDDLE = 1 << (BITS - 1), FLIP = MIDDLE,
                            ZERO_MASK = 2 * MIDDLE - 1;            // bits of the zero point
  static constexpr bool IS_BLOCK = false, HAS_F16_SCALES = false;  // HAS_F16_SCALES: scales are float16s

  struct Factors : GroupFactors<XShift::OF_SUM> {
    Factors(const uint32_t* scales, int i) {
      Bits word = load<Bits>(scales + i * LANES);
      scale = (Vec)(word & ~ZERO_MASK), shift = (float)MIDDLE - __builtin_convertvector(word & ZERO_MASK, Vec);
    }
  };

  // Vector i of pair k + j of a group's words
  static inline IntegerPairs unpack(const uint32_t* words, long k, int j, int i) {
    Bits word = read_words(words, k / WORD_PAIRS, i, j == 0);
#if defined(__AVX512BF16__)
    static constexpr LookupTable table = signed_integers<BITS>();
    if (BITS == 4) return look_up(word >> 4 * j, table.entries);
#endif
    return signed_pair<BITS>(word, j);
  }
};

// Bits of a number that lie in the words of a row: the third of 3 bits lies in half a word behind them
template <int BITS> constexpr int WORD_BITS = BITS == 3 ? 2 : BITS;
template <int BITS> constexpr long ROW_WORDS = BITS == 3 ? WIDE_PANEL * 3 / 2 : WIDE_PANEL;  // words of a row

// The numbers of at most 3 bits from FIRST on, repeated
template <int BITS, int FIRST> constexpr CodebookValues numbers_from() {
  CodebookValues numbers{};
  for (int i = 0; i < 16; i++) numbers.values[i] = FIRST + (i & ((1 << BITS) - 1));
  return numbers;
}

// Pairs whose indices of at most 3 bits begin at bit `at` of each half of the words. Bits above an index are not read.
template <int BITS, int FIRST> static inline IntegerPairs sub4bit_pair(Bits words, int at) {
#if defined(INT16_PRODUCTS)
  return (Bits)((Shorts)(words >> at & ((0x00010001 << BITS) - 0x00010001)) + (short)FIRST);
#else
  static constexpr CodebookValues numbers = numbers_from<BITS, FIRST>();
#if defined(__AVX512BF16__)
  static constexpr LookupTable table = table_of(numbers);
  return look_up(words >> at, table.entries);
#else
  return pairs_of(look_up(words >> at, numbers), look_up(words >> (16 + at), numbers));
#endif
#endif
}

// Pair j of vector i in the row of pair k
template <int BITS, int FIRST> static inline IntegerPairs unpack_sub4bit(const uint32_t* words, long k, int j, int i) {
  constexpr int SIZE = WORD_BITS<BITS>;
  const uint32_t* row = words + k / (16 / SIZE) * ROW_WORDS<BITS>;
  Bits bits = read_words(row, 0, i, j == 0);
  if constexpr (BITS != 3) return sub4bit_pair<BITS, FIRST>(bits, SIZE * j);
  // Four bits of half a word belong to two pairs: the third bits of their second numbers, then those of the first
  const uint32_t* from = row + WIDE_PANEL + i * LANES / 2;
  if (j == 0 && i * LANES % 32 == 0) prefetch_words(from, 1);
  Bits thirds = __builtin_convertvector(load<Half>(from), Bits);
  thirds |= thirds << 18;
  Bits even = select_bits(Bits{} + 0x44444444, thirds, bits),
       odd = select_bits(Bits{} + 0x44444444, thirds >> 1, bits >> 2);
  return sub4bit_pair<BITS, FIRST>(j % 2 ? odd : even, j / 2 * 4);
}

// What the second float of a group is: the integer that means zero, or what is added to the product of the scale and an
// integer that counts from the middle of its range (SHIFT) or from 0 (LEAST)
enum FloatZero { POINT, SHIFT, LEAST };

// The same with a scale and a zero point that are both floats of 16 bits: bf16 if IS_BF16, else float16. The scale is
// in the low half of its word.
template <int SIZE, bool IS_BF16, FloatZero KIND> struct FloatZeros : Integers<SIZE> {
  static constexpr uint32_t ZERO_MASK = 0;

  struct Factors : GroupFactors<KIND == POINT ? XShift::OF_SUM : XShift::OF_OUTPUT> {
    Factors(const uint32_t* scales, int i) {
      constexpr float middle = Integers<SIZE>::MIDDLE;
      Bits word = load<Bits>(scales + i * LANES);
      Vec scale = IS_BF16 ? (Vec)(word << 16) : widen_half(word & 0xffff);
      Vec zero = IS_BF16 ? (Vec)(word & 0xffff0000) : widen_half(word >> 16);
      this->scale = scale;
      this->shift = KIND == POINT ? middle - zero : KIND == LEAST ? fma(broadcast(middle), scale, zero) : zero;
    }
  };
};

// Integers of 1 to 3 bits. But for their bits they are those of `Four`, whose middle they count from.
template <int SIZE, class Four> struct Sub4Bit : Four {
  static constexpr int BITS = SIZE;
  static constexpr long WORD_PAIRS = 16 / WORD_BITS<BITS>;
  static constexpr uint32_t FLIP = 0;

  static inline IntegerPairs unpack(const uint32_t* words, long k, int j, int i) {
    return unpack_sub4bit<BITS, -(int)Four::MIDDLE>(words, k, j, i);
  }
};

// Integers as above without a zero point, and with a scale that is a float16
template <int SIZE> struct HalfIntegers : Integers<SIZE> {
  static constexpr long SCALES_PER_WORD = 2;
  static constexpr uint32_t MIDDLE = 0, ZERO_MASK = 0;
  static constexpr bool HAS_F16_SCALES = true;
  using Factors = typename HalfScaleCodebook4<Iq4Codebook>::Factors;
};

// Floating-point numbers of a sign, EXPONENT bits and MANTISSA bits, without infinities. As the bits of a float they
// are 2^(BIAS - 127) of their value, also if subnormal.
template <int EXPONENT, int MANTISSA> struct Floats {
  typedef Vec Sum;
  static constexpr int BITS = 1 + EXPONENT + MANTISSA, BIAS = (1 << (EXPONENT - 1)) - 1;
  static constexpr long WORD_PAIRS = 16 / BITS, SCALES_PER_WORD = BITS == 4 ? 2 : 1;
  static constexpr uint32_t MIDDLE = 0, FLIP = 0, ZERO_MASK = 0;
  static constexpr bool IS_BLOCK = false, HAS_F16_SCALES = false;

  struct Factors : ScaleFactors {
    Factors(const uint32_t* scales, int i)
        : ScaleFactors{SCALES_PER_WORD == 2 ? load((const bf16*)scales + i * LANES) : load<Vec>(scales + i * LANES)} {}
  };

  static inline Vec widen(Ints top) {
    constexpr uint32_t keep = 0x80000000 | ((1 << (BITS - 1)) - 1) << (23 - MANTISSA);
    constexpr uint32_t factor = (254 - BIAS) << 23;  // 2^(127 - BIAS)
    float scale;
    memcpy(&scale, &factor, sizeof scale);
    return (Vec)((Bits)(top >> (8 - EXPONENT)) & keep) * scale;
  }

  static inline Pairs unpack(const uint32_t* from, long k, int j, int i) {
    Bits words = read_words(from, k / WORD_PAIRS, i, j == 0);
#if defined(__AVX512BF16__)
    if (BITS == 4) {
      alignas(64) static const bf16 table[32] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                                                 0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
      return look_up(words >> 4 * j, table);
    }
    if (EXPONENT == 4) {
      // In 16 bits, as that is half of the work. The product of bf16 takes subnormal numbers for zero, so they cannot
      // be scaled afterwards: those of the 8 bits are looked up.
      alignas(64) static const bf16 subnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
      __m512i top = (__m512i)(j ? words : words << 8), exponent = _mm512_set1_epi16(0x7800);
      __m512i normal = _mm512_add_epi16(_mm512_and_si512(_mm512_srli_epi16(top, 4), _mm512_set1_epi16(0x07f0)),
                                        _mm512_set1_epi16((127 - BIAS) << 7));
      __m512i both = _mm512_mask_permutexvar_epi16(normal, _mm512_testn_epi16_mask(top, exponent),
                                                   _mm512_srli_epi16(top, 8), _mm512_load_si512(subnormal));
      return (Bits)both | ((Bits)top & 0x80008000);
    }
#endif
    return pairs_of(widen(at_top<BITS>(words, j, false)), widen(at_top<BITS>(words, j, true)));
  }
};

// Blocks of GGUF files: BLOCK_SIZE adjacent numbers of K, in groups of GROUP. A number is scale * integer - minimum.
// Scale and minimum belong to a group: they are float16s of the block, times integers of the group if a block has
// several: of 8 bits, or of 4 without a sign where the numbers have 2 bits. Integers have 4 + HIGH_BITS bits and are
// stored as the signed distance from the middle of their range; or four bits select one of the numbers of `Codebook`.
// Integers of 2 or 3 bits count as those of 4 bits from 0 or 4 on.
template <int HIGH_BITS, int GROUP, int BLOCK_SIZE, bool HAS_MINIMUMS, class Codebook = void> struct Blocks {
  static constexpr bool HAS_CODEBOOK = !std::is_void_v<Codebook>, IS_SUB4BIT = HIGH_BITS < 0;
  typedef std::conditional_t<HAS_CODEBOOK, Vec, IntegerSum> Sum;
  typedef std::conditional_t<HAS_CODEBOOK, Pairs, IntegerPairs> WeightPairs;
  static constexpr int BITS = 4 + HIGH_BITS, FIRST = BITS == 3 ? 4 : 0;
  static constexpr uint32_t MIDDLE = IS_SUB4BIT ? 8 : 1 << (BITS - 1), FLIP = HAS_CODEBOOK ? 0
                                                                              : IS_SUB4BIT ? FIRST
                                                                                           : MIDDLE;
  static constexpr long WORD_PAIRS = IS_SUB4BIT ? 8 : 4, GROUPS = BLOCK_SIZE / GROUP;
  static constexpr long LOW_ROWS = GROUP / 2 / WORD_PAIRS;  // rows of the low bits of WORD_PAIRS pairs
  static constexpr long INTEGERS = GROUPS == 1 ? 0 : GROUPS * (1 + HAS_MINIMUMS), INTEGERS_PER_WORD = BITS == 2 ? 8 : 4;
  static constexpr long HEAD_ROWS = 1 + INTEGERS / INTEGERS_PER_WORD;  // rows of scales and minimums
  static constexpr long GROUP_WORDS =
      IS_SUB4BIT ? LOW_ROWS * ROW_WORDS<BITS> : (LOW_ROWS + !!HIGH_BITS) * WIDE_PANEL;  // words of a group
  static constexpr long BLOCK_WORDS = HEAD_ROWS * WIDE_PANEL + GROUPS * GROUP_WORDS;    // of a block
  static constexpr bool IS_BLOCK = true;
  static constexpr long SCALES_PER_WORD = 1;
  static_assert(HIGH_BITS <= 0 || HIGH_BITS * GROUP == 32, "the high bits of a group fill a word");

  // The scales of a block's groups and what they add for the sum of x, as floats
  struct alignas(64) Head {
    float scales[GROUPS][WIDE_PANEL], shifts[HAS_MINIMUMS ? GROUPS : 1][WIDE_PANEL];

    Head(const uint32_t* words) {
      prefetch_words(words, HEAD_ROWS * WIDE_PANEL);
      for (int i = 0; i < WIDE_PANEL; i += LANES) {
        Bits both = load<Bits>(words + i);
        Vec scale = widen_half(both & 0xffff), minimum = HAS_MINIMUMS ? widen_half(both >> 16) : Vec{};
#pragma GCC unroll 16
        for (int g = 0; g < GROUPS; g++) {
          Vec s = GROUPS == 1 ? scale : scale * integer(words + i, g * (1 + HAS_MINIMUMS));
          store(scales[g] + i, s);
          if (!HAS_MINIMUMS) continue;
          Vec m = GROUPS == 1 ? minimum : minimum * integer(words + i, g * 2 + 1);
          store(shifts[g] + i, (float)MIDDLE * s - m);
        }
      }
    }

    // Integer `n` after the block's factors
    static inline Vec integer(const uint32_t* words, int n) {
      if (INTEGERS_PER_WORD == 8)
        return __builtin_convertvector((Ints)(load<Bits>(words + (1 + n / 8) * WIDE_PANEL) >> n % 8 * 4 & 15), Vec);
      Ints bytes = (Ints)(load<Bits>(words + (1 + n / 4) * WIDE_PANEL) << (24 - n % 4 * 8));
      return __builtin_convertvector(bytes >> 24, Vec);
    }
  };

  struct Factors : GroupFactors<HAS_MINIMUMS ? XShift::OF_OUTPUT : XShift::NONE> {
    Factors(const uint32_t* scales, int i) {
      this->scale = load<Vec>(scales + i * LANES);
      if (HAS_MINIMUMS) this->shift = load<Vec>(scales + (GROUPS * WIDE_PANEL_VECTORS + i) * LANES);
    }
  };

  static inline WeightPairs unpack(const uint32_t* words, long k, int j, int i) {
    if constexpr (IS_SUB4BIT) return unpack_sub4bit<BITS, FIRST - (int)MIDDLE>(words, k, j, i);
    else if constexpr (HIGH_BITS == 0) return low_pair(read_words(words, k / WORD_PAIRS, i, j == 0), j);
    else {
      Bits low = read_words(words, k / WORD_PAIRS, i, j == 0);
      Bits high = read_words(words, LOW_ROWS, i, j == 0 && k == 0) >> (int)(HIGH_BITS * k / WORD_PAIRS);
      // The bits above an integer are those of others, and are not read
      Bits both = select_bits(Bits{} + 0x000f000f, low >> 4 * j, j ? high >> 4 * (j - 1) : high << 4);
#if defined(__AVX512BF16__)
      static constexpr LookupTable table = signed_integers<BITS>();
      return HIGH_BITS == 1 ? look_up(both, table.entries) : look_up_6(both, table.entries);
#else
      return signed_pair<BITS>(both, 0);
#endif
    }
  }

  static inline WeightPairs low_pair(Bits low, int j) {
    if constexpr (HAS_CODEBOOK) return look_up_pair<Codebook>(low, j);
    else {
#if defined(__AVX512BF16__)
      static constexpr LookupTable table = signed_integers<4>();
      return look_up(low >> 4 * j, table.entries);
#else
      return signed_pair<4>(low, j);
#endif
    }
  }
};

using Int4 = Integers<4>;
using Int8 = Integers<8>;
using E4m3 = Floats<4, 3>;
using E2m1 = Floats<2, 1>;
using Q2K = Blocks<-2, 16, 256, true>;
using Q3K = Blocks<-1, 16, 256, false>;
using Q4K = Blocks<0, 32, 256, true>;
using Q5K = Blocks<1, 32, 256, true>;
using Q6K = Blocks<2, 16, 256, false>;
using Q4_0 = HalfIntegers<4>;
using Q8_0 = HalfIntegers<8>;
using Q4_1 = Blocks<0, 32, 32, true>;
using Q5_0 = Blocks<1, 32, 32, false>;
using Q5_1 = Blocks<1, 32, 32, true>;
using Iq4Nl = HalfScaleCodebook4<Iq4Codebook>;
using Iq4Xs = Blocks<0, 32, 256, false, Iq4Codebook>;
using Iq2 = Blocks<0, 16, 256, false, Iq2Codebook>;
using Iq3Xxs = Blocks<0, 32, 256, false, Iq3XxsCodebook>;
using Iq3S = Blocks<0, 32, 256, false, Iq3SCodebook>;
using Nf4 = Codebook4<Nf4Codebook>;
using Fp4 = Codebook4<Fp4Codebook>;
using Zero4F16 = FloatZeros<4, false, POINT>;
using Zero4Bf16 = FloatZeros<4, true, POINT>;
using Zero8F16 = FloatZeros<8, false, POINT>;
using Zero8Bf16 = FloatZeros<8, true, POINT>;
using Shift4F16 = FloatZeros<4, false, SHIFT>;
using Shift4Bf16 = FloatZeros<4, true, SHIFT>;
using Least4F16 = FloatZeros<4, false, LEAST>;
using Least4Bf16 = FloatZeros<4, true, LEAST>;
using Least8F16 = FloatZeros<8, false, LEAST>;
using Least8Bf16 = FloatZeros<8, true, LEAST>;
using Zero1F16 = Sub4Bit<1, Zero4F16>;
using Zero1Bf16 = Sub4Bit<1, Zero4Bf16>;
using Zero2F16 = Sub4Bit<2, Zero4F16>;
using Zero2Bf16 = Sub4Bit<2, Zero4Bf16>;
using Zero3F16 = Sub4Bit<3, Zero4F16>;
using Zero3Bf16 = Sub4Bit<3, Zero4Bf16>;
using Int2 = Sub4Bit<2, Int4>;
using Int3 = Sub4Bit<3, Int4>;
