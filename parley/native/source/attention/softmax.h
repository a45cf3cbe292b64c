// The softmax of attention, block by block: scores become weights 2^(score - the largest score so far), in units of
// bits: the scale of the scores includes log2(e).
#pragma once
#include <cmath>

#include "../operands.h"

constexpr long KEY_BLOCK = 128;  // keys between two updates of the largest score
constexpr float LOG2E = 1.44269504f;

// 2^x of x <= 0 with a relative error below 3e-6, exactly 1 for 0 and exactly 0 below -127. NaN stays NaN.
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
// 2^(i / 16) times 1 and times ln 2, less what adding i << 19 to the bits adds
struct alignas(64) PowerTable {
  uint32_t one[16], slope[16];
};

constexpr PowerTable POWERS = {
    {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f, 0x3f7504f3,
     0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d},
    {0x3f317218, 0x3f314d47, 0x3f318182, 0x3f3212b8, 0x3f330509, 0x3f345cc0, 0x3f361e5b, 0x3f384e8a, 0x3f3af233,
     0x3f3b0739, 0x3f38d44f, 0x3f36e324, 0x3f3536a4, 0x3f33d1d6, 0x3f32b7e9, 0x3f31ec2d}};

// As pow2, but with a relative error of 2.3e-4, much less than that of rounding to bf16. It has two multiplications,
// which compete with those of a product, and 13 operations that do not.
static inline Vec pow2_fast(Vec x) {
  x = max_of(broadcast(-127.f), x);
  Vec shifted = x + 786432.f, f = x - (shifted - 786432.f);  // 1.5 * 2^19: leaves sixteenths in the low bits
  __m512i index = (__m512i)shifted;
  Bits exponent = (Bits)shifted << 19;
  Bits one = (Bits)_mm512_permutexvar_epi32(index, _mm512_load_si512(POWERS.one)) + exponent;
  Bits slope = (Bits)_mm512_permutexvar_epi32(index, _mm512_load_si512(POWERS.slope)) + exponent;
  slope = (Bits)_mm512_max_epi32((__m512i)slope, __m512i{});  // with an exponent below the least
  return (Vec)one + (Vec)slope * f;
}

// a * b + c in two roundings, for the same reason
static inline Vec scaled(Vec a, Vec b, Vec c) { return a * b + c; }
#else
static inline Vec pow2_fast(Vec x) { return pow2(x); }
static inline Vec scaled(Vec a, Vec b, Vec c) { return fma(a, b, c); }
#endif

// Turns scores of a tile into weights, one vector after another, as the product after it reads them.
struct SoftmaxStage {
  static constexpr size_t VECTORS = KEY_BLOCK / LANES;  // of a row
  const float *scores, *negated_max;                    // [rows][KEY_BLOCK]; [rows], in bits, negated
  Vec* totals;                                          // [rows]
  Pair* weights;                                        // [rows][KEY_BLOCK] as Operands says
  float scale;                                          // of scores in bits
  size_t at = 0, count = 0;                             // vectors weighed, and all
  size_t overlapped = 0;                                // those that may be weighed before `finish`

  // The weight of a score, which is added to the total of its row
  Vec weigh(Vec& total) {
    Vec weight =
        pow2_fast(scaled(load<Vec>(scores + at * LANES), broadcast(scale), broadcast(negated_max[at / VECTORS])));
    total += weight;
    return weight;
  }

  void next() {
    store_weights(weigh(totals[at / VECTORS]));
    at++;
  }

  // Weighs a whole row, with its constants in registers
  __attribute__((always_inline)) void next_row() {
    size_t row = at / VECTORS;
    Vec total = totals[row], negated = broadcast(negated_max[row]), factor = broadcast(scale);
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
      size_t row = rest.at / VECTORS;
      Vec total = totals[row];  // in memory, each vector would wait for the one before
      for (; rest.at < (row + 1) * VECTORS; rest.at++) {
        Vec weight = rest.weigh(total);
        rest.store_weights(value_scales ? weight * load<Vec>(value_scales + rest.at % VECTORS * LANES) : weight);
      }
      totals[row] = total;
    }
    at = count;
  }
};
