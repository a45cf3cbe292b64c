// One unit of attention: rows that share keys walk over them, block by block.
//
// Both products are tiles as in tile.h, but of pages (see pages.h) instead of a panel. While a block is computed, the
// same part of the next one is prefetched: a page is only a few kilobytes, so the CPU detects no pattern by itself.
#pragma once
#include <algorithm>
#include <cmath>

#include "../pages.h"
#include "../tile.h"
#include "softmax.h"

constexpr long PAGES = BLOCK / PAGE;
constexpr long UNIT = 48;  // rows of a unit, which share the reading of a block

// One sequence's rows in the batch, in Python's layout.
struct Span {
  int64_t first, count, length, table;  // first row, rows, tokens including the last row, start in the page table
};

struct Problem {
  const bf16* queries;
  long stride;  // from row to row of the queries
  const char* pages;
  bf16* out;
  const int64_t* table;
  const float *sinks, *slopes;
  const int64_t* ends;  // of the rows, as in `attend`; or null
  Layout layout;
  long heads, window, chunk;
  float scale, softcap;

  // The first position that a token at this one sees.
  long start(long position) const {
    long first = chunk > 0 ? position / chunk * chunk : 0;
    return window > 0 ? std::max(first, position + 1 - window) : first;
  }

  // The number of tokens that a token of the span sees.
  long end(const Span& span, long token) const {
    long after = span.length - span.count + token + 1;  // of the token itself
    return ends ? std::clamp(ends[span.first + token], after, span.length) : after;
  }

  long fold() const { return heads / layout.heads; }
  long padded() const { return (layout.value_dim + PANEL - 1) / PANEL * PANEL; }
  const char* head(const Span& span, long kv_head, long position) const {
    return pages + table[span.table + position / PAGE] * layout.page_bytes() + kv_head * layout.head_bytes();
  }
};

struct Task {
  const Span* span;
  long kv_head, row, rows;  // of the span's tokens times the heads that share keys
  long begin, end;          // keys, in whole blocks from the first
  float* sums;              // where the sums of one segment go; null: the task walks all segments and writes the result
};

// The partial result of a number of rows and keys: the largest score, the sum of weights, the sum of weighted values.
struct Sums {
  float* out;  // [padded / PANEL][rows][PANEL]
  float *most, *total;
  long rows, padded;
  Sums(float* memory, long rows, long padded)
      : out(memory), most(memory + rows * padded), total(most + rows), rows(rows), padded(padded) {}
  static long size(long rows, long padded) { return rows * (padded + 2); }

  // Columns d to d + PANEL of a row; d is a multiple of PANEL.
  float* panel(long row, long d) const { return out + d * rows + row * PANEL; }

  // f(numbers, d) for each vector of a row
  template <class F> void each(long row, F f) const {
    for (long d = 0; d < padded; d += LANES) f(panel(row, d / PANEL * PANEL) + d % PANEL, d);
  }
};

// A thread's memory for a unit.
struct Room {
  static constexpr long WORDS = Operands<float>::WORDS;
  alignas(64) Pair queries[UNIT * MAX_DIM / 2 * WORDS];
  alignas(64) float scores[2][TILE * BLOCK];  // of a tile, and of the one before
  alignas(64) Pair weights[TILE * BLOCK / 2 * WORDS];
  alignas(64) float whole[UNIT * (MAX_DIM + 2)], part[UNIT * (MAX_DIM + 2)];
  // Of a block: both if pages are int8, values if they are parts of keys
  alignas(64) Pair keys[MAX_DIM / 2 * BLOCK], values[BLOCK / 2 * MAX_DIM];
  alignas(64) float key_scales[BLOCK], value_scales[BLOCK];
  Vec total[UNIT];
  float most[UNIT];           // in bits, negated; 0 until a key is visible
  long position[UNIT], from[UNIT], upto[UNIT];  // of a row, and the keys that it sees
  float slope[UNIT];                            // 0 without slopes
};

// Two vectors of columns in a page, and what is prefetched meanwhile, `pace` bytes in a step.
struct Strip {
  const Pair *left, *right;
  const char* later;
  long pace;
};

// acc += x [ROWS][steps] * the columns of a strip. Each step calls aside().
template <int ROWS, int FETCHES, class Aside>
__attribute__((always_inline)) inline void accumulate(Vec (&acc)[ROWS][2], const Pair* x, long x_stride, const Strip& strip,
                                                      long steps, long w_stride, Aside aside) {
  using O = Operands<float>;
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * x_stride;
  for (long k = 0; k < steps; k++) {
    __builtin_prefetch(strip.later + k * strip.pace, 0, 2);
    if (FETCHES == 2) __builtin_prefetch(strip.later + k * strip.pace + 64, 0, 2);
    aside();
#pragma GCC unroll 2
    for (int i = 0; i < O::WORDS; i++) {
      Bits left = O::part(strip.left + k * w_stride, i), right = O::part(strip.right + k * w_stride, i);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) O::add(acc[r], rows[r / 3] + r % 3 * x_stride + O::WORDS * k + i, left, right);
    }
  }
}

// scores [ROWS][BLOCK] = x [ROWS][pairs] * the keys of `count` strips; high [ROWS] = their largest. Where the registers
// suffice, each step also weighs a vector of the tile before: that uses other units of the CPU than the product does.
template <int ROWS, int FETCHES>
void score_tile(const Pair* x, long pairs, const Strip* strips, long count, float* scores, Vec* high, Weighing& other) {
  Weighing weighing = other;
  for (long s = 0; s < count; s++, scores += PANEL) {
    Vec acc[ROWS][2] = {};
    accumulate<ROWS, FETCHES>(acc, x, pairs * Operands<float>::WORDS, strips[s], pairs, PAGE, [&] {
      if (LANES == 16 && weighing.at < weighing.early) weighing.next();
    });
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      put(scores + r * BLOCK, acc[r][0]), put(scores + r * BLOCK + LANES, acc[r][1]);
      Vec largest = larger(acc[r][0], acc[r][1]);
      high[r] = s ? larger(largest, high[r]) : largest;
    }
  }
  other = weighing;
}

// sums [ROWS][PANEL] += weights [ROWS][BLOCK] * a panel of the values of `count` strips
template <int ROWS, int FETCHES> void sum_tile(const Pair* weights, const Strip* strips, long count, long wide, float* sums) {
  Vec acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = read<Vec>(sums + r * PANEL + i * LANES);
  constexpr long WORDS = Operands<float>::WORDS;
  for (long s = 0; s < count; s++)
    accumulate<ROWS, FETCHES>(acc, weights + s * PAGE / 2 * WORDS, BLOCK / 2 * WORDS, strips[s], PAGE / 2, wide, [] {});
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) put(sums + r * PANEL + i * LANES, acc[r][i]);
}

using ScoreTile = void (*)(const Pair*, long, const Strip*, long, float*, Vec*, Weighing&);
using SumTile = void (*)(const Pair*, const Strip*, long, long, float*);

// The products for this number of rows, 1 to TILE
struct TileKernels {
  ScoreTile score;
  SumTile sum;

  template <int FETCHES, int ROWS = TILE> static TileKernels choose(long rows) {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return choose<FETCHES, ROWS - 1>(rows);
    return {score_tile<ROWS, FETCHES>, sum_tile<ROWS, FETCHES>};
  }
};

// Walks the rows of a task over their keys, block by block and within a block tile by tile. While the scores of a tile
// are computed, those of the tile before become weights, which multiply their values afterwards.
class Walk {
  Room& room;
  const Problem& problem;
  const Task& task;
  Sums sums;
  const Layout& layout;
  const long pairs, wide, tiles;
  // What is prefetched: bytes of a page, of them in each step; int8 pages are prefetched as they are unfolded
  const long page_bytes, score_pace, sum_pace;
  float scale;  // of scores in bits
  bool is_scaled;  // before they are stored
  long tiles_scored = 0;

  // The tile whose scores become weights
  struct Tile {
    long first, rows = 0, pages;
    const Pair* values[PAGES];
    Weighing weighing;
  } waiting;

  const char *heads[PAGES], *next[PAGES];
  const Pair *keys[PAGES], *values[PAGES];

  // A single tile has to prefetch twice as fast as its products step.
  TileKernels kernels(long rows) const { return tiles == 1 ? TileKernels::choose<2>(rows) : TileKernels::choose<1>(rows); }

  void find(long block, long end, const char** to) {
    for (long i = 0; i < PAGES; i++)
      to[i] = problem.head(*task.span, task.kv_head, std::min(block + i * PAGE, end - 1));
  }

  // Sets keys and values of a block.
  void open(long pages) {
    for (long i = 0; i < pages; i++) {
      Pair *own_keys = room.keys + i * pairs * PAGE, *own_values = room.values + i * PAGE / 2 * wide;
      keys[i] = layout.int8 ? own_keys : (const Pair*)heads[i];
      values[i] = layout.int8 || layout.latent ? own_values : (const Pair*)(heads[i] + layout.key_bytes());
      if (layout.int8) {
        const char *values_at = heads[i] + layout.key_bytes(), *next_at = next[i] + layout.key_bytes();
        const char *key_scales = heads[i] + layout.key_scales(), *value_scales = key_scales + layout.scale_bytes();
        unfold(heads[i], next[i], pairs / 2, PAGE, own_keys);
        if (!layout.latent) unfold(values_at, next_at, PAGE / 4, wide, own_values);
        memcpy(room.key_scales + i * PAGE, key_scales, PAGE * sizeof(float));
        memcpy(room.value_scales + i * PAGE, layout.latent ? key_scales : value_scales, PAGE * sizeof(float));
      }
      if (layout.latent) turn(keys[i], layout.value_dim / 2, wide, own_values);
    }
  }

  // Computes the scores of a tile, and meanwhile the weights of the one that waits. Each tile prefetches its part of the
  // first half of the next block, in the order of memory, from which the CPU guesses what comes.
  void score(long tile, long first, long rows, long pages, float* scores, Vec* high) {
    constexpr long VECTORS = PAGE / LANES, STRIPS = PAGES * VECTORS / 2;  // vectors of a page's keys
    Strip strips[STRIPS];
    long count = 0;
    for (long i = 0; i < pages * VECTORS; i += 2, count++) {
      long j = std::min(i + 1, pages * VECTORS - 1);
      const char* later = next[count * PAGES / 2 / STRIPS] + (count * PAGES / 2 % STRIPS ? page_bytes / 2 : 0);
      strips[count] = {keys[i / VECTORS] + i % VECTORS * LANES, keys[j / VECTORS] + j % VECTORS * LANES,
                       later + tile * score_pace * pairs, score_pace};
    }
    const Pair* queries = room.queries + first * pairs * Room::WORDS;
    kernels(rows).score(queries, pairs, strips, count, scores, high, waiting.weighing);
  }

  // Adds the values of the tile that waits, times their weights, and prefetches a part of the other half.
  void sum_values(long tile) {
    if (!waiting.rows) return;
    waiting.weighing.finish(layout.int8 ? room.value_scales : nullptr);
    SumTile sum = kernels(waiting.rows).sum;
    const char* const* page = next + PAGES / 2;
    long bytes = sum_pace * PAGE / 2, offset = 0;
    for (long d = 0; d < wide; d += PANEL) {
      long other = d + LANES < wide ? d + LANES : d;
      Strip strips[PAGES];
      for (long i = 0; i < waiting.pages; i++) {
        strips[i] = {waiting.values[i] + d, waiting.values[i] + other, *page + offset + tile * bytes, sum_pace};
        offset += bytes * tiles;
        if (offset + bytes * tiles > page_bytes && page + 1 < next + PAGES) page++, offset = 0;
      }
      sum(room.weights, strips, waiting.pages, wide, sums.panel(waiting.first, d));
    }
    waiting.rows = 0;
  }

  // Changes scores where that is not just a scale: int8 keys, a cap, slopes, and keys that a row does not see.
  void adapt(float* scores, long first, long rows, long block, Vec* high) {
    Vec numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    for (long r = 0; r < rows; r++) {
      Vec from = fill((float)(room.from[first + r] - block)), upto = fill((float)(room.upto[first + r] - block));
      high[r] = fill(-INFINITY);
      for (long j = 0; j < BLOCK; j += LANES) {
        Vec v = read<Vec>(scores + r * BLOCK + j), at = numbers + (float)j;
        if (layout.int8) v *= read<Vec>(room.key_scales + j);
        if (is_scaled) v *= problem.scale;
        if (problem.softcap > 0) v = capped(v, problem.softcap);
        if (problem.slopes) v = fma(at + (float)(block - room.position[first + r]), fill(room.slope[first + r]), v);
        v = (at >= from) & (at < upto) ? v : fill(-INFINITY);
        high[r] = larger(v, high[r]);
        put(scores + r * BLOCK + j, v);
      }
    }
  }

  // Updates the largest scores of a tile, and totals and sums, which relate to them.
  void raise(const Vec* high, long first, long rows) {
    Vec old = load(sums.most + first, rows), now = larger(largest_of_each(high) * scale, old);
    if (!any((Bits)old ^ (Bits)now)) return;
    Vec factors = old == now ? fill(1.f) : power(old - now);
    store(sums.most + first, now, rows);
    store(room.most + first, now == -INFINITY ? Vec{} : -now, rows);
    for (long r = first; r < first + rows; r++) {
      float factor = factors[r - first];
      if (factor == 1) continue;
      room.total[r] *= factor;
      sums.each(r, [=](float* out, long) { put(out, read<Vec>(out) * factor); });
    }
  }

  // Whether the rows of a tile see all keys of a block.
  bool see_all(long first, long rows, long block) const {
    bool all = true;
    for (long r = first; r < first + rows; r++) all &= room.from[r] <= block && room.upto[r] >= block + BLOCK;
    return all;
  }

 public:
  Walk(Room& room, const Problem& problem, const Task& task, Sums sums)
      : room(room), problem(problem), task(task), sums(sums), layout(problem.layout), pairs(layout.pairs()),
        wide(layout.wide()), tiles((task.rows + TILE - 1) / TILE),
        page_bytes(layout.int8 ? 0 : layout.head_bytes()), score_pace(page_bytes * LANES / PAGE / pairs / tiles),
        sum_pace(page_bytes * PANEL / sums.padded / PAGE / tiles), is_scaled(problem.softcap > 0 || problem.slopes || problem.scale <= 0) {
    scale = is_scaled ? LOG2E : problem.scale * LOG2E;
  }

  // Sums the rows over keys from `begin` to `end`; `later` has the heads of the pages needed next.
  void run(long begin, long end, const char* const* later) {
    std::fill(sums.out, sums.out + task.rows * sums.padded, 0.f);
    std::fill(sums.most, sums.most + task.rows, -INFINITY);
    std::fill(room.most, room.most + task.rows, 0.f);
    std::fill(room.total, room.total + task.rows, Vec{});
    find(begin, end, next);
    Vec high[LANES];
    std::fill(high, high + LANES, fill(-INFINITY));
    for (long block = begin; block < end; block += BLOCK) {
      std::copy(next, next + PAGES, heads);
      if (block + BLOCK < end) find(block + BLOCK, end, next);
      else std::copy(later, later + PAGES, next);
      long pages = std::min(PAGES, (end - block + PAGE - 1) / PAGE);
      if (layout.int8 || layout.latent) sum_values(0);  // before its values are overwritten
      open(pages);
      for (long t = 0; t < tiles; t++) {
        long first = task.rows * t / tiles, rows = task.rows * (t + 1) / tiles - first;
        float* scores = room.scores[tiles_scored++ % 2];
        score(t, first, rows, pages, scores, high);
        sum_values(t);
        if (layout.int8 || is_scaled || !see_all(first, rows, block)) adapt(scores, first, rows, block, high);
        raise(high, first, rows);
        waiting = {first, rows, pages, {}, {scores, room.most + first, room.total + first, room.weights, scale}};
        std::copy(values, values + PAGES, waiting.values);
        waiting.weighing.count = rows * Weighing::VECTORS;
        waiting.weighing.early = layout.int8 ? 0 : waiting.weighing.count;
      }
    }
    sum_values(0);
    for (long r = 0; r < task.rows; r++) sums.total[r] = sum(room.total[r]);
  }
};

