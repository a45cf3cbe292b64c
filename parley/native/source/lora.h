// What an adapter is to the kernels: for each linear layer of a model two narrow matrices, whose product is added to it.
#pragma once
#include "vector.h"

// Where a part of a layer's outputs gets its share: several linear layers of a checkpoint are one here.
struct Part {
  int64_t first, out;     // its outputs
  int64_t column, pairs;  // which of the inner numbers it reads, and how many pairs of them
  const bf16* up;         // [out / block, rounded up][pairs][block], in pairs; see lora_pack
};

constexpr long PARTS = 3;  // queries, keys and values

struct Lora {
  int64_t columns;      // inner numbers of all parts, filled up to a multiple of LANES; 0: the layer is left alone
  const bf16* down;     // [columns / LANES][steps][LANES], in pairs
  const float* scales;  // of inner numbers
  int64_t parts;
  Part part[PARTS];
};

// The rows of a batch that have adapters. Those in `rows` from ends[i - 1] to ends[i] have adapters[i], which is an array
// with a place for each linear layer.
struct Adapted {
  int64_t count;
  const Lora* const* adapters;
  const int64_t *ends, *rows;
  int64_t columns;  // the most that any of them has
};
