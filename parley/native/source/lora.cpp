// Low-rank adapters (LoRA, arXiv 2106.09685): y += B (scale * A x), for each row that has an adapter. Multiplying by A
// is called shrink, by B expand.
//
// Weights are bf16 and sums fp32. An inner number is the sum of CHAINS chains over x, one SIMD lane each, which are
// added in a fixed order and rounded to bf16. An output is one lane's chain over the inner numbers, added to the value
// that is there. So a row depends only on itself and its adapter. Each adapter's weights are read once for all of its
// rows, in memory order. Adapters that divide evenly among the threads are computed by one thread each, without
// waiting.
#include <omp.h>

#include <algorithm>
#include <climits>

#include "kernels.h"
#include "lora.h"
#include "threads.h"

namespace {

constexpr int TILE_ROWS = LANES == 16 ? 6 : 2;  // rows whose sums, four registers each, stay in registers
constexpr int CHAINS = 4;                       // independent sums of one number
constexpr int EXPAND_VECTORS = 4, EXPAND_BLOCK = EXPAND_VECTORS * LANES;  // registers of outputs at once
constexpr long PREFETCH_DISTANCE = 8192;                                  // prefetch distance of weights, in bytes
constexpr long FIRST_PREFETCH = 4096;                                     // bytes prefetched at the start of an adapter
constexpr long SERIAL_WORK = 1 << 16;  // weights times rows below which a second thread costs more than it gains

// inner = scales * (a x), for COUNT rows and one register of columns
template <int COUNT>
void shrink_rows(const bf16* x, long width, const int64_t* rows, const bf16* down, long steps, const float* scales,
                 bf16* inner, long columns) {
  Vec acc[COUNT][CHAINS];
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; r++)
    for (int chain = 0; chain < CHAINS; chain++) acc[r][chain] = Vec{};
  const Pair *from[COUNT], *w = (const Pair*)down;
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; r++) from[r] = (const Pair*)(x + rows[r] * width);
  long whole = steps / CHAINS * CHAINS;
  for (long k = 0; k < whole; k += CHAINS)
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++) {
      const Pair* at = w + (k + chain) * LANES;
      __builtin_prefetch((const char*)at + PREFETCH_DISTANCE);
      Bits each = load<Bits>(at);
#pragma GCC unroll 8
      for (int r = 0; r < COUNT; r++) acc[r][chain] = dot(acc[r][chain], broadcast(from[r][k + chain]), each);
    }
#pragma GCC unroll 4
  for (int chain = 0; chain < CHAINS - 1; chain++) {
    if (whole + chain >= steps) break;
    Bits each = load<Bits>(w + (whole + chain) * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++) acc[r][chain] = dot(acc[r][chain], broadcast(from[r][whole + chain]), each);
  }
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; r++) {
    Vec total = (acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]);
    store(inner + r * columns, total * load<Vec>(scales), LANES);
  }
}

// y += b inner, for COUNT rows and a block of REGISTERS registers of outputs, starting at n
template <int COUNT, int REGISTERS>
void expand_rows(const bf16* inner, long columns, const Part& part, long n, bf16* y, long width, const int64_t* rows) {
  const Pair *w = (const Pair*)part.up + n * part.pairs, *from = (const Pair*)(inner + part.column);
  Vec acc[COUNT][REGISTERS];
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; r++)
    for (int i = 0; i < REGISTERS; i++) acc[r][i] = Vec{};
  for (long k = 0; k < part.pairs; k++, w += REGISTERS * LANES)
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; i++) {
      __builtin_prefetch((const char*)(w + i * LANES) + PREFETCH_DISTANCE);
      Bits each = load<Bits>(w + i * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < COUNT; r++) acc[r][i] = dot(acc[r][i], broadcast(from[r * columns / 2 + k]), each);
    }
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; r++) {
    bf16* to = y + rows[r] * width + part.first + n;
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; i++) {
      long left = part.out_features - n - i * LANES;
      store(to + i * LANES, load(to + i * LANES, left) + acc[r][i], left);
    }
  }
}

using ShrinkFunction = void (*)(const bf16*, long, const int64_t*, const bf16*, long, const float*, bf16*, long);
using ExpandFunction = void (*)(const bf16*, long, const Part&, long, bf16*, long, const int64_t*);

template <int COUNT = TILE_ROWS> ShrinkFunction choose_shrink(long rows) {
  if constexpr (COUNT > 1)
    if (rows < COUNT) return choose_shrink<COUNT - 1>(rows);
  return shrink_rows<COUNT>;
}

template <int REGISTERS, int COUNT = TILE_ROWS> ExpandFunction choose_expand(long rows) {
  if constexpr (COUNT > 1)
    if (rows < COUNT) return choose_expand<REGISTERS, COUNT - 1>(rows);
  return expand_rows<COUNT, REGISTERS>;
}

ExpandFunction choose_expand(long rows, long outputs) {
  switch ((outputs + LANES - 1) / LANES) {
    case 1: return choose_expand<1>(rows);
    case 2: return choose_expand<2>(rows);
    case 3: return choose_expand<3>(rows);
    default: return choose_expand<EXPAND_VECTORS>(rows);
  }
}

struct Range {
  long first, end;
};

// One thread's share of many tasks, which are in the memory order of their weights.
class TaskRange {
  long first = 0, end = LONG_MAX, passed = 0;

 public:
  TaskRange() = default;  // all tasks
  TaskRange(long tasks, long me, long team) : first(tasks * me / team), end(tasks * (me + 1) / team) {}

  // This thread's part of the next `count` tasks
  Range next(long count) {
    Range mine = {std::clamp(first - passed, 0L, count), std::clamp(end - passed, 0L, count)};
    passed += count;
    return mine;
  }
};

// The adapters' additions in one linear layer.
struct Site {
  const Adapted& all;
  long site;
  const bf16* x;
  bf16 *y, *inner;
  long in_features, out_features;

  const Lora& lora(long i) const { return all.adapters[i][site]; }
  long begin(long i) const { return i ? all.ends[i - 1] : 0; }
  long rows(long i) const { return all.ends[i] - begin(i); }
  long groups(long i) const { return (rows(i) + TILE_ROWS - 1) / TILE_ROWS; }

  static long blocks(const Part& part) { return (part.out_features + EXPAND_BLOCK - 1) / EXPAND_BLOCK; }

  long shrink_tasks(long i) const { return lora(i).columns / LANES * groups(i); }
  long expand_tasks(long i) const {
    long count = 0;
    for (long p = 0; p < lora(i).parts; p++) count += blocks(lora(i).part[p]);
    return count * groups(i);
  }

  void shrink(long i, TaskRange& mine) const {
    Range tasks = mine.next(shrink_tasks(i));
    for (long task = tasks.first; task < tasks.end; task++) {
      long column = task / groups(i) * LANES, first = begin(i) + task % groups(i) * TILE_ROWS;
      auto run = choose_shrink(std::min<long>(TILE_ROWS, all.ends[i] - first));
      run(x, in_features, all.rows + first, lora(i).down + column * in_features, in_features / 2,
          lora(i).scales + column, inner + first * all.columns + column, all.columns);
    }
  }

  void expand(long i, TaskRange& mine) const {
    for (const Part* part = lora(i).part; part < lora(i).part + lora(i).parts; part++) {
      Range tasks = mine.next(blocks(*part) * groups(i));
      for (long task = tasks.first; task < tasks.end; task++) {
        long n = task / groups(i) * EXPAND_BLOCK, first = begin(i) + task % groups(i) * TILE_ROWS;
        auto run = choose_expand(std::min<long>(TILE_ROWS, all.ends[i] - first), part->out_features - n);
        run(inner + first * all.columns, all.columns, *part, n, y, out_features, all.rows + first);
      }
    }
  }

  // The number of adapters that divide evenly at one thread each. With few rows, all take the time to read their
  // weights.
  long alone(long team) const {
    for (long i = 0; i < all.count; i++)
      if (rows(i) > TILE_ROWS || lora(i).columns != lora(0).columns) return team == 1 ? all.count : 0;
    return all.count / team * team;
  }

  // Prefetches the first weights of an adapter.
  void prefetch_weights(long i) const {
    if (i < all.count)
      for (long at = 0; at < FIRST_PREFETCH; at += 64) __builtin_prefetch((const char*)lora(i).down + at);
  }
};

}  // namespace

extern "C" {

int64_t lora_lanes() { return LANES; }

// w [N, K] -> [N / block, rounded up][(K + 1) / 2][block] pairs, zero-padded beyond K; the last block is only N wide,
// rounded up to LANES. `block` is LANES for the first matrix, lora_block() for the second.
void lora_pack(const bf16* w, bf16* packed, int64_t N, int64_t K, int64_t block) {
  long steps = (K + 1) / 2, full = (N + LANES - 1) / LANES * LANES;
  for (long n = 0; n < full; n++) {
    long first = n / block * block, wide = std::min<long>(block, full - first);
    for (long k = 0; k < 2 * steps; k++)
      packed[(first * steps + k / 2 * wide + n - first) * 2 + k % 2] = n < N && k < K ? w[n * K + k] : 0;
  }
}

int64_t lora_block() { return EXPAND_BLOCK; }

// y [M, out_features] += the adapters' products with x [M, in_features] in linear layer `site`. `in_features` is even.
// inner: memory for `adapted.columns` numbers per row that has an adapter.
void lora(const bf16* x, bf16* y, int64_t in_features, int64_t out_features, const Adapted* adapted, int64_t site,
          bf16* inner, int64_t threads) {
  Site here{*adapted, site, x, y, inner, in_features, out_features};
  long count = adapted->count, work = 0;
  for (long i = 0; i < count; i++) work += here.lora(i).columns * (in_features + out_features) * here.rows(i);
  if (!work) return;
  run_parallel(work < SERIAL_WORK ? 1 : threads, [=] {
    long me = omp_get_thread_num(), team = omp_get_num_threads(), alone = here.alone(team);
    for (long i = alone * me / team; i < alone * (me + 1) / team; i++) {
      TaskRange every;
      here.shrink(i, every);
      here.prefetch_weights(i + 1);
      every = {};
      here.expand(i, every);
    }
    if (alone == count) return;
    long numbers = 0, outputs = 0;
    for (long i = alone; i < count; i++) numbers += here.shrink_tasks(i), outputs += here.expand_tasks(i);
    TaskRange mine(numbers, me, team);
    for (long i = alone; i < count; i++) here.shrink(i, mine);
#pragma omp barrier
    mine = {outputs, me, team};
    for (long i = alone; i < count; i++) here.expand(i, mine);
  });
}

}  // extern "C"
