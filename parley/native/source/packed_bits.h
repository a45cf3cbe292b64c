// Numbers of a few bits in registers: pairs of weights adjacent in K, codebooks of 16 numbers, floats of 16 bits, and
// the words of a panel that hold them. weight_codes.h says what the bits of each format mean.
#pragma once
#include <type_traits>

#include "tile.h"

constexpr int WIDE_PANEL_VECTORS = 4;                   // fewer parallel chains would wait for each other
constexpr int WIDE_PANEL = WIDE_PANEL_VECTORS * LANES;  // outputs of a panel; twice as many as in tile.h

// AVX2 and AVX-512 without bf16 multiply 16-bit integers at twice the rate of floats
#if defined(__AVX2__) && !defined(__AVX512BF16__)
#define INT16_PRODUCTS
#endif

#if defined(__AVX512BF16__)
typedef Bits Pairs;  // of weights as bf16, one pair per lane

struct alignas(64) LookupTable {
  bf16 entries[64];
};

// The integer `n` of at most 8 bits
constexpr bf16 bf16_of(int n) {
  int size = n < 0 ? -n : n, exponent = 0;
  while (size >> exponent > 1) exponent++;
  return n ? (n < 0) << 15 | (127 + exponent) << 7 | (size << (7 - exponent) & 0x7f) : 0;
}

// The integers of BITS bits with a sign, repeated
template <int BITS> constexpr LookupTable signed_integers() {
  LookupTable table{};
  for (int i = 0; i < 64; i++) table.entries[i] = bf16_of((i & ((1 << BITS) - 1)) - ((i >> (BITS - 1) & 1) << BITS));
  return table;
}

// The lowest five bits of each half of the words select an entry
static inline Bits look_up(Bits words, const bf16* table) {
  return (Bits)_mm512_permutexvar_epi16((__m512i)words, _mm512_load_si512(table));
}

// The lowest six bits
static inline Bits look_up_6(Bits words, const bf16* table) {
  return (Bits)_mm512_permutex2var_epi16(_mm512_load_si512(table), (__m512i)words, _mm512_load_si512(table + 32));
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

#if defined(INT16_PRODUCTS)
typedef Bits IntegerPairs;  // of weights as int16, one pair per lane
typedef Ints IntegerSum;

static inline Ints multiply(Ints sum, Bits x, IntegerPairs weights) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
#else
  return (Ints)((Bits)sum + multiply((Shorts)x, (Shorts)weights));
#endif
}
#else
typedef Pairs IntegerPairs;
typedef Vec IntegerSum;
#endif

// Bits of `chosen` where those of the mask are set, else of `others`
static inline Bits select_bits(Bits mask, Bits chosen, Bits others) {
#if defined(__AVX512F__)
  return (Bits)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)chosen, (__m512i)others, 0xca);
#else
  return (chosen & mask) | (others & ~mask);
#endif
}

// Number j of BITS bits in the low or high half of each word, moved to the top
template <int BITS> static inline Ints at_top(Bits words, int j, bool high) {
  return (Ints)(words << ((high ? 16 : 32) - BITS * (j + 1)));
}

// Number j of BITS bits with a sign in each half of the words, as a pair
template <int BITS> static inline IntegerPairs signed_pair(Bits words, int j) {
#if defined(INT16_PRODUCTS)
  return (Bits)((Shorts)((Shorts)words << (16 - BITS * (j + 1))) >> (16 - BITS));
#else
  Ints first = at_top<BITS>(words, j, false) >> (32 - BITS), second = at_top<BITS>(words, j, true) >> (32 - BITS);
  return pairs_of(__builtin_convertvector(first, Vec), __builtin_convertvector(second, Vec));
#endif
}

// Prefetch distance in bytes, twice that of plain weights: with theirs, a single row takes up to 1.25 times as long
constexpr long CODES_PREFETCH_DISTANCE = 8192;

// Prefetch for `count` words of a panel that will be read later
static inline void prefetch_words(const uint32_t* from, long count) {
  for (long i = 0; i < count; i += 16) __builtin_prefetch((const char*)(from + i) + CODES_PREFETCH_DISTANCE);
}

// Vector i of row k / WORD_PAIRS of a panel's words
static inline Bits read_words(const uint32_t* words, long row, int i, bool ahead) {
  const uint32_t* from = words + row * WIDE_PANEL + i * LANES;
  if (ahead && i * LANES % 16 == 0) prefetch_words(from, 1);
  return load<Bits>(from);
}

// The bits of a float16 in each lane
static inline Vec widen_half(Bits half) {
#if defined(__F16C__) && !defined(__AVX512F__)
  // The 16 low bits of the lanes, adjacent
  __m256i joined = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)half, (__m256i)half), 0x08);
  return (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(joined));
#else
  Bits size = (half & 0x7fff) << 13;
  Vec finite = (Vec)size * 0x1p112f;
  Bits bits = size >= 0x0f800000 ? size | 0x7f800000 : (Bits)finite;  // infinite or NaN
  return (Vec)(bits | (half & 0x8000) << 16);
#endif
}

// LANES adjacent float16s
static inline Vec load_halves(const uint32_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  return widen_half(__builtin_convertvector(load<Half>(from), Bits));
#endif
}

// The float16 with the value of a float that is one
static inline uint16_t half_of(uint32_t bits) {
  uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x47800000) return sign | 0x7c00 | (size > 0x7f800000 ? 0x200 : 0);
  if (size >= 0x38800000) return sign | (size - 0x38000000) >> 13;
  float value;
  memcpy(&value, &size, sizeof value);
  return sign | (uint16_t)(value * 0x1p24f);
}

// 16 numbers that four bits select
struct alignas(64) CodebookValues {
  float values[16];
};

#if defined(__AVX512BF16__)
// A number that bf16 has exactly
constexpr bf16 bf16_of(float number) {
  float size = number < 0 ? -number : number;
  int exponent = 127;
  for (; size >= 2; exponent++) size /= 2;
  for (; size && size < 1; exponent--) size *= 2;
  return size ? (number < 0) << 15 | exponent << 7 | (int)((size - 1) * 128) : 0;
}

constexpr LookupTable table_of(const CodebookValues& numbers) {
  LookupTable table{};
  for (int i = 0; i < 64; i++) table.entries[i] = bf16_of(numbers.values[i % 16]);
  return table;
}
#endif

// The numbers that the lowest four bits select
static inline Vec look_up(Bits index, const CodebookValues& numbers) {
#if defined(__AVX512F__)
  Vec found = (Vec)_mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(numbers.values));
#elif defined(__AVX2__)
  __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(numbers.values), (__m256i)index);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(numbers.values + 8), (__m256i)index);
  Vec found = (Vec)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
  Vec found;
  for (int i = 0; i < LANES; i++) found[i] = numbers.values[index[i] & 15];
#endif
  return found;
}

// Pair j of each word's 4-bit indices
template <class Codebook> static inline Pairs look_up_pair(Bits words, int j) {
#if defined(__AVX512BF16__)
  static constexpr LookupTable table = table_of(Codebook::VALUES);
  return look_up(words >> 4 * j, table.entries);
#else
  return pairs_of(look_up(words >> 4 * j, Codebook::VALUES), look_up(words >> (16 + 4 * j), Codebook::VALUES));
#endif
}
