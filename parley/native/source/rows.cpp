// The operators on single rows between linear layers: norms, activations, rotation, and writing to the pages. One
// thread computes a row in a fixed order, so the bits of a row depend on that row alone.
#include <algorithm>
#include <cmath>
#include <memory>

#include "activations.h"
#include "kernels.h"
#include "pages.h"
#include "threads.h"

namespace {

constexpr long SERIAL_NUMBERS = 32768;  // numbers below which a second thread costs more than it gains

int threads_for(long numbers, long threads) { return numbers < SERIAL_NUMBERS ? 1 : (int)threads; }

// 1 / sqrt(mean of squares + eps) of the vectors at(0), at(LANES), ...: four parallel sums, then their sum
template <class F> float inverse_rms(long width, float eps, F at) {
  Vec squares[4] = {};
  for (long i = 0; i < width; i += LANES) {
    Vec v = at(i);
    squares[i / LANES % 4] = fma(v, v, squares[i / LANES % 4]);
  }
  return 1.f / std::sqrt(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / width + eps);
}

// The first `count` lanes, and zeros.
Vec first(Vec v, long count) {
  float lanes[LANES];
  store(lanes, v);
  return load(lanes, count);
}

// The norm of the row at(0), at(LANES), ..., as a function of the index. Numbers beyond `width` are zero.
template <class F> auto normed(const Norm& norm, long width, F at) {
  float mean = 0;
  if (norm.centered) {
    Vec total = {};
    for (long i = 0; i < width; i += LANES) total += at(i);
    mean = sum(total) / width;
  }
  auto shifted = [=](long i) { return first(at(i) - mean, width - i); };
  float scale = norm.centered ? inverse_rms(width, norm.eps, shifted) : inverse_rms(width, norm.eps, at);
  return [=](long i) {
    Vec v = norm.centered ? (at(i) - mean) * scale : at(i) * scale;
    v *= load(norm.weight + i, width - i);
    return norm.bias ? v + load(norm.bias + i, width - i) : v;
  };
}

// Where rows are written: as bf16, as int8 for a linear layer (see int8.cpp; padded to a multiple of 4), or both. int8
// is computed from the bf16 row, so that one pass gives the same as two.
struct RowOutputs {
  bf16* plain;     // [M, width], or null
  int8_t* values;  // or null
  float* scales;
  int32_t* excess;
};

constexpr float MIN_ROW_MAX =
    0x1p-100f;  // rows with a smaller maximum count as zero: the reciprocal would overflow fp32

// values = row / scale, to the nearest, ties to even; scale = the largest absolute value / 127. A row with NaN or
// infinity gets zeros, and NaN as its scale.
void quantize_row(const bf16* row, long width, int8_t* values, float* scale, int32_t* excess) {
  // Without the sign, the order of bits is that of values, and NaN is the largest.
  auto max_magnitude = [](Bits most, Vec v) {
    Bits size = (Bits)v & 0x7fffffff;
    return size > most ? size : most;
  };
  long whole = width / LANES * LANES, rest = width - whole, i = 0;
  Bits most[4] = {};
#pragma GCC unroll 4
  for (; i < whole; i += LANES) most[i / LANES % 4] = max_magnitude(most[i / LANES % 4], load(row + i));
  if (rest) most[0] = max_magnitude(most[0], load(row + i, rest));
  uint32_t largest = 0, lanes[4][LANES];
  memcpy(lanes, most, sizeof lanes);
  for (auto& each : lanes)
    for (uint32_t lane : each) largest = std::max(largest, lane);
  float top;
  memcpy(&top, &largest, sizeof top);
  bool sound = largest < 0x7f800000;
  *scale = sound ? top / 127 : __builtin_nanf("");
  *excess = 0;
  if (!sound || top < MIN_ROW_MAX) {
    memset(values, 0, (width + 3) / 4 * 4);
    return;
  }
  float inverse = 127 / top;
  Ints total = {};
  auto round = [&](Vec v) {
    Ints near = (Ints)(v * inverse + 12582912.f) - 0x4b400000;  // adding 1.5 * 2^23 leaves the integer in the low bits
    total += near;
    return __builtin_convertvector(near, Bytes);
  };
#pragma GCC unroll 4
  for (i = 0; i < whole; i += LANES) store(values + i, round(load(row + i)));
  if (rest) {
    Bytes last = round(load(row + i, rest));
    memcpy(values + i, &last, (rest + 3) / 4 * 4);
  }
  *excess = 128 * sum(total);
}

// to = the `rotary` numbers of x, each turned with its partner; see rope_write.
void rotate(const float* x, const float* cos, const float* sin, bf16* to, long rotary, bool interleaved) {
  float partners[MAX_DIM];
  long half = rotary / 2;
  if (interleaved) {
    for (long i = 0; i < rotary; i++) partners[i] = x[i ^ 1];
  } else {
    memcpy(partners, x + half, half * sizeof(float));
    memcpy(partners + half, x, half * sizeof(float));
  }
  for (long i = 0; i < rotary; i += LANES) {
    long left = rotary - i;
    store(to + i, fma(load(x + i, left), load(cos + i, left), load(partners + i, left) * load(sin + i, left)), left);
  }
}

// Calls f(m) for each row, by a team.
template <class F> void each_row(long M, int threads, F f) {
  run_parallel(threads, [=] {
#pragma omp for
    for (long m = 0; m < M; m++) f(m);
  });
}

// Rows of `width` numbers written by compute(m, to), by a team.
template <class Compute> void write_rows(RowOutputs out, long M, long width, int threads, Compute compute) {
  long padded = (width + 3) / 4 * 4;
  run_parallel(threads, [=] {
    std::unique_ptr<bf16[]> row(out.plain ? nullptr : new bf16[width]);
#pragma omp for
    for (long m = 0; m < M; m++) {
      bf16* to = out.plain ? out.plain + m * width : row.get();
      compute(m, to);
      if (out.values) quantize_row(to, width, out.values + m * padded, out.scales + m, out.excess + m);
    }
  });
}

}  // namespace

extern "C" {

// x [M, width] -> values [M, padded width], scales [M], excess [M] = 128 times the sum of a row's values
void quantize_rows(const bf16* x, int8_t* values, float* scales, int32_t* excess, int64_t M, int64_t width,
                   int64_t threads) {
  long padded = (width + 3) / 4 * 4;
  each_row(M, threads_for(M * width, threads),
           [=](long m) { quantize_row(x + m * width, width, values + m * padded, scales + m, excess + m); });
}

// total = total_scale * (residual + scale * after(x)), or the residual itself if x is null; out = norm(total). A norm
// that is null changes nothing. All are [M, width]; without x, total is not written. `plain` gets the result, and
// `values` the quantized one, unless they are null.
void add_norm(const bf16* x, const bf16* residual, bf16* total, const Norm* after, float scale, float total_scale,
              const Norm* norm, bf16* plain, int8_t* values, float* scales, int32_t* excess, int64_t M, int64_t width,
              int64_t threads) {
  RowOutputs out{plain, values, scales, excess};
  write_rows(out, M, width, threads_for(M * width, threads), [=](long m, bf16* to) {
    const bf16* row = residual + m * width;
    if (x) {
      const bf16 *one = x + m * width, *other = row;
      bf16* both = total + m * width;
      auto at = [=](long i) { return load(one + i, width - i); };
      auto add = [=](auto more) {
        for (long i = 0; i < width; i += LANES)
          store(both + i, (more(i) * scale + load(other + i, width - i)) * total_scale, width - i);
      };
      if (after) {
        auto each = normed(*after, width, at);
        add([=](long i) { return widen(narrow(each(i))); });
      } else add(at);
      row = both;
    }
    if (!norm) return (void)memcpy(to, row, width * sizeof(bf16));
    auto each = normed(*norm, width, [=](long i) { return load(row + i, width - i); });
    for (long i = 0; i < width; i += LANES) store(to + i, each(i), width - i);
  });
}

// [M, width] = activation(gate) * up of rows [gate | up], or activation(row) unless `gated`: to `plain`, and quantized
// to `values`, unless they are null. CLAMPED_SWIGLU changes `up`, too. `factors`: three of XIELU, or null.
void activate(const bf16* rows, int64_t activation, int64_t gated, const float* factors, bf16* plain, int8_t* values,
              float* scales, int32_t* excess, int64_t M, int64_t width, int64_t threads) {
  RowOutputs out{plain, values, scales, excess};
  auto run = [=](auto active, auto other) {
    write_rows(out, M, width, threads_for(M * width, threads), [=](long m, bf16* to) {
      const bf16 *gate = rows + (gated ? 2 : 1) * m * width, *up = gate + width;
      for (long i = 0; i < width; i += LANES) {
        Vec v = active(load(gate + i, width - i));
        store(to + i, gated ? v * other(load(up + i, width - i)) : v, width - i);
      }
    });
  };
  auto same = [](Vec x) { return x; };
  switch (activation) {
    case SILU: return run([](Vec x) { return silu(x); }, same);
    case GELU_TANH: return run([](Vec x) { return gelu_tanh(x); }, same);
    case GELU: return run([](Vec x) { return gelu(x); }, same);
    case RELU: return run([](Vec x) { return relu(x); }, same);
    case RELU2: return run([](Vec x) { return relu2(x); }, same);
    case CLAMPED_SWIGLU: return run([](Vec x) { return clamped_gate(x); }, [](Vec x) { return clamped_up(x); });
    case XIELU: return run([=](Vec x) { return xielu(x, factors); }, same);
  }
}

// out [M, width] = rows of x times SiLU(gate_scale * gate), with an RMS norm of each of `groups` equal parts of a row:
// after that if `gate_first`, or before it. A weight that is null: there is no norm. Rows of gates are `stride` numbers
// apart.
void norm_gated(const float* x, const bf16* gates, int64_t stride, const float* weight, float eps, float gate_scale,
                int64_t gate_first, bf16* out, int64_t M, int64_t width, int64_t groups, int64_t threads) {
  long size = width / groups;
  each_row(M, threads_for(M * width, threads), [=](long m) {
    for (long start = 0; start < width; start += size) {
      const float* row = x + m * width + start;
      const bf16* gate = gates + m * stride + start;
      auto active = [=](long i) { return silu(load(gate + i, size - i) * gate_scale); };
      auto at = [=](long i) {
        Vec v = load(row + i, size - i);
        return gate_first ? v * active(i) : v;
      };
      float scale = weight ? inverse_rms(size, eps, at) : 1.f;
      for (long i = 0; i < size; i += LANES) {
        Vec v = at(i);
        if (weight) v = v * scale * load(weight + start + i, size - i);
        store(out + m * width + start + i, gate_first ? v : v * active(i), size - i);
      }
    }
  });
}

// Norm (if head_norm is given) and rotation of the first `heads` + `kv_heads` heads of qkv [M, heads + 2 kv_heads,
// dim], in place. Keys and values of row m are stored at slots[m]. cos, sin: [M, rotary]; rotary <= dim <= MAX_DIM.
// Number i turns with its partner: i + rotary / 2, or the other of its pair (2 i, 2 i + 1) if `interleaved`. The norm
// is one of each head, before or `after` its rotation, or `whole`: an RMS norm of all queries, and of all keys. With
// `normed_values`, each head's value gets an RMS norm without weights, of the same eps. Queries are multiplied by
// query_scales [M] at last, unless it is null. Without key heads, only queries are there.
void rope_write(bf16* qkv, const float* cos, const float* sin, char* pages, const int64_t* slots, const Norm* head_norm,
                int64_t whole, int64_t after, int64_t normed_values, const float* query_scales, int64_t M,
                int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary, int64_t interleaved, int64_t int8,
                int64_t threads) {
  PageLayout layout{kv_heads, dim, dim, int8 != 0, false};
  long width = (heads + 2 * kv_heads) * dim;
  each_row(M, threads_for(M * width, threads), [=](long m) {
    float x[MAX_DIM];
    bf16* row = qkv + m * width;
    auto inverse = [=](const bf16* from, long numbers) {
      return inverse_rms(numbers, head_norm->eps, [=](long i) { return load(from + i, numbers - i); });
    };
    float query_scale = 0, key_scale = 0;
    if (head_norm && whole) {
      query_scale = inverse(row, heads * dim);
      key_scale = inverse(row + heads * dim, kv_heads * dim);
    }
    for (long h = 0; h < heads + kv_heads; h++) {
      bf16* head = row + h * dim;
      auto norm_head = [&] {
        if (whole) {
          const float *weight = head_norm->weight + h * dim, scale = h < heads ? query_scale : key_scale;
          for (long i = 0; i < dim; i += LANES)
            store(x + i, load(x + i, dim - i) * scale * load(weight + i, dim - i), dim - i);
          return;
        }
        Norm own = *head_norm;
        own.weight += h * dim;
        if (own.bias) own.bias += h * dim;
        auto each = normed(own, dim, [&](long i) { return load(x + i, dim - i); });
        for (long i = 0; i < dim; i += LANES) store(x + i, each(i), dim - i);
      };
      for (long i = 0; i < dim; i += LANES) store(x + i, load(head + i, dim - i), dim - i);
      if (head_norm && !after) norm_head();
      for (long i = rotary; head_norm && i < dim; i += LANES) store(head + i, load(x + i, dim - i), dim - i);
      rotate(x, cos + m * rotary, sin + m * rotary, head, rotary, interleaved);
      if (head_norm && after) {
        for (long i = 0; i < dim; i += LANES) store(x + i, load(head + i, dim - i), dim - i);
        norm_head();
        for (long i = 0; i < dim; i += LANES) store(head + i, load(x + i, dim - i), dim - i);
      }
      if (query_scales && h < heads)
        for (long i = 0; i < dim; i += LANES) store(head + i, load(head + i, dim - i) * query_scales[m], dim - i);
    }
    bf16 *keys = row + heads * dim, *values = keys + kv_heads * dim;
    for (bf16* value = values; normed_values && value < row + width; value += dim) {
      float scale = inverse(value, dim);
      for (long i = 0; i < dim; i += LANES) store(value + i, load(value + i, dim - i) * scale, dim - i);
    }
    write_token(layout, pages, slots[m], keys, values);
  });
}

// Stores the norm of the first `rank` numbers of each row, and the next `rotary` ones turned as by rope_write, as the
// key of row m at slots[m]. Rows are `stride` numbers apart.
void write_latents(const bf16* rows, int64_t stride, const Norm* norm, const float* cos, const float* sin, char* pages,
                   const int64_t* slots, int64_t M, int64_t rank, int64_t rotary, int64_t interleaved, int64_t int8,
                   int64_t threads) {
  PageLayout layout{1, rank + rotary, rank, int8 != 0, true};
  each_row(M, threads_for(M * layout.dim, threads), [=](long m) {
    const bf16* row = rows + m * stride;
    float x[MAX_DIM];
    bf16 key[MAX_DIM];
    auto each = normed(*norm, rank, [=](long i) { return load(row + i, rank - i); });
    for (long i = 0; i < rank; i += LANES) store(key + i, each(i), rank - i);
    for (long i = 0; i < rotary; i += LANES) store(x + i, load(row + rank + i, rotary - i), rotary - i);
    rotate(x, cos + m * rotary, sin + m * rotary, key + rank, rotary, interleaved);
    write_token(layout, pages, slots[m], key, nullptr);
  });
}

// out [M, heads, rank + rotary] = latents [heads, M, rank], and the last `rotary` numbers of each head of queries
// [M, heads, plain + rotary], turned as by rope_write. Rows of queries are `stride` numbers apart.
void join_queries(const bf16* latents, const bf16* queries, int64_t stride, const float* cos, const float* sin,
                  bf16* out, int64_t M, int64_t heads, int64_t rank, int64_t plain, int64_t rotary, int64_t interleaved,
                  int64_t threads) {
  each_row(M, threads_for(M * heads * (rank + rotary), threads), [=](long m) {
    float x[MAX_DIM];
    for (long h = 0; h < heads; h++) {
      const bf16* turning = queries + m * stride + h * (plain + rotary) + plain;
      bf16* to = out + (m * heads + h) * (rank + rotary);
      memcpy(to, latents + (h * M + m) * rank, rank * sizeof(bf16));
      for (long i = 0; i < rotary; i += LANES) store(x + i, load(turning + i, rotary - i), rotary - i);
      rotate(x, cos + m * rotary, sin + m * rotary, to + rank, rotary, interleaved);
    }
  });
}

// rows [M, width] *= scales [M]
void scale_rows(bf16* rows, const float* scales, int64_t M, int64_t width, int64_t threads) {
  each_row(M, threads_for(M * width, threads), [=](long m) {
    bf16* row = rows + m * width;
    for (long i = 0; i < width; i += LANES) store(row + i, load(row + i, width - i) * scales[m], width - i);
  });
}

// to [heads, M, width] = the first numbers of each head of rows, which are `stride` numbers apart, and heads `size`
void gather_heads(const bf16* rows, int64_t stride, int64_t size, bf16* to, int64_t M, int64_t heads, int64_t width,
                  int64_t threads) {
  each_row(M, threads_for(M * heads * width, threads), [=](long m) {
    for (long h = 0; h < heads; h++)
      memcpy(to + (h * M + m) * width, rows + m * stride + h * size, width * sizeof(bf16));
  });
}

// rows [M, heads, width] = from [heads, M, width]
void scatter_heads(const bf16* from, bf16* rows, int64_t M, int64_t heads, int64_t width, int64_t threads) {
  each_row(M, threads_for(M * heads * width, threads), [=](long m) {
    for (long h = 0; h < heads; h++)
      memcpy(rows + (m * heads + h) * width, from + (h * M + m) * width, width * sizeof(bf16));
  });
}

// Stores keys [M, kv_heads, dim] and values [M, kv_heads, value_dim] at slots [M] of the pages. `latent`: no values.
void write(const bf16* keys, const bf16* values, char* pages, const int64_t* slots, int64_t M, int64_t kv_heads,
           int64_t dim, int64_t value_dim, int64_t int8, int64_t latent, int64_t threads) {
  PageLayout layout{kv_heads, dim, value_dim, int8 != 0, latent != 0};
  long width = kv_heads * dim, value_width = kv_heads * value_dim;
  each_row(M, threads_for(M * (width + value_width), threads),
           [=](long m) { write_token(layout, pages, slots[m], keys + m * width, values + m * value_width); });
}

// logits [M, width] = cap(scale * logits), in place; a cap of 0 changes nothing.
void scale_logits(float* logits, int64_t M, int64_t width, float scale, float cap, int64_t threads) {
  each_row(M, threads_for(M * width, threads), [=](long m) {
    for (long i = 0; i < width; i += LANES) {
      float* at = logits + m * width + i;
      Vec v = load(at, width - i) * scale;
      store(at, cap > 0 ? capped(v, cap) : v, width - i);
    }
  });
}

}  // extern "C"
