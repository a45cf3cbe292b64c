// AMX: a CPU's matrix registers, 16 rows of 64 bytes each, and its instructions that multiply two of them. Intel calls
// the registers tiles; here a tile is what a micro-kernel computes. An instruction computes 8 times as many products in
// a cycle as one of AVX-512.
//
// A register of weights holds 16 steps of 16 outputs, as packed panels and pages lie in memory. One of x holds 16 steps
// of 16 rows, and one of sums 16 rows of 16 outputs. A step is two bf16 or four int8 that are adjacent in K.
//
// Bits. Of bf16, an instruction adds up 16 products of even and 16 of odd numbers of K, one after another, then both
// sums, and adds the result to what the register held (Intel, Software Developer's Manual, TDPBF16PS). So a sum is a
// chain over 16 steps at a time, and other rows cannot change a bit of it. It differs from a chain of single steps:
// where these registers are used, they compute products of any number of rows. Sums of int8 are exact.
#pragma once
#include <initializer_list>

#include "vector.h"

constexpr long MATRIX_ROWS = 16, MATRIX_STEPS = 16;  // of a register
#if !defined(PARLEY_AMX)
constexpr bool HAS_AMX = false;
class MatrixRegisters {};
#else
constexpr bool HAS_AMX = true;

// The shapes of the eight registers, as the instruction reads them.
class alignas(64) RegisterShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

 public:
  // Gives registers 0 to 16 rows of 0 to 16 words. Those without either must not be used.
  void set(std::initializer_list<int> registers, long row_count, long words) {
    for (int number : registers) {
      rows[number] = words ? row_count : 0;
      row_bytes[number] = row_count ? words * sizeof(Pair) : 0;
    }
  }

  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

// A thread's registers while it computes products. Setting their shapes takes as long as a dozen products.
class MatrixRegisters {
  long rows = 0, steps = 0;

 public:
  MatrixRegisters() = default;
  MatrixRegisters(const MatrixRegisters&) = delete;
  ~MatrixRegisters() {
    if (rows) asm volatile("tilerelease");
  }

  // Clears the registers and sets the shapes that describe(shapes) gives them for these numbers, of which `new_rows` is
  // at least 1. Does nothing if these were the last numbers.
  template <class Describe> void set(long new_rows, long new_steps, Describe describe) {
    if (rows == new_rows && steps == new_steps) return;
    rows = new_rows, steps = new_steps;
    RegisterShapes shapes;
    describe(shapes);
    shapes.load();
  }
};

// The instructions. `stride`: bytes from row to row. The compiler's own do not tell it which memory they read.
template <int REGISTER> inline void clear_register() { asm volatile("tilezero %%tmm%c0" ::"i"(REGISTER)); }

template <int REGISTER> inline void load_register(const void* from, long stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(REGISTER) : "memory");
}

template <int REGISTER> inline void store_register(void* to, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(REGISTER) : "memory");
}

// Register SUM += register X times register W: bf16 with sums in float, or signed times unsigned int8 in int32
template <class T, int SUM, int X, int W> inline void multiply_registers() {
  if constexpr (std::is_same_v<T, float>)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}
#endif
