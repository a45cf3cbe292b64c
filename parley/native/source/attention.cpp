// Causal attention of query rows over pages of keys and values: decode, prefill chunks, and mixtures of both. Rows may
// also see later tokens of their sequence, such as those of the same picture.
//
// Work is divided into units: a number of query rows (token and head) of one sequence that share keys. A unit walks its
// keys in blocks of absolute positions with a running maximum, and combines the results of segments of absolute
// positions from first to last. So the terms and order of a row's sums depend only on the row: a block or segment that
// is hidden from it changes nothing, and neither does the thread that walks a segment, or the time.
//
// Both products are tiles as in tile.h, but of pages (see pages.h) instead of a panel. While a block is computed, the
// same part of the next one is prefetched: a page is only a few kilobytes, so the CPU detects no pattern by itself.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "shares.h"
#include "tile.h"

namespace {

constexpr long BLOCK = 64;       // keys between two updates of the maximum
constexpr long PAGES = BLOCK / PAGE;
constexpr long SEGMENT = 1024;   // keys walked by one thread
constexpr long UNIT = 48;        // rows of a unit, which share the reading of a block
constexpr long SMALL = 1 << 17;  // multiplications below which a second thread costs more than it gains
constexpr float LOG2E = 1.44269504f;

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
  float *out, *most, *total;
  Sums(float* memory, long rows, long padded) : out(memory), most(memory + rows * padded), total(most + rows) {}
  static long size(long rows, long padded) { return rows * (padded + 2); }
};

// A thread's memory for a unit.
struct Room {
  alignas(64) Pair queries[UNIT * MAX_DIM / 2];
  alignas(64) float scores[UNIT * BLOCK];
  alignas(64) bf16 weights[UNIT * BLOCK];
  alignas(64) float whole[UNIT * (MAX_DIM + 2)], part[UNIT * (MAX_DIM + 2)];
  // Of a block: both if pages are int8, values if they are parts of keys
  alignas(64) Pair keys[MAX_DIM / 2 * BLOCK], values[BLOCK / 2 * MAX_DIM];
  alignas(64) float key_scales[BLOCK], value_scales[BLOCK];
  Vec total[UNIT];
  long from[UNIT], upto[UNIT];  // the keys that a row sees
  long position[UNIT];
  float slope[UNIT];  // times LOG2E; 0 without slopes
};

// Two vectors of columns in one page, and the same of a page needed later.
struct Strip {
  const Pair *left, *right, *later_left, *later_right;
};

// sums [ROWS][PANEL] = or += x [ROWS][count * steps] * columns of `count` consecutive strips, in pairs
template <int ROWS, bool FETCH>
void multiply(const Pair* x, long x_stride, const Strip* strips, long count, long steps, long w_stride, float* sums,
              long stride, bool fresh) {
  Vec acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = fresh ? Vec{} : read<Vec>(sums + r * stride + i * LANES);
  const Pair* rows[(ROWS + 2) / 3];  // one pointer per three rows: more would not fit the registers
#pragma GCC unroll 16
  for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] = x + 3 * i * x_stride;
  for (long s = 0; s < count; s++) {
    const Strip& strip = strips[s];
    for (long k = 0; k < steps; k++) {
      Bits left = read<Bits>(strip.left + k * w_stride), right = read<Bits>(strip.right + k * w_stride);
      if (FETCH) {
        __builtin_prefetch(strip.later_left + k * w_stride);
        if (LANES == 16) __builtin_prefetch(strip.later_right + k * w_stride);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Bits each = fill(rows[r / 3][r % 3 * x_stride + k]);
        acc[r][0] = dot(acc[r][0], each, left);
        acc[r][1] = dot(acc[r][1], each, right);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < (ROWS + 2) / 3; i++) rows[i] += steps;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < 2; i++) put(sums + r * stride + i * LANES, acc[r][i]);
}

using Multiply = void (*)(const Pair*, long, const Strip*, long, long, long, float*, long, bool);

// The product for this number of rows, 1 to TILE.
template <bool FETCH, int ROWS = TILE> Multiply choose_rows(long rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return choose_rows<FETCH, ROWS - 1>(rows);
  return multiply<ROWS, FETCH>;
}

// 2^x of x <= 0 with a relative error of about 2e-7, exactly 1 for 0; below -126 it is 2^-126
Vec power(Vec x) {
  const Vec round = fill(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = x < -126.f ? fill(-126.f) : x;
  Vec shifted = x + round, f = x - (shifted - round);
  Vec p = fill(1.32647e-3f);
  p = fma(p, f, fill(9.67151e-3f));
  p = fma(p, f, fill(5.550734e-2f));
  p = fma(p, f, fill(2.4022242e-1f));
  p = fma(p, f, fill(6.9314698e-1f));
  p = fma(p, f, fill(1.f));
  return p * (Vec)(((Bits)shifted + 127) << 23);
}

float power(float x) { return power(fill(x))[0]; }

// int8 in fours [groups][width][4] -> bf16 in pairs [2 * groups][width][2], exactly; prefetches the same part of
// `later`
void unfold(const char* from, const char* later, long groups, long width, Pair* to) {
  typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
  auto number = [](Bits x) { return (Bits)__builtin_convertvector((Ints)x >> 24, Vec); };  // of the highest byte
  for (long g = 0; g < groups; g++, to += 2 * width)
    for (long i = 0; i < width; i += LANES) {
      long at = 4 * (g * width + i);
      __builtin_prefetch(later + at);
      Bits x = read<Bits>(from + at);
      put(to + i, number(x << 24) >> 16 | number(x << 16));
      put(to + width + i, number(x << 8) >> 16 | number(x));
    }
}

// Keys of a page in pairs [count][PAGE][2] -> the same numbers as values in pairs [PAGE / 2][wide][2], with zeros beyond
void turn(const Pair* keys, long count, long wide, Pair* values) {
  for (long t = 0; t < PAGE / 2; t++) memset(values + t * wide + 2 * count, 0, (wide - 2 * count) * sizeof(Pair));
  for (long k = 0; k < count; k++, keys += PAGE)
    for (long t = 0; t < PAGE / 2; t++) {
      Pair first = keys[2 * t], second = keys[2 * t + 1];
      Pair* to = values + t * wide + 2 * k;
      to[0] = (first & 0xffff) | second << 16;
      to[1] = first >> 16 | (second & 0xffff0000);
    }
}

// The largest number of each of the vectors 0 to LANES - 1, in the lane of its index.
Vec largest_of_each(const Vec* rows) {
  Vec folded[LANES];
  for (int i = 0; i < LANES; i++) folded[i] = rows[i];
#pragma GCC unroll 4
  for (int width = LANES / 2, left = LANES; width; width /= 2, left /= 2) {  // fold halves, two vectors into one
    Bits low;
    for (int i = 0; i < LANES; i++) low[i] = 2 * (i - i % width) + i % width;
#pragma GCC unroll 8
    for (int i = 0; i < left / 2; i++) {
      Vec a = folded[2 * i], b = folded[2 * i + 1];
      folded[i] = larger(__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + width));
    }
  }
  return folded[0];
}

// Turns the scores of `count` rows, starting at `first`, in one block into weights, and updates maxima, totals and
// sums. WHOLE: the rows see all keys of the block; else those from room.from to room.upto. At most LANES rows.
template <bool WHOLE>
void weigh(Room& room, const Problem& problem, long first, long count, long block, Sums sums, long padded) {
  constexpr int VECTORS = BLOCK / LANES;
  float scale = problem.softcap > 0 ? problem.scale : problem.scale * LOG2E;
  Vec high[LANES], numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = i;
  for (long i = 0; i < LANES; i++) high[i] = fill(-INFINITY);
  for (long i = 0; i < count; i++) {
    float* scores = room.scores + (first + i) * BLOCK;
    Vec from = fill((float)(room.from[first + i] - block)), upto = fill((float)(room.upto[first + i] - block));
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      Vec v = read<Vec>(scores + j * LANES);
      if (problem.layout.int8) v *= read<Vec>(room.key_scales + j * LANES);
      v *= scale;
      if (problem.softcap > 0)
        v = capped(v, problem.softcap) * LOG2E;
      if (problem.slopes)
        v = fma(numbers + (float)(block + j * LANES - room.position[first + i]), fill(room.slope[first + i]), v);
      if (!WHOLE) {
        Vec at = numbers + (float)(j * LANES);
        v = (at >= from) & (at < upto) ? v : fill(-INFINITY);
      }
      high[i] = larger(v, high[i]);
      put(scores + j * LANES, v);
    }
  }
  Vec old = load(sums.most + first, count), now = larger(largest_of_each(high), old);
  Vec factors = old == now ? fill(1.f) : power(old - now);
  store(sums.most + first, now, count);
  for (long i = 0; i < count; i++) {
    float most = sums.most[first + i], factor = factors[i];
    const float* scores = room.scores + (first + i) * BLOCK;
    bf16* weights = room.weights + (first + i) * BLOCK;
    if (!WHOLE && most == -INFINITY) {  // no visible key yet
      memset(weights, 0, BLOCK * sizeof(bf16));
      continue;
    }
    Vec total = {};
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      Vec v = read<Vec>(scores + j * LANES), weight = power(v - most);
      Vec scaled = problem.layout.int8 ? weight * read<Vec>(room.value_scales + j * LANES) : weight;
      if (!WHOLE) {
        weight = v == -INFINITY ? Vec{} : weight;
        scaled = v == -INFINITY ? Vec{} : scaled;
      }
      total += weight;
      put(weights + j * LANES, narrow(scaled));
    }
    room.total[first + i] = room.total[first + i] * factor + total;
    if (factor == 1) continue;
    float* out = sums.out + (first + i) * padded;
    for (long d = 0; d < padded; d += LANES) put(out + d, read<Vec>(out + d) * factor);
  }
}

// Sums a task's rows over its keys from `begin` to `end`; `later` has the heads of the pages needed next.
void walk(Room& room, const Problem& problem, const Task& task, long begin, long end, const char* const* later, Sums sums) {
  const Layout& layout = problem.layout;
  long rows = task.rows, pairs = layout.pairs(), wide = layout.wide(), padded = problem.padded();
  long tiles = (rows + TILE - 1) / TILE;
  memset(sums.out, 0, rows * padded * sizeof(float));
  std::fill(sums.most, sums.most + rows, -INFINITY);
  std::fill(room.total, room.total + rows, Vec{});
  const char *heads[PAGES], *next[PAGES];
  auto find = [&](long block, const char** to) {
    for (long i = 0; i < PAGES; i++)
      to[i] = problem.head(*task.span, task.kv_head, std::min(block + i * PAGE, end - 1));
  };
  find(begin, next);
  for (long block = begin; block < end; block += BLOCK) {
    std::copy(next, next + PAGES, heads);
    if (block + BLOCK < end) find(block + BLOCK, next);
    else std::copy(later, later + PAGES, next);
    long pages = std::min(PAGES, (end - block + PAGE - 1) / PAGE);
    const Pair *keys[PAGES], *values[PAGES];
    for (long i = 0; i < pages; i++)
      if (layout.int8) {
        const char *values_at = heads[i] + layout.key_bytes(), *next_at = next[i] + layout.key_bytes();
        const char *key_scales = heads[i] + layout.key_scales(), *value_scales = key_scales + layout.scale_bytes();
        unfold(heads[i], next[i], pairs / 2, PAGE, room.keys + i * pairs * PAGE);
        if (!layout.latent) unfold(values_at, next_at, PAGE / 4, wide, room.values + i * PAGE / 2 * wide);
        memcpy(room.key_scales + i * PAGE, key_scales, PAGE * sizeof(float));
        memcpy(room.value_scales + i * PAGE, layout.latent ? key_scales : value_scales, PAGE * sizeof(float));
        keys[i] = room.keys + i * pairs * PAGE;
        values[i] = room.values + i * PAGE / 2 * wide;
      } else {
        keys[i] = (const Pair*)heads[i];
        values[i] = layout.latent ? room.values + i * PAGE / 2 * wide : (const Pair*)(heads[i] + layout.key_bytes());
      }
    for (long i = 0; layout.latent && i < pages; i++)
      turn(keys[i], layout.value_dim / 2, wide, room.values + i * PAGE / 2 * wide);
    for (long t = 0; t < tiles; t++) {
      long first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
      Multiply run = t || layout.int8 ? choose_rows<false>(count) : choose_rows<true>(count);
      constexpr long VECTORS = PAGE / LANES;  // of a page's keys
      for (long i = 0; i < pages * VECTORS; i += 2) {
        long j = std::min(i + 1, pages * VECTORS - 1);
        Strip strip{keys[i / VECTORS] + i % VECTORS * LANES, keys[j / VECTORS] + j % VECTORS * LANES,
                    (const Pair*)next[i / VECTORS] + i % VECTORS * LANES,
                    (const Pair*)next[j / VECTORS] + j % VECTORS * LANES};
        run(room.queries + first * pairs, pairs, &strip, 1, pairs, PAGE, room.scores + first * BLOCK + i * LANES, BLOCK, true);
      }
      Multiply sum_values = layout.latent ? choose_rows<false>(count) : run;
      bool whole = true;
      for (long r = first; r < first + count; r++) whole &= room.from[r] <= block && room.upto[r] >= block + BLOCK;
      (whole ? weigh<true> : weigh<false>)(room, problem, first, count, block, sums, padded);
      for (long d = 0; d < wide; d += PANEL) {
        long other = d + LANES < wide ? d + LANES : d;
        Strip strips[PAGES];
        for (long i = 0; i < pages; i++) {
          const Pair* at = (const Pair*)(next[i] + layout.key_bytes());
          strips[i] = {values[i] + d, values[i] + other, at + d, at + other};
        }
        sum_values((const Pair*)room.weights + first * BLOCK / 2, BLOCK / 2, strips, pages, PAGE / 2, wide,
            sums.out + first * padded + d, padded, false);
      }
    }
  }
  for (long r = 0; r < rows; r++) sums.total[r] = sum(room.total[r]);
}

// Adds the result of a later segment.
void join(Sums whole, Sums part, long rows, long padded) {
  for (long r = 0; r < rows; r++) {
    if (part.most[r] == -INFINITY) continue;
    float *to = whole.out + r * padded, *from = part.out + r * padded;
    if (whole.most[r] == -INFINITY) {
      std::copy(from, from + padded, to);
      whole.most[r] = part.most[r];
      whole.total[r] = part.total[r];
      continue;
    }
    float now = std::max(whole.most[r], part.most[r]);
    float old = power(whole.most[r] - now), more = power(part.most[r] - now);
    for (long d = 0; d < padded; d += LANES) put(to + d, read<Vec>(to + d) * old + read<Vec>(from + d) * more);
    whole.most[r] = now;
    whole.total[r] = whole.total[r] * old + part.total[r] * more;
  }
}

// Writes the result of rows that have seen all of their keys.
void finish(const Problem& problem, const Task& task, Sums whole) {
  long fold = problem.fold(), left = problem.layout.value_dim, padded = problem.padded();
  for (long r = 0; r < task.rows; r++) {
    long row = task.span->first + (task.row + r) / fold, head = task.kv_head * fold + (task.row + r) % fold;
    float total = whole.total[r], factor = 1;
    if (problem.sinks) {
      float sink = problem.sinks[head] * LOG2E, now = std::max(whole.most[r], sink);
      factor = power(whole.most[r] - now);
      total = total * factor + power(sink - now);
    }
    factor /= total;
    bf16* to = problem.out + (row * problem.heads + head) * left;
    for (long d = 0; d < left; d += LANES) store(to + d, read<Vec>(whole.out + r * padded + d) * factor, left - d);
  }
}

void attend(Room& room, const Problem& problem, const Task& task, const Task& following) {
  const Layout& layout = problem.layout;
  long fold = problem.fold(), pairs = layout.pairs(), padded = problem.padded();
  for (long r = 0; r < task.rows; r++) {
    long token = (task.row + r) / fold, head = task.kv_head * fold + (task.row + r) % fold;
    long position = task.span->length - task.span->count + token;
    Pair* query = room.queries + r * pairs;
    query[pairs - 1] = query[std::max(0l, pairs - 2)] = 0;
    memcpy(query, problem.queries + (task.span->first + token) * problem.stride + head * layout.dim, 2 * layout.dim);
    room.upto[r] = problem.end(*task.span, token);
    room.from[r] = problem.start(position);
    room.position[r] = position;
    room.slope[r] = problem.slopes ? problem.slopes[head] * LOG2E : 0;
  }
  const char* later[PAGES];
  for (long i = 0; i < PAGES; i++)
    later[i] = problem.head(*following.span, following.kv_head, std::min(following.begin + i * PAGE, following.end - 1));
  if (task.sums) return walk(room, problem, task, task.begin, task.end, later, Sums(task.sums, task.rows, padded));
  Sums whole(room.whole, task.rows, padded), part(room.part, task.rows, padded);
  for (long begin = task.begin, end; begin < task.end; begin = end) {
    end = std::min(task.end, begin / SEGMENT * SEGMENT + SEGMENT);
    bool first = begin == task.begin;
    walk(room, problem, task, begin, end, later, first ? whole : part);
    if (!first) join(whole, part, task.rows, padded);
  }
  finish(problem, task, whole);
}

// The tasks of each head for all spans, longest first. A unit long enough to delay the others is divided into segments.
struct Cut {
  std::vector<Task> tasks;
  std::vector<std::pair<size_t, size_t>> joined;  // tasks of each divided unit: the first and the one after the last
  std::vector<float> sums;
  long work = 0;

  Cut(const Problem& problem, const Span* spans, long count, long threads) {
    std::vector<Task> units;
    long fold = problem.fold(), heads = problem.layout.heads, padded = problem.padded();
    for (const Span* span = spans; span < spans + count; span++)
      for (long row = 0; row < span->count * fold; row += UNIT) {
        long rows = std::min(UNIT, span->count * fold - row), past = span->length - span->count;
        long last = (row + rows - 1) / fold, end = problem.end(*span, last);
        for (long token = row / fold; problem.ends && token < last; token++) end = std::max(end, problem.end(*span, token));
        long begin = problem.start(past + row / fold);
        units.push_back({span, 0, row, rows, begin / BLOCK * BLOCK, end, nullptr});
        work += cost(units.back()) * heads;
      }
    std::stable_sort(units.begin(), units.end(), [](const Task& a, const Task& b) { return cost(a) > cost(b); });
    long room = 0;
    auto split = [&](const Task& unit) {
      return threads > 1 && cost(unit) * threads * 2 > work && unit.begin / SEGMENT != (unit.end - 1) / SEGMENT;
    };
    auto segments = [](const Task& unit) { return (unit.end - 1) / SEGMENT - unit.begin / SEGMENT + 1; };
    for (const Task& unit : units)
      if (split(unit)) room += heads * segments(unit) * Sums::size(unit.rows, padded);
    sums.resize(room);
    float* place = sums.data();
    for (Task unit : units)
      for (unit.kv_head = 0; unit.kv_head < heads; unit.kv_head++) {
        if (!split(unit)) {
          tasks.push_back(unit);
          continue;
        }
        joined.emplace_back(tasks.size(), tasks.size() + segments(unit));
        for (Task part = unit; part.begin < unit.end; part.begin = part.end, place += Sums::size(unit.rows, padded)) {
          part.end = std::min(unit.end, part.begin / SEGMENT * SEGMENT + SEGMENT);
          part.sums = place;
          tasks.push_back(part);
        }
      }
    work *= problem.layout.dim + problem.layout.value_dim;
  }

  static long cost(const Task& task) { return (task.rows + 4) * (task.end - task.begin); }
};

}  // namespace

extern "C" {

// The largest dim of keys and values; and the bytes of a page.
int64_t attend_dim() { return MAX_DIM; }
int64_t page_bytes(int64_t heads, int64_t dim, int64_t value_dim, int64_t int8, int64_t latent) {
  return Layout{heads, dim, value_dim, int8 != 0, latent != 0}.page_bytes();
}

// out [T, heads, value_dim] = attention of queries [T, heads, dim] over the pages. sinks [heads] and slopes [heads] may be
// null; window, chunk and softcap are 0 for none. A slope times the distance of a key, which is negative, is added to its
// score. ends [T]: the position after the last one that a row sees, which is its own or a later one of its span; null: its
// own. `latent`: a value is the beginning of its key, and value_dim is even.
void attend(const bf16* queries, int64_t stride, const char* pages, bf16* out, const int64_t* spans, int64_t count,
            const int64_t* table, const float* sinks, const float* slopes, const int64_t* ends, int64_t heads, int64_t kv_heads,
            int64_t dim, int64_t value_dim, int64_t int8, int64_t latent, int64_t window, int64_t chunk, float scale,
            float softcap, int64_t threads) {
  Layout layout{kv_heads, dim, value_dim, int8 != 0, latent != 0};
  Problem problem{queries, stride, pages, out, table, sinks, slopes, ends, layout, heads, window, chunk, scale, softcap};
  Cut cut(problem, (const Span*)spans, count, threads);
  long tasks = cut.tasks.size();
  std::atomic<long> taken{0};
  together(cut.work < SMALL ? 1 : threads, [&] {
    static thread_local Room room;
    for (long task = taken++, next; task < tasks; task = next) {
      next = taken++;
      attend(room, problem, cut.tasks[task], cut.tasks[next < tasks ? next : task]);
    }
#pragma omp barrier
#pragma omp for
    for (size_t i = 0; i < cut.joined.size(); i++) {
      auto [first, last] = cut.joined[i];
      const Task& task = cut.tasks[first];
      Sums whole(task.sums, task.rows, problem.padded());
      for (size_t part = first + 1; part < last; part++)
        join(whole, Sums(cut.tasks[part].sums, task.rows, problem.padded()), task.rows, problem.padded());
      finish(problem, task, whole);
    }
  });
}

}  // extern "C"
