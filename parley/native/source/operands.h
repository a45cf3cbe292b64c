// The words that micro-kernels multiply, in linear layers and attention: four bytes, which are two bf16 (sums in fp32)
// or four int8 (sums in int32) that are adjacent in the inner dimension.
//
// Where one instruction multiplies such words (AVX-512 bf16, VNNI), a row is read as it is. Elsewhere each word of a
// row is expanded to two before the product, since every panel of the weight and every page would have to do so again:
// to two floats, or to four int16. A word of weights or pages is split in registers, once for all rows of a tile.
//
// AVX2 has an instruction that multiplies four int8, but it adds each two products in 16 bits, with saturation. With
// unsigned weights up to 255, no pair of a row whose sum is between -128 and 128 can saturate. So the second number of
// any other pair is a remainder, which is multiplied alone.
//
// AVX2 has 16 registers, and a tile needs each of them. The compiler spills sums there, because it reads ahead; so the
// work on a row is one statement in assembly.
#pragma once
#include "vector.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define SIXTEEN_REGISTERS
alignas(32) constexpr uint32_t ONES[LANES] = {0x00010001, 0x00010001, 0x00010001, 0x00010001,
                                              0x00010001, 0x00010001, 0x00010001, 0x00010001};

// sums += the products of int16 pairs: the word at x times each lane
static inline void multiply_add_int16(Ints (&sums)[2], const Pair* x, Bits left, Bits right) {
  Bits each, products;
  asm("vpbroadcastd %4, %2\n\tvpmaddwd %5, %2, %3\n\tvpaddd %3, %0, %0\n\tvpmaddwd %6, %2, %2\n\tvpaddd %2, %1, %1"
      : "+x"(sums[0]), "+x"(sums[1]), "=&x"(each), "=&x"(products)
      : "m"(*x), "x"(left), "x"(right));
}
#endif

template <class T> struct Operands;

template <> struct Operands<float> {
  typedef Vec Sum;
#if defined(__AVX512BF16__)
  static constexpr long WORDS = 1;  // of a row's word, after `expand`
  static Bits part(const Pair* weights, int) { return load<Bits>(weights); }
  static void multiply_add(Vec (&sums)[2], const Pair* x, Bits left, Bits right) {
    Bits each = broadcast(*x);
    sums[0] = dot(sums[0], each, left), sums[1] = dot(sums[1], each, right);
  }
#else
  static constexpr long WORDS = 2;
  static Bits expand(Bits x, int i) { return i ? x & 0xffff0000 : x << 16; }
#if defined(SIXTEEN_REGISTERS)
  static Bits part(const Pair* weights, int i) {
    Bits half;
    if (i) asm("vandps %2, %1, %0" : "=x"(half) : "x"(broadcast(0xffff0000)), "m"(*(const Bits*)weights));
    else asm("vmovups %1, %0\n\tvpslld $16, %0, %0" : "=x"(half) : "m"(*(const Bits*)weights));
    return half;
  }
  static void multiply_add(Vec (&sums)[2], const Pair* x, Bits left, Bits right) {
    Bits each;
    asm("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
        : "+x"(sums[0]), "+x"(sums[1]), "=&x"(each)
        : "m"(*x), "x"(left), "x"(right));
  }
#else
  static Bits part(const Pair* weights, int i) { return expand(load<Bits>(weights), i); }
  static void multiply_add(Vec (&sums)[2], const Pair* x, Bits left, Bits right) {
    Vec each = (Vec)broadcast(*x);
    sums[0] = fma(each, (Vec)left, sums[0]), sums[1] = fma(each, (Vec)right, sums[1]);
  }
#endif
#endif
};

template <> struct Operands<int32_t> {
  typedef Ints Sum;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  static constexpr long WORDS = 1;
  static Bits part(const Four* weights, int) { return load<Bits>(weights); }
  static void multiply_add(Ints (&sums)[2], const Four* x, Bits left, Bits right) {
    Bits each = broadcast(*x);
    sums[0] = dot(sums[0], each, left), sums[1] = dot(sums[1], each, right);
  }
#elif defined(SIXTEEN_REGISTERS)
  static constexpr long WORDS = 1;
  static Bits part(const Four* weights, int) { return load<Bits>(weights); }
  static void multiply_add(Ints (&sums)[2], const Four* x, Bits left, Bits right) {
    Bits each, products;
    asm("vpbroadcastd %4, %2\n\t"
        "vpmaddubsw %2, %5, %3\n\tvpmaddwd %7, %3, %3\n\tvpaddd %3, %0, %0\n\t"
        "vpmaddubsw %2, %6, %2\n\tvpmaddwd %7, %2, %2\n\tvpaddd %2, %1, %1"
        : "+x"(sums[0]), "+x"(sums[1]), "=&x"(each), "=&x"(products)
        : "m"(*x), "x"(left), "x"(right), "m"(ONES));
  }
#else
  static constexpr long WORDS = 2;
  static Bits expand(Bits x, int i) { return (Bits)((i ? (Shorts)x : (Shorts)(x << 8)) >> 8); }
  static Bits part(const Four* weights, int i) {
    Bits words = load<Bits>(weights);
    return (i ? words >> 8 : words) & 0x00ff00ff;
  }
  static void multiply_add(Ints (&sums)[2], const Four* x, Bits left, Bits right) {
    Shorts each = (Shorts)broadcast(*x);
    sums[0] = (Ints)((Bits)sums[0] + multiply(each, (Shorts)left));
    sums[1] = (Ints)((Bits)sums[1] + multiply(each, (Shorts)right));
  }
#endif
};

// Operands of a single row, which waits for memory and leaves registers free. It is multiplied as it is on AVX2 too:
// remainders would cost more.
template <class T> struct SingleRowOperands : Operands<T> {};

#if defined(SIXTEEN_REGISTERS)
template <> struct SingleRowOperands<int32_t> : Operands<int32_t> {
  static void multiply_add(Ints (&sums)[2], const Four* x, Bits left, Bits right) {
    Bits each = broadcast(*x);
    sums[0] = dot(sums[0], each, left), sums[1] = dot(sums[1], each, right);
  }
};
#endif

// to [WORDS * count] = the words of x [count], ready for `multiply_add`
template <class T> void expand(const Pair* x, long count, Pair* to) {
  using O = Operands<T>;
  if constexpr (O::WORDS == 2) {
    Bits low, high;
    for (int i = 0; i < LANES; i++) {
      low[i] = i / 2 + i % 2 * LANES;
      high[i] = low[i] + LANES / 2;
    }
    long i = 0;
    for (; i + LANES <= count; i += LANES, to += 2 * LANES) {
      Bits word = load<Bits>(x + i), even = O::expand(word, 0), odd = O::expand(word, 1);
      store(to, __builtin_shuffle(even, odd, low));
      store(to + LANES, __builtin_shuffle(even, odd, high));
    }
    for (; i < count; i++) {
      Bits word = broadcast(x[i]);
      *to++ = O::expand(word, 0)[0], *to++ = O::expand(word, 1)[0];
    }
  } else memcpy(to, x, count * sizeof(Pair));
}
