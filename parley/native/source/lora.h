// A LoRA adapter as the kernels see it: two narrow matrices for each linear layer of a model, whose product is added to
// it.
#pragma once
#include "vector.h"

// One part of a layer's outputs: several linear layers of a checkpoint are fused into one here.
struct Part {
  int64_t first, out_features;  // its outputs
  int64_t column, pairs;  // the first inner number that it reads, and the number of pairs
  const bf16* up;         // [out / block, rounded up][pairs][block], in pairs; see lora_pack
};

constexpr long PARTS = 3;  // queries, keys and values

struct Lora {
  int64_t columns;      // inner numbers of all parts, rounded up to a multiple of LANES; 0: the layer is not changed
  const bf16* down;     // [columns / LANES][steps][LANES], in pairs
  const float* scales;  // of inner numbers
  int64_t parts;
  Part part[PARTS];
};

// The rows of a batch that have adapters. Rows ends[i - 1] to ends[i] of `rows` have adapters[i], an array with an
// entry for each linear layer.
struct Adapted {
  int64_t count;
  const Lora* const* adapters;
  const int64_t *ends, *rows;
  int64_t columns;  // the maximum over the adapters
};
