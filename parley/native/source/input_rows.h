// Rows of x as the tiles of a linear layer read them, and the remainders of int8 rows on AVX2 (operands.h).
#pragma once
#include "operands.h"

// A word whose products are added after those of all other words of its row
struct Remainder {
  uint32_t step;
  Four word;
};

#if defined(SIXTEEN_REGISTERS)
template <class T> constexpr bool HAS_REMAINDERS = std::is_same_v<T, int32_t>;
#else
template <class T> constexpr bool HAS_REMAINDERS = false;
#endif

// Rows of x, expanded as Operands says. A row of `steps` words has room for as many remainders.
template <class T> struct InputRows {
  const Pair* words;                      // [rows][WORDS * steps]
  const Pair* unsplit;                    // with remainders: [rows][steps] of x
  const Remainder* remainders = nullptr;  // [rows][steps]; the first ones of a row are set
  const uint32_t* counts = nullptr;       // [rows]: how many

  explicit InputRows(const Pair* words) : words(words), unsplit(words) {}
  InputRows(const Pair* words, const Pair* unsplit, const Remainder* remainders, const uint32_t* counts)
      : words(words), unsplit(unsplit), remainders(remainders), counts(counts) {}

  InputRows from(long row, long steps) const {
    long at = row * steps;
    if constexpr (HAS_REMAINDERS<T>) return {words + at, unsplit + at, remainders + at, counts + row};
    return InputRows(words + Operands<T>::WORDS * at);
  }

  // sums [PANEL] of rows `first` to `end` += their remainders * panel [steps][PANEL]
  void add_remainders([[maybe_unused]] long first, [[maybe_unused]] long end, [[maybe_unused]] long steps,
                      [[maybe_unused]] const Pair* panel, [[maybe_unused]] T* sums) const {
    if constexpr (HAS_REMAINDERS<T>)
      for (long r = first; r < end; r++) {
        if (!counts[r]) continue;
        T* row_sums = sums + r * 2 * LANES;
        Ints acc[2] = {load<Ints>(row_sums), load<Ints>(row_sums + LANES)};
        for (const Remainder *each = remainders + r * steps, *past = each + counts[r]; each < past; each++) {
          const Pair* weights = panel + each->step * 2 * LANES;
          Operands<T>::multiply_add(acc, &each->word, load<Bits>(weights), load<Bits>(weights + LANES));
        }
        store(row_sums, acc[0]), store(row_sums + LANES, acc[1]);
      }
  }
};

// to [count] = the words of int8 in x [count] less the remainders that pairs need; returns their number
static inline uint32_t split_remainders(const Four* x, long count, Four* to, Remainder* remainders) {
  uint32_t found = 0;
  auto remainder = [](Bits words) {
    Shorts sum = ((Shorts)(words << 8) >> 8) + ((Shorts)words >> 8);
    return words & (Bits)((sum > 128) | (sum < -128)) & 0xff00ff00;
  };
  for (long k = 0; k < count; k += LANES) {
    Bits words = {};
    if (count - k >= LANES) words = load<Bits>(x + k);
    else memcpy(&words, x + k, (count - k) * sizeof(Four));
    Bits rest = remainder(words);
    words ^= rest;
    if (count - k >= LANES) store(to + k, words);
    else memcpy(to + k, &words, (count - k) * sizeof(Four));
    if (!any(rest)) continue;
    for (int i = 0; i < LANES; i++)
      if (rest[i]) remainders[found++] = {(uint32_t)(k + i), rest[i]};
  }
  return found;
}
