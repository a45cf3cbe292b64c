// One unit of attention: query rows that share keys, by an online softmax over blocks of keys (flash attention).
//
// For each block of KEY_BLOCK keys and each tile of SCORE_ROWS rows:
//
//   compute_scores  scores [rows][KEY_BLOCK] = queries * keys
//   adjust_scores   scales, caps and masks them, if that is needed
//   rescale         raises references that scores exceed by far, and multiplies sums so far by 2^(old - new)
//   SoftmaxStage    weights = 2^(score - reference) while the scores of the next tile are computed (softmax.h)
//   sum_values      out [rows][value_dim] += weights * values
//
// Both products (products.h) read pages instead of packed panels. While a block is
// computed, as much of the next one is prefetched: a page is only a few kilobytes, so the CPU detects no pattern by
// itself. If a task has several KV heads, it computes all of them for a block before the next block. So it reads whole
// pages, which often follow each other in memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

#include "../pages.h"
#include "products.h"
#include "softmax.h"

constexpr long BLOCK_PAGES = KEY_BLOCK / PAGE;
constexpr long UNIT_ROWS = HAS_AMX ? 96 : 48;  // rows of a unit, which share the reading of a block

// One sequence's rows in the batch, in Python's layout.
struct Span {
  int64_t first, count, length, table;  // first row, rows, tokens including the last row, start in the page table
};

// The arguments of `attend`.
struct Problem {
  const bf16* queries;
  long stride;  // from row to row of the queries
  const char* pages;
  bf16* out;
  const int64_t* table;
  const float *sinks, *slopes;
  const int64_t* visible_ends;  // of the rows, as in `attend`; or null
  PageLayout layout;
  long heads, window, chunk;
  float scale, softcap;

  // The first position that a token at `position` attends to.
  long start(long position) const {
    long first = chunk > 0 ? position / chunk * chunk : 0;
    return window > 0 ? std::max(first, position + 1 - window) : first;
  }

  // The position after the last one that a token of the span attends to.
  long end(const Span& span, long token) const {
    long after = span.length - span.count + token + 1;  // of the token itself
    return visible_ends ? std::clamp(visible_ends[span.first + token], after, span.length) : after;
  }

  long queries_per_kv_head() const { return heads / layout.heads; }
  long padded() const { return (layout.value_dim + PANEL - 1) / PANEL * PANEL; }
  const char* head(const Span& span, long kv_head, long position) const {
    return pages + table[span.table + position / PAGE] * layout.page_bytes() + kv_head * layout.head_bytes();
  }
};

struct Task {
  const Span* span;
  long kv_head, kv_heads;  // the first KV head, and how many
  long row, rows;          // of each KV head: of the span's tokens times the heads that share keys
  long begin, end;         // keys, in whole blocks from the first
  float* partial;          // gets the result of one segment; null: the task computes all segments and writes the result

  long all_rows() const { return rows * kv_heads; }
};

// The token of the span, and the head, of one of all rows of a task.
inline std::pair<long, long> token_and_head(const Problem& problem, const Task& task, long row) {
  long group = problem.queries_per_kv_head(), kv_head = task.kv_head + row / task.rows;
  long row_of_head = task.row + row % task.rows;
  return {row_of_head / group, kv_head * group + row_of_head % group};
}

// The partial result of a number of rows and keys: the reference of the weights in bits (softmax.h), the sum of
// weights, the sum of weighted values.
struct PartialResult {
  float* out;  // [padded / PANEL][rows][PANEL]
  float *reference, *total;
  long rows, padded;
  PartialResult(float* memory, long rows, long padded)
      : out(memory), reference(memory + rows * padded), total(reference + rows), rows(rows), padded(padded) {}
  static long size(long rows, long padded) { return rows * (padded + 2); }

  // Columns d to d + PANEL of a row; d is a multiple of PANEL.
  float* panel(long row, long d) const { return out + d * rows + row * PANEL; }

  // f(numbers, d) for each vector of a row
  template <class F> void each(long row, F f) const {
    for (long d = 0; d < padded; d += LANES) f(panel(row, d / PANEL * PANEL) + d % PANEL, d);
  }
};

// A thread's memory for a unit.
struct Workspace {
  static constexpr long WORDS = Operands<float>::WORDS;
  alignas(64) Pair queries[UNIT_ROWS * MAX_DIM / 2 * WORDS];
  alignas(64) float scores[2][SCORE_ROWS * KEY_BLOCK];  // of a tile, and of the one before
  alignas(64) Pair weights[SCORE_ROWS * KEY_BLOCK / 2 * WORDS];
  alignas(64) float whole[UNIT_ROWS * (MAX_DIM + 2)], part[UNIT_ROWS * (MAX_DIM + 2)];
  // Of a block: both if pages are int8, values if they are parts of keys
  alignas(64) Pair keys[MAX_DIM / 2 * KEY_BLOCK], values[KEY_BLOCK / 2 * MAX_DIM];
  alignas(64) float key_scales[KEY_BLOCK], value_scales[KEY_BLOCK];
  Vec total[UNIT_ROWS];
  float negated_reference[UNIT_ROWS];                                  // in bits; 0 until a key is visible
  float limit[UNIT_ROWS];                                              // scores beyond it raise the reference
  long position[UNIT_ROWS], key_begin[UNIT_ROWS], key_end[UNIT_ROWS];  // of a row, and the keys that it sees
  float slope[UNIT_ROWS];                                              // 0 without slopes
};

// Attention of the rows of a task, block of keys by block and within a block tile of rows by tile. While the scores of
// a tile are computed, those of the tile before become weights, which multiply their values afterwards.
class FlashAttention {
  Workspace& workspace;
  const Problem& problem;
  const Task& task;
  PartialResult partial;
  const PageLayout& layout;
  const long pairs, wide, tiles;
  // What is prefetched: bytes of a page, of them in each step; int8 pages are prefetched as they are widened
  const long page_bytes, score_prefetch_bytes, value_prefetch_bytes;
  float scale;     // of scores in bits
  bool is_scaled;  // before they are stored
  long tiles_scored = 0;
  AttentionProducts products;

  // The tile whose scores become weights
  struct Tile {
    long first, rows = 0, pages;
    const Pair* values[BLOCK_PAGES];
    SoftmaxStage softmax;
  } pending;

  const char *heads[BLOCK_PAGES], *next[BLOCK_PAGES];  // of the pages of a block, and what is prefetched meanwhile
  const Pair *keys[BLOCK_PAGES], *values[BLOCK_PAGES];

  // Finds the pages of a block for one of the task's KV heads, and what is prefetched meanwhile: as many heads of the
  // task that reads next, from its key `next_begin` on, in the order of memory: page by page.
  void find_pages(long kv_head, long block, long end, const Task& next_task, long next_begin) {
    long first = std::min(kv_head, next_task.kv_heads - 1) * BLOCK_PAGES;
    long page = first / next_task.kv_heads, next_head = first % next_task.kv_heads;
    for (long i = 0; i < BLOCK_PAGES; i++) {
      heads[i] = problem.head(*task.span, task.kv_head + kv_head, std::min(block + i * PAGE, end - 1));
      long position = std::min(next_begin + page * PAGE, next_task.end - 1);
      next[i] = problem.head(*next_task.span, next_task.kv_head + next_head, position);
      if (++next_head == next_task.kv_heads) next_head = 0, page++;
    }
  }

  // Sets keys and values of a block.
  void load_block(long pages) {
    for (long i = 0; i < pages; i++) {
      Pair *own_keys = workspace.keys + i * pairs * PAGE, *own_values = workspace.values + i * PAGE / 2 * wide;
      keys[i] = layout.int8 ? own_keys : (const Pair*)heads[i];
      values[i] = layout.int8 || layout.latent ? own_values : (const Pair*)(heads[i] + layout.key_bytes());
      if (layout.int8) {
        const char *values_at = heads[i] + layout.key_bytes(), *next_at = next[i] + layout.key_bytes();
        const char *key_scales = heads[i] + layout.key_scales(), *value_scales = key_scales + layout.scale_bytes();
        widen_int8(heads[i], next[i], pairs / 2, PAGE, own_keys);
        if (!layout.latent) widen_int8(values_at, next_at, PAGE / 4, wide, own_values);
        memcpy(workspace.key_scales + i * PAGE, key_scales, PAGE * sizeof(float));
        memcpy(workspace.value_scales + i * PAGE, layout.latent ? key_scales : value_scales, PAGE * sizeof(float));
      }
      if (layout.latent) latents_to_values(keys[i], layout.value_dim / 2, wide, own_values);
    }
  }

  // Computes the scores of a tile, and meanwhile the weights of the one that waits. Each tile prefetches its part of
  // the first half of the next block, in the order of memory, from which the CPU guesses what comes. Returns whether a
  // score exceeds the limit of its row.
  bool compute_scores(long tile, long first, long rows, long pages, float* scores) {
    constexpr long VECTORS = PAGE / LANES, COLUMN_PAIRS = BLOCK_PAGES * VECTORS / 2;  // vectors of a page's keys
    ColumnPair columns[COLUMN_PAIRS];
    long count = 0;
    for (long i = 0; i < pages * VECTORS; i += 2, count++) {
      long j = std::min(i + 1, pages * VECTORS - 1);
      const char* prefetch_from =
          next[count * BLOCK_PAGES / 2 / COLUMN_PAIRS] + (count * BLOCK_PAGES / 2 % COLUMN_PAIRS ? page_bytes / 2 : 0);
      columns[count] = {keys[i / VECTORS] + i % VECTORS * LANES, keys[j / VECTORS] + j % VECTORS * LANES,
                        prefetch_from + tile * score_prefetch_bytes * pairs, score_prefetch_bytes};
    }
    const Pair* queries = workspace.queries + first * pairs * Workspace::WORDS;
    return products.score(rows, queries, columns, count, scores, workspace.limit + first, pending.softmax);
  }

  // Adds the values of the tile that waits, times their weights, and prefetches a part of the other half.
  void sum_values(long tile) {
    if (!pending.rows) return;
    pending.softmax.finish(layout.int8 ? workspace.value_scales : nullptr);
    const char* const* page = next + BLOCK_PAGES / 2;
    long bytes = value_prefetch_bytes * PAGE / 2, offset = 0;
    for (long d = 0; d < wide; d += PANEL) {
      long other = d + LANES < wide ? d + LANES : d;
      ColumnPair columns[BLOCK_PAGES];
      for (long i = 0; i < pending.pages; i++) {
        columns[i] = {pending.values[i] + d, pending.values[i] + other, *page + offset + tile * bytes,
                      value_prefetch_bytes};
        offset += bytes * tiles;
        if (offset + bytes * tiles > page_bytes && page + 1 < next + BLOCK_PAGES) page++, offset = 0;
      }
      products.sum(pending.rows, workspace.weights, columns, pending.pages, wide, partial.panel(pending.first, d));
    }
    pending.rows = 0;
  }

  // Changes scores where that is not just a scale: int8 keys, a cap, slopes, and keys that a row does not see. Returns
  // whether one exceeds the limit of its row.
  bool adjust_scores(float* scores, long first, long rows, long block) {
    Vec numbers, excess = {};
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    for (long r = 0; r < rows; r++) {
      Vec key_begin = broadcast((float)(workspace.key_begin[first + r] - block));
      Vec key_end = broadcast((float)(workspace.key_end[first + r] - block));
      Vec limit = broadcast(workspace.limit[first + r]);
      for (long j = 0; j < KEY_BLOCK; j += LANES) {
        Vec v = load<Vec>(scores + r * KEY_BLOCK + j), at = numbers + (float)j;
        if (layout.int8) v *= load<Vec>(workspace.key_scales + j);
        if (is_scaled) v *= problem.scale;
        if (problem.softcap > 0) v = capped(v, problem.softcap);
        if (problem.slopes)
          v = fma(at + (float)(block - workspace.position[first + r]), broadcast(workspace.slope[first + r]), v);
        v = (at >= key_begin) & (at < key_end) ? v : broadcast(-INFINITY);
        excess = max_of(v - limit, excess);
        store(scores + r * KEY_BLOCK + j, v);
      }
    }
    return any((Bits)(excess > 0));
  }

  // Raises the references of the rows of a tile that have a score beyond their limits, to the largest one, and rescales
  // their totals and sums, which relate to the references.
  void rescale(const float* scores, long first, long rows) {
    Vec lane_max[LANES];
    std::fill(lane_max, lane_max + LANES, broadcast(-INFINITY));
    for (long r = 0; r < rows; r++)
      for (long j = 0; j < KEY_BLOCK; j += LANES)
        lane_max[r] = max_of(load<Vec>(scores + r * KEY_BLOCK + j), lane_max[r]);
    Vec most = largest_of_each(lane_max), limit = load(workspace.limit + first, rows);
    Vec old = load(partial.reference + first, rows);
    Bits raised = (Bits)(most > limit);
    Vec now = raised ? most * scale : old, factors = pow2(old - now);
    store(workspace.limit + first, raised ? most + REFERENCE_SLACK / scale : limit, rows);
    store(workspace.negated_reference + first, now == -INFINITY ? Vec{} : -now, rows);
    store(partial.reference + first, now, rows);
    for (long r = 0; r < rows; r++) {
      if (!raised[r] || old[r] == -INFINITY) continue;  // -infinity: the sums are still 0
      float factor = factors[r];
      workspace.total[first + r] *= factor;
      partial.each(first + r, [=](float* out, long) { store(out, load<Vec>(out) * factor); });
    }
  }

  // Whether the rows of a tile see all keys of a block.
  bool sees_all_keys(long first, long rows, long block) const {
    bool all = true;
    for (long r = first; r < first + rows; r++)
      all &= workspace.key_begin[r] <= block && workspace.key_end[r] >= block + KEY_BLOCK;
    return all;
  }

 public:
  FlashAttention(Workspace& workspace, const Problem& problem, const Task& task, PartialResult partial)
      : workspace(workspace),
        problem(problem),
        task(task),
        partial(partial),
        layout(problem.layout),
        pairs(layout.pairs()),
        wide(layout.wide()),
        tiles((task.rows + SCORE_ROWS - 1) / SCORE_ROWS),
        page_bytes(layout.int8 ? 0 : layout.head_bytes()),
        score_prefetch_bytes(page_bytes * LANES / PAGE / pairs / tiles),
        value_prefetch_bytes(page_bytes * PANEL / partial.padded / PAGE / tiles),
        is_scaled(problem.softcap > 0 || problem.slopes || problem.scale <= 0),
        products(pairs, tiles == 1) {
    scale = is_scaled ? LOG2E : problem.scale * LOG2E;
  }

  // Sums the rows over keys from `begin` to `end`. Meanwhile the keys are prefetched that `next_task` reads afterwards,
  // from `next_begin` on; it may be the same task.
  void run(long begin, long end, const Task& next_task, long next_begin) {
    long all_rows = task.all_rows();
    std::fill(partial.out, partial.out + all_rows * partial.padded, 0.f);
    std::fill(partial.reference, partial.reference + all_rows, -INFINITY);
    std::fill(workspace.negated_reference, workspace.negated_reference + all_rows, 0.f);
    std::fill(workspace.limit, workspace.limit + all_rows, -INFINITY);
    std::fill(workspace.total, workspace.total + all_rows, Vec{});
    for (long block = begin; block < end; block += KEY_BLOCK) {
      long pages = std::min(BLOCK_PAGES, (end - block + PAGE - 1) / PAGE);
      bool is_last = block + KEY_BLOCK >= end;
      for (long head = 0; head < task.kv_heads; head++) {
        find_pages(head, block, end, is_last ? next_task : task, is_last ? next_begin : block + KEY_BLOCK);
        if (layout.int8 || layout.latent) sum_values(0);  // before its values are overwritten
        load_block(pages);
        for (long t = 0; t < tiles; t++) {
          long first = head * task.rows + task.rows * t / tiles;
          long rows = head * task.rows + task.rows * (t + 1) / tiles - first;
          float* scores = workspace.scores[tiles_scored++ % 2];
          bool exceeds = compute_scores(t, first, rows, pages, scores);
          sum_values(t);
          if (layout.int8 || is_scaled || !sees_all_keys(first, rows, block))
            exceeds = adjust_scores(scores, first, rows, block);
          if (block == begin || exceeds) rescale(scores, first, rows);  // in the first block each row that sees a key rises
          pending = {first,
                     rows,
                     pages,
                     {},
                     {scores, workspace.negated_reference + first, workspace.total + first, workspace.weights, scale}};
          std::copy(values, values + BLOCK_PAGES, pending.values);
          pending.softmax.count = rows * SoftmaxStage::VECTORS;
          pending.softmax.overlapped = layout.int8 ? 0 : pending.softmax.count;
        }
      }
    }
    sum_values(0);
    for (long r = 0; r < all_rows; r++) partial.total[r] = sum(workspace.total[r]);
  }
};
