// The softmax of attention, block by block: scores become weights 2^(score - the row's reference), in units of bits:
// the scale of the scores includes log2(e). The reference is the largest score of the first block of keys that the row
// sees in a segment, and rises only to a score beyond its limit, which is REFERENCE_SLACK bits more. So weights are at most
// 2^REFERENCE_SLACK, rows are hardly ever rescaled, and the test for it has no branch that the CPU mispredicts.
#pragma once
#include <cmath>

#include "../operands.h"

constexpr long KEY_BLOCK = 128;  // keys between two tests of the references
constexpr float LOG2E = 1.44269504f;
constexpr float REFERENCE_SLACK = 8;  // in bits

// 2^x of x < 127 with a relative error below 3e-6, exactly 1 for 0 and exactly 0 below -127. NaN stays NaN.
static inline Vec pow2(Vec x) {
  const Vec round = broadcast(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = max_of(broadcast(-127.f), x);
  Vec shifted = x + round, f = x - (shifted - round);
  Vec p = fma(broadcast(9.5828106e-3f), f, broadcast(5.5906349e-2f));
  p = fma(p, f, broadcast(2.4024099e-1f));
  p = fma(p, f, broadcast(6.9312420e-1f));
  p = fma(p, f, broadcast(1.f));
  return (Vec)((Bits)p + ((Bits)shifted << 23));
}

static inline float pow2(float x) { return pow2(broadcast(x))[0]; }

// The largest number of each of the vectors 0 to LANES - 1, in the lane of its index.
static inline Vec largest_of_each(const Vec* rows) {
  Vec folded[LANES];
  for (int i = 0; i < LANES; i++) folded[i] = rows[i];
#if defined(__AVX512F__)
  auto fold = [&](int left, auto low, auto high) {
#pragma GCC unroll 8
    for (int i = 0; i < left / 2; i++) {
      __m512 a = (__m512)folded[2 * i], b = (__m512)folded[2 * i + 1];
      folded[i] = max_of((Vec)low(a, b), (Vec)high(a, b));
    }
  };
  fold(
      16, [](auto a, auto b) { return _mm512_unpacklo_ps(a, b); },
      [](auto a, auto b) { return _mm512_unpackhi_ps(a, b); });
  fold(
      8, [](auto a, auto b) { return (__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); },
      [](auto a, auto b) { return (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); });
  for (int left : {4, 2})
    fold(
        left, [](auto a, auto b) { return _mm512_shuffle_f32x4(a, b, 0x88); },
        [](auto a, auto b) { return _mm512_shuffle_f32x4(a, b, 0xdd); });
#else
#pragma GCC unroll 4
  for (int width = LANES / 2, left = LANES; width; width /= 2, left /= 2) {  // fold halves, two vectors into one
    Bits low;
    for (int i = 0; i < LANES; i++) low[i] = 2 * (i - i % width) + i % width;
#pragma GCC unroll 8
    for (int i = 0; i < left / 2; i++) {
      Vec a = folded[2 * i], b = folded[2 * i + 1];
      folded[i] = max_of(__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + width));
    }
  }
#endif
  return folded[0];
}

#if defined(PARLEY_AMX)
// As pow2, but with a relative error of 7.5e-5, much less than that of rounding to bf16, and 0 below -125: vectors with
// denormal results take 60 times as long. The registers of AMX compute the products meanwhile, so the number of vector
// instructions limits attention; this has few.
static inline Vec pow2_fast(Vec x) {
  Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x); 0 of infinities
  Vec p = fma(broadcast(7.8024380e-2f), f, broadcast(2.2606706e-1f));
  p = fma(p, f, broadcast(6.9583373e-1f));
  p = fma(p, f, broadcast(9.9992518e-1f));
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(-125.f), _CMP_NLT_UQ);  // NaN, too
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);                          // p * 2^floor(x)
}

static inline Vec scaled(Vec a, Vec b, Vec c) { return fma(a, b, c); }
#elif defined(__AVX512F__)
// 2^(i / 16), and the slope of the line from there that is closest to 2^x until (i + 1) / 16
struct alignas(64) PowerTable {
  float start[16], slope[16];
};

constexpr PowerTable POWERS = {
    {1.0f, 1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f, 1.29683955f, 1.35425555f, 1.41421356f,
     1.47682615f, 1.54221083f, 1.61049033f, 1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f},
    {0.705703683f, 0.736947854f, 0.769575323f, 0.803647333f, 0.839227841f, 0.876383631f, 0.91518445f, 0.955703127f,
     0.998015719f, 1.04220165f, 1.08834386f, 1.13652896f, 1.18684739f, 1.23939362f, 1.29426626f, 1.35156832f}};

// As pow2, but with a relative error of 1.6e-4, much less than that of rounding to bf16, and 0 below -126. Only one of
// its operations, the multiplication, competes with those of a product.
static inline Vec pow2_fast(Vec x) {
  constexpr int DOWN = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  // 1.5 * 2^19: adding it leaves the whole sixteenths in the low bits
  __m512i sixteenths = (__m512i)_mm512_add_round_ps((__m512)x, (__m512)broadcast(786432.f), DOWN);
  Vec start = (Vec)_mm512_permutexvar_epi32(sixteenths, _mm512_load_si512(POWERS.start));
  Vec slope = (Vec)_mm512_permutexvar_epi32(sixteenths, _mm512_load_si512(POWERS.slope));
  Vec rest = (Vec)_mm512_reduce_ps((__m512)x, 4 << 4 | _MM_FROUND_TO_NEG_INF);  // of a sixteenth; 0 of infinities
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(-126.f), _CMP_NLT_UQ);  // NaN, too
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)fma(slope, rest, start), (__m512)x);    // times 2^floor(x)
}

// a * b + c in two roundings: so it is 0 of the score that is the reference
static inline Vec scaled(Vec a, Vec b, Vec c) { return a * b + c; }
#else
static inline Vec pow2_fast(Vec x) { return pow2(x); }
static inline Vec scaled(Vec a, Vec b, Vec c) { return a * b + c; }
#endif

// Turns scores of a tile into weights, one vector after another, as the product after it reads them.
struct SoftmaxStage {
  static constexpr size_t VECTORS = KEY_BLOCK / LANES;  // of a row
  const float *scores, *negated_reference;              // [rows][KEY_BLOCK]; [rows], in bits
  Vec* totals;                                          // [rows]
  Pair* weights;                                        // [rows][KEY_BLOCK] as Operands says
  float scale;                                          // of scores in bits
  size_t at = 0, count = 0;                             // vectors weighed, and all
  size_t overlapped = 0;                                // those that may be weighed before `finish`
  Vec total = {};                                       // of the row that has been begun

  // The weights of the next scores, which are added to the total of their row
  Vec weigh() {
    Vec power = scaled(load<Vec>(scores + at * LANES), broadcast(scale), broadcast(negated_reference[at / VECTORS]));
    Vec weight = pow2_fast(power);
    total += weight;
    return weight;
  }

  void next() {
    store_weights(weigh());
    if (++at % VECTORS == 0) end_row();
  }

  // Adds the row that ends before `at` to the totals.
  void end_row() {
    totals[at / VECTORS - 1] += total;
    total = Vec{};
  }

  // Weighs a whole row, with its constants in registers
  __attribute__((always_inline)) void next_row() {
    size_t row = at / VECTORS;
    Vec total = totals[row], negated = broadcast(negated_reference[row]), factor = broadcast(scale);
#pragma GCC unroll 8
    for (size_t i = 0; i < VECTORS; i++, at++) {
      Vec weight = pow2_fast(scaled(load<Vec>(scores + at * LANES), factor, negated));
      total += weight;
      store_weights(weight);
    }
    totals[row] = total;
  }

  // One of `shares` equal parts, in whole rows, of what may be weighed before `finish`
  __attribute__((always_inline)) void do_share(long shares) {
    SoftmaxStage part = *this;  // a copy, so that it may be in registers
    long rows = (long)(overlapped - at) / (long)VECTORS;
    for (long left = (rows + shares - 1) / shares; left > 0; left--) part.next_row();
    at = part.at;
  }

  void store_weights(Vec v) {
    if constexpr (Operands<float>::WORDS == 1) store((bf16*)weights + at * LANES, narrow(v));
    else store((float*)weights + at * LANES, v);
  }

  // Weighs the rest. value_scales [KEY_BLOCK] of an int8 block, or null.
  void finish(const float* value_scales) {
    SoftmaxStage rest = *this;  // a copy, so that it may be in registers
    while (rest.at < rest.count) {
      size_t end = (rest.at / VECTORS + 1) * VECTORS;
      for (; rest.at < end; rest.at++) {
        Vec weight = rest.weigh();
        rest.store_weights(value_scales ? weight * load<Vec>(value_scales + rest.at % VECTORS * LANES) : weight);
      }
      rest.end_row();
    }
    at = count;
  }
};
