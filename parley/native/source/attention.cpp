// Causal attention of query rows over pages of keys and values: decodes, chunks of prompts and mixtures alike.
//
// Work is cut into units: some rows of one sequence, with the heads that share keys. A unit walks its keys in blocks of
// absolute positions with a running maximum, so what a row sums, and in which order, is its own affair: a block that is
// hidden from a row gives it weights of 0 and a factor of exactly 1, and neither changes a bit.
//
// Pages are [pages, 2, kv_heads, 16, width], keys before values. Of each block the keys are transposed, and the values
// of neighbours in time are interleaved, so that both products are tiles of pairs.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "tile.h"

namespace {

constexpr long PAGE = 16;  // tokens of a page
constexpr long BLOCK = 64;  // keys between two looks at the maximum
constexpr long UNIT = 48;   // rows of a unit: what a block's preparation is shared by
constexpr long MAX_DIM = 512;

// One sequence's rows in the batch, as Python lays it out.
struct Span {
  int64_t first, count, length, table;  // the first row, rows, tokens up to the last of them, start in the page table
};

struct Problem {
  const bf16* queries;
  long stride;  // from row to row of the queries
  const bf16* pages;
  bf16* out;
  const int64_t* table;
  const float* sinks;
  long heads, kv_heads, dim, width, value_dim, window;
  float scale, softcap;
};

// a 32-bit square turned around its diagonal: every pass zips the halves of the rows
void transpose(Bits* rows) {
  Bits low, high;
  for (int i = 0; i < LANES; i++) {
    low[i] = i / 2 + i % 2 * LANES;
    high[i] = low[i] + LANES / 2;
  }
#pragma GCC unroll 4
  for (int pass = 1; pass < LANES; pass *= 2) {
    Bits next[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
      next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
    }
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

Vec larger(Vec a, Vec b) { return a > b ? a : b; }

float largest(Vec v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// What a thread needs for a unit. Widths are rounded up to whole panels; what is beyond the real ones is zero.
struct Room {
  alignas(64) Pair queries[UNIT * MAX_DIM / 2];
  alignas(64) Pair keys[(MAX_DIM / 2 + LANES) * BLOCK];  // [pairs of dim][BLOCK]
  alignas(64) Pair values[BLOCK / 2 * MAX_DIM];          // [pairs of keys][value_dim]
  alignas(64) float scores[UNIT * BLOCK];
  alignas(64) bf16 weights[UNIT * BLOCK];
  alignas(64) float out[UNIT * MAX_DIM];
  float most[UNIT];
  Vec total[UNIT];
  long from[UNIT], upto[UNIT];  // the keys that a row sees
};

// keys [count][dim] -> room.keys[.][at + .], in squares; `next` is where the following block's keys lie
void take_keys(Room& room, const bf16* keys, const bf16* next, long width, long pairs, long at, long count) {
  for (long t = 0; t < count; t += LANES)
    for (long p = 0; p < pairs; p += LANES) {
      Bits square[LANES];
      for (long i = 0; i < LANES; i++) {
        square[i] = Bits{};
        if (t + i >= count) continue;
        const bf16* from = keys + (t + i) * width + 2 * p;
        __builtin_prefetch(next + (t + i) * width + 2 * p);
        memcpy(&square[i], from, 4 * std::min<long>(LANES, pairs - p));
      }
      transpose(square);
      for (long i = 0; i < LANES; i++) put(room.keys + (p + i) * BLOCK + at + t, square[i]);
    }
}

// values [count][value_dim] -> room.values[(at + .) / 2], two tokens side by side
void take_values(Room& room, const bf16* values, const bf16* next, long width, long value_dim, long padded, long at,
                 long count) {
  for (long t = 0; t < count; t += 2)
    for (long d = 0; d < value_dim; d += LANES) {
      const bf16 *one = values + t * width + d, *other = one + width;
      __builtin_prefetch(next + t * width + d);
      __builtin_prefetch(next + (t + 1) * width + d);
      Bits low = (Bits)load(one, value_dim - d) >> 16;
      Bits high = t + 1 < count ? (Bits)load(other, value_dim - d) : Bits{};
      put(room.values + (at + t) / 2 * padded + d, low | high);
    }
}

// scores -> weights of one row, its maximum and total brought up to date; the factor for what it summed before
float weigh(Room& room, const Problem& problem, long r, long block, long keys) {
  float* scores = room.scores + r * BLOCK;
  float old = room.most[r];
  Vec most = fill(old), numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = i;
  long from = room.from[r] - block, upto = room.upto[r] - block;
  for (long i = 0; i < keys; i += LANES) {
    Vec v = read<Vec>(scores + i) * problem.scale, at = numbers + (float)i;
    if (problem.softcap > 0) v = problem.softcap - 2 * problem.softcap / (1.f + exp(v * (2.f / problem.softcap)));
    v = (at >= (float)from) & (at < (float)upto) ? v : fill(-INFINITY);
    most = larger(v, most);
    put(scores + i, v);
  }
  float now = largest(most);
  bf16* weights = room.weights + r * BLOCK;
  if (now == -INFINITY) {  // nothing of it yet
    memset(weights, 0, BLOCK * sizeof(bf16));
    return 1;
  }
  Vec total = {};
  for (long i = 0; i < keys; i += LANES) {
    Vec v = read<Vec>(scores + i), weight = exp(v - now);
    weight = v == -INFINITY ? Vec{} : weight;
    total += weight;
    put(weights + i, narrow(weight));
  }
  float factor = old == now ? 1.f : exp(fill(old - now))[0];
  room.most[r] = now;
  room.total[r] = room.total[r] * factor + total;
  return factor;
}

void attend(Room& room, const Problem& problem, const Span& span, const int64_t* table, long kv_head, long token,
            long tokens) {
  long fold = problem.heads / problem.kv_heads, rows = tokens * fold, pairs = problem.dim / 2, width = problem.width;
  long padded = (problem.value_dim + PANEL - 1) / PANEL * PANEL;
  long begin = INT64_MAX, end = 0;
  for (long r = 0; r < rows; r++) {
    long row = token + r / fold, head = kv_head * fold + r % fold, position = span.length - span.count + row;
    memcpy(room.queries + r * pairs, problem.queries + (span.first + row) * problem.stride + head * problem.dim, 4 * pairs);
    room.upto[r] = position + 1;
    room.from[r] = problem.window > 0 ? std::max(0l, position + 1 - problem.window) : 0;
    begin = std::min(begin, room.from[r]);
    end = std::max(end, room.upto[r]);
    room.most[r] = problem.sinks ? problem.sinks[head] : -INFINITY;
    room.total[r] = Vec{};
    if (problem.sinks) room.total[r][0] = 1;
  }
  memset(room.out, 0, rows * padded * sizeof(float));
  memset(room.values, 0, sizeof(Pair) * BLOCK / 2 * padded);

  auto place = [&](long position) {
    return problem.pages + (table[position / PAGE] * 2 * problem.kv_heads + kv_head) * PAGE * width;
  };
  long to_values = problem.kv_heads * PAGE * width, tiles = (rows + TILE - 1) / TILE;
  for (long block = begin / BLOCK * BLOCK; block < end; block += BLOCK) {
    long keys = std::min(BLOCK, end - block);
    for (long at = 0; at < keys; at += PAGE) {
      long count = std::min(PAGE, keys - at), following = block + BLOCK + at;
      const bf16 *page = place(block + at), *next = place(following < end ? following : block + at);
      take_keys(room, page, next, width, pairs, at, count);
      take_values(room, page + to_values, next + to_values, width, problem.value_dim, padded, at, count);
    }
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
      Tile run = choose<false>(count);
      for (long i = 0; i < keys; i += PANEL)
        run(room.queries + first * pairs, pairs, room.keys + i, BLOCK, pairs, room.scores + first * BLOCK + i, BLOCK, true);
      for (long r = first; r < first + count; r++) {
        float factor = weigh(room, problem, r, block, keys);
        if (factor == 1) continue;
        float* sums = room.out + r * padded;
        for (long d = 0; d < padded; d += LANES) put(sums + d, read<Vec>(sums + d) * factor);
      }
      for (long d = 0; d < padded; d += PANEL)
        run((const Pair*)room.weights + first * BLOCK / 2, BLOCK / 2, room.values + d, padded, (keys + 1) / 2,
            room.out + first * padded + d, padded, false);
    }
  }
  for (long r = 0; r < rows; r++) {
    long row = span.first + token + r / fold, head = kv_head * fold + r % fold, left = problem.value_dim;
    float whole = 1.f / sum(room.total[r]);
    bf16* to = problem.out + (row * problem.heads + head) * problem.value_dim;
    for (long d = 0; d < left; d += LANES) store(to + d, read<Vec>(room.out + r * padded + d) * whole, left - d);
  }
}

}  // namespace

extern "C" {

// The largest dim, and the most heads that share keys.
int64_t attend_dim() { return MAX_DIM; }
int64_t attend_fold() { return UNIT; }

// out [T, heads, value_dim] = attention of queries [T, heads, dim] over the pages; dim is even, sinks [heads] may be
// null, window and softcap are 0 where there is none. `units` [count][3]: a span, its token and how many of them.
void attend(const bf16* queries, int64_t stride, const bf16* pages, bf16* out, const int64_t* spans, const int64_t* table,
            const int64_t* units, int64_t count, const float* sinks, int64_t heads, int64_t kv_heads, int64_t dim,
            int64_t width, int64_t value_dim, int64_t window, float scale, float softcap, int64_t threads) {
  Problem problem{queries, stride, pages,     out,    table, sinks,  heads, kv_heads,
                  dim,     width,  value_dim, window, scale, softcap};
#pragma omp parallel num_threads(threads)
  {
    static thread_local Room room;
#pragma omp for schedule(dynamic)
    for (long u = 0; u < count * kv_heads; u++) {
      const int64_t* unit = units + u / kv_heads * 3;
      const Span& span = ((const Span*)spans)[unit[0]];
      attend(room, problem, span, table + span.table, u % kv_heads, unit[1], unit[2]);
    }
  }
}

}  // extern "C"
