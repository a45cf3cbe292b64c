// Vectors as wide as the registers of the target instruction set. Arithmetic is written once, with the compiler's
// vector operators; intrinsics are used only for operations that have no operator. Compile with -ffp-contract=off:
// fused operations are written explicitly, so that no optimiser decides about bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef uint16_t bf16;
typedef uint32_t __attribute__((may_alias)) Pair;  // two adjacent bf16
typedef uint32_t __attribute__((may_alias)) Four;  // four adjacent int8
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

static inline Vec broadcast(float x) { return x - Vec{}; }
static inline Bits broadcast(uint32_t x) { return Bits{} | x; }

template <class V> static inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V> static inline void store(void* to, V v) { memcpy(to, &v, sizeof v); }

// a * b + c
static inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// c + a.low * b.low + a.high * b.high of bf16 pairs, in this order
static inline Vec dot(Vec c, Bits a, Bits b) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
  c = fma((Vec)(a << 16), (Vec)(b << 16), c);
  return fma((Vec)(a & 0xffff0000), (Vec)(b & 0xffff0000), c);
#endif
}

// The sum of two products in each lane
static inline Bits multiply(Shorts a, Shorts b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Bits)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  Bits products = (Bits)(a * b);  // the caller ensures that a product fits 16 bits
  return (Bits)((Ints)products >> 16) + (Bits)((Ints)(products << 16) >> 16);
#endif
}

// c + the products of a lane's four signed bytes of a and unsigned bytes of b, modulo 2^32, without saturation
static inline Ints dot(Ints c, Bits a, Bits b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)c, (__m512i)b, (__m512i)a);
#else
  Bits even = multiply((Shorts)(a << 8) >> 8, (Shorts)(b & 0x00ff00ff));
  Bits odd = multiply((Shorts)a >> 8, (Shorts)(b >> 8 & 0x00ff00ff));
  return (Ints)((Bits)c + even + odd);
#endif
}

static inline Vec widen(Half h) { return (Vec)(__builtin_convertvector(h, Bits) << 16); }

// Round to the nearest bf16, ties to even; NaN stays NaN
static inline Half narrow(Vec v) {
#if defined(__AVX512BF16__)
  return (Half)_mm512_cvtneps_pbh((__m512)v);
#else
  Bits bits = (Bits)v;
  Bits near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? near : (bits >> 16) | 0x40, Half);
#endif
}

// The numbers that storing and loading would leave
static inline Vec rounded(Vec v) { return widen(narrow(v)); }

// LANES numbers, or the first `count` and zeros
static inline Vec load(const bf16* from) { return widen(load<Half>(from)); }

static inline Vec load(const bf16* from, long count) {
  if (count >= LANES) return load(from);
  Half h = {};
  memcpy(&h, from, count * sizeof(bf16));
  return widen(h);
}

static inline Vec load(const float* from, long count) {
  if (count >= LANES) return load<Vec>(from);
  Vec v = {};
  memcpy(&v, from, count * sizeof(float));
  return v;
}

// LANES numbers, or the first `count` of them
static inline void store(bf16* to, Vec v, long count) {
  Half h = narrow(v);
  if (count >= LANES) store(to, h);
  else memcpy(to, &h, count * sizeof(bf16));
}

static inline void store(float* to, Vec v, long count) {
  if (count >= LANES) store(to, v);
  else memcpy(to, &v, count * sizeof(float));
}

template <class V> static inline auto sum(V v) {
  std::remove_reference_t<decltype(v[0])> lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

// Whether any bit is set.
static inline bool any(Bits bits) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)bits, (__m512i)bits);
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)bits, (__m256i)bits);
#else
  return bits[0] | bits[1] | bits[2] | bits[3];
#endif
}

// a > b ? a : b, so b where one of them is NaN
static inline Vec max_of(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline float largest(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
  return lanes[0];
}

// e^x with a relative error of about 2e-7; below -87 it is e^-87, above 88 infinite
static inline Vec exp(Vec x) {
  const Vec round = broadcast(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = x < -87.f ? broadcast(-87.f) : x;
  Vec shifted = fma(x, broadcast(1.44269504f), round), n = shifted - round;
  Vec f = fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), x));  // x - n ln 2, in two parts
  Vec p = broadcast(1.98756911e-4f);
  p = fma(p, f, broadcast(1.39819994e-3f));
  p = fma(p, f, broadcast(8.33345205e-3f));
  p = fma(p, f, broadcast(4.16657962e-2f));
  p = fma(p, f, broadcast(1.66666657e-1f));
  p = fma(p, f, broadcast(0.5f));
  p = fma(p, f * f, f) + 1.f;
  p *= (Vec)(((Bits)shifted + 127) << 23);
  return x > 88.f ? broadcast(__builtin_inff()) : p;
}

// cap * tanh(x / cap)
static inline Vec capped(Vec x, float cap) { return cap - 2 * cap / (1.f + exp(x * (2.f / cap))); }
