// The memory layout of the 16 tokens of a page, how a token is written into it, and how int8 pages and the values
// of latents get the read order of the products.
//
// A page is [heads]. Each head holds its keys, then its values, then, for int8, a scale per key and a scale per value.
// The layout is the read order of the products, so that nothing is transposed on the way:
//
//   bf16  keys [dim / 2][16][2]  values [8][wide][2]
//   int8  keys [dim / 4][16][4]  values [4][wide][4]  float scales of keys [16], of values [16]
//
// `wide` is value_dim rounded up to 16. The padding is zero, because pages are cleared when they are allocated and
// nothing is written there.
//
// Where a value is the beginning of its key (latent attention), only keys and their scales are stored.
#pragma once
#include "vector.h"

constexpr long PAGE = 16;
constexpr long MAX_DIM = 576;  // of keys and of values

struct PageLayout {
  long heads, dim, value_dim;
  bool int8;
  bool latent;  // values are parts of keys

  long adjacent() const { return int8 ? 4 : 2; }  // adjacent numbers
  long pairs() const {
    return (dim + adjacent() - 1) / adjacent() * (adjacent() / 2);
  }  // of a key, as products read them
  long wide() const { return (value_dim + PAGE - 1) / PAGE * PAGE; }
  long key_bytes() const { return 2 * pairs() * PAGE * (int8 ? 1 : 2); }
  long value_bytes() const { return PAGE * wide() * (int8 ? 1 : 2); }
  long scale_bytes() const { return int8 ? PAGE * sizeof(float) : 0; }
  long head_bytes() const { return key_bytes() + scale_bytes() + (latent ? 0 : value_bytes() + scale_bytes()); }
  long key_scales() const { return key_bytes() + (latent ? 0 : value_bytes()); }  // where they begin
  long page_bytes() const { return heads * head_bytes(); }
};

// Writes a row as int8 of at most 127 and returns its scale: numbers times scale are closest to the row. If any number
// of the row is not finite, neither is the scale.
static inline float quantize_vector(const bf16* row, long count, int8_t* to) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  Vec most = {}, odd = {};
  for (long i = 0; i < count; i += LANES) {
    Vec v = load(row + i, count - i);
    most = max_of((Vec)((Bits)v & 0x7fffffff), most);
    odd += v * 0.f;
  }
  float reach = largest(most), factor = reach > 1e-30f ? 127.f / reach : 0.f;
  for (long i = 0; i < count; i += LANES) {
    Vec near = load(row + i, count - i) * factor + 12582912.f;  // 1.5 * 2^23: the integer is in the low bits
    Bytes bytes = __builtin_convertvector((Bits)near & 0xff, Bytes);
    if (count - i >= LANES) store(to + i, bytes);
    else memcpy(to + i, &bytes, count - i);
  }
  return reach / 127.f + sum(odd);
}

// Writes key `row` [dim] as token t of the page's head at `head`.
static inline void write_key(const PageLayout& layout, char* head, long t, const bf16* row) {
  if (layout.int8) {
    int8_t numbers[MAX_DIM];
    ((float*)(head + layout.key_scales()))[t] = quantize_vector(row, layout.dim, numbers);
    for (long d = 0; d < layout.dim; d += 4)
      memcpy(head + (d * PAGE + 4 * t), numbers + d, layout.dim - d < 4 ? layout.dim - d : 4);
  } else {
    for (long d = 0; d + 1 < layout.dim; d += 2) memcpy(head + 2 * (d * PAGE + 2 * t), row + d, 4);
    if (layout.dim % 2) memcpy(head + 2 * ((layout.dim - 1) * PAGE + 2 * t), row + layout.dim - 1, 2);
  }
}

// Writes value `row` [value_dim] as token t. Adjacent tokens share words, so only the token's own bytes are touched:
// another thread may be writing the rest.
static inline void write_value(const PageLayout& layout, char* head, long t, const bf16* row) {
  head += layout.key_bytes();
  if (layout.int8) {
    int8_t numbers[MAX_DIM];
    ((float*)(head + layout.value_bytes()))[PAGE + t] = quantize_vector(row, layout.value_dim, numbers);
    int8_t* to = (int8_t*)head + t / 4 * layout.wide() * 4 + t % 4;
    for (long d = 0; d < layout.value_dim; d++) to[4 * d] = numbers[d];
  } else {
    bf16* to = (bf16*)head + t / 2 * layout.wide() * 2 + t % 2;
    for (long d = 0; d < layout.value_dim; d++) to[2 * d] = row[d];
  }
}

// Writes keys [heads, dim] and values [heads, value_dim] of one token to its slot.
static inline void write_token(const PageLayout& layout, char* pages, int64_t slot, const bf16* keys,
                               const bf16* values) {
  for (long h = 0; h < layout.heads; h++) {
    char* head = pages + slot / PAGE * layout.page_bytes() + h * layout.head_bytes();
    write_key(layout, head, slot % PAGE, keys + h * layout.dim);
    if (!layout.latent) write_value(layout, head, slot % PAGE, values + h * layout.value_dim);
  }
}

// int8 in fours [groups][width][4] -> bf16 in pairs [2 * groups][width][2], exactly; prefetches the same part of
// `prefetch_from`
static inline void widen_int8(const char* from, const char* prefetch_from, long groups, long width, Pair* to) {
  typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
  auto number = [](Bits x) { return (Bits) __builtin_convertvector((Ints)x >> 24, Vec); };  // of the highest byte
  for (long g = 0; g < groups; g++, to += 2 * width)
    for (long i = 0; i < width; i += LANES) {
      long at = 4 * (g * width + i);
      __builtin_prefetch(prefetch_from + at);
      Bits x = load<Bits>(from + at);
      store(to + i, number(x << 24) >> 16 | number(x << 16));
      store(to + width + i, number(x << 8) >> 16 | number(x));
    }
}

// Keys of a page in pairs [count][PAGE][2] -> the same numbers as values in pairs [PAGE / 2][wide][2], with zeros
// beyond
static inline void latents_to_values(const Pair* keys, long count, long wide, Pair* values) {
  for (long t = 0; t < PAGE / 2; t++) memset(values + t * wide + 2 * count, 0, (wide - 2 * count) * sizeof(Pair));
  for (long k = 0; k < count; k++, keys += PAGE)
    for (long t = 0; t < PAGE / 2; t++) {
      Pair first = keys[2 * t], second = keys[2 * t + 1];
      Pair* to = values + t * wide + 2 * k;
      to[0] = (first & 0xffff) | second << 16;
      to[1] = first >> 16 | (second & 0xffff0000);
    }
}
