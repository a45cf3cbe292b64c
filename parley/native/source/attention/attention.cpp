// Causal attention of query rows over pages of keys and values: decode, prefill chunks, and mixtures of both. Rows may
// also see later tokens of their sequence, such as those of the same picture.
//
// Work is divided into units: a number of query rows (token and head) of one sequence that share keys. A unit walks its
// keys in blocks of absolute positions with a running maximum, and combines the results of segments of absolute
// positions from first to last. So the terms and order of a row's sums depend only on the row: a block or segment that
// is hidden from it changes nothing, and neither does the thread that walks a segment, or the time.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "../kernels.h"
#include "../shares.h"
#include "walk.h"

namespace {

constexpr long SEGMENT = 1024;   // keys walked by one thread
constexpr long SMALL = 1 << 17;  // multiplications below which a second thread costs more than it gains

// Adds the result of a later segment.
void join(Sums whole, Sums part) {
  for (long r = 0; r < whole.rows; r++) {
    if (part.most[r] == -INFINITY) continue;
    const float* from = part.out;
    float* to = whole.out;
    if (whole.most[r] == -INFINITY) {
      whole.each(r, [=](float* at, long) { put(at, read<Vec>(from + (at - to))); });
      whole.most[r] = part.most[r];
      whole.total[r] = part.total[r];
      continue;
    }
    float now = std::max(whole.most[r], part.most[r]);
    float old = power(whole.most[r] - now), more = power(part.most[r] - now);
    whole.each(r, [=](float* at, long) { put(at, read<Vec>(at) * old + read<Vec>(from + (at - to)) * more); });
    whole.most[r] = now;
    whole.total[r] = whole.total[r] * old + part.total[r] * more;
  }
}

// Writes the result of rows that have seen all of their keys.
void finish(const Problem& problem, const Task& task, Sums whole) {
  long fold = problem.fold(), left = problem.layout.value_dim;
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
    whole.each(r, [=](float* at, long d) {
      if (d < left) store(to + d, read<Vec>(at) * factor, left - d);
    });
  }
}

void attend(Room& room, const Problem& problem, const Task& task, const Task& following) {
  const Layout& layout = problem.layout;
  long fold = problem.fold(), pairs = layout.pairs(), padded = problem.padded();
  for (long r = 0; r < task.rows; r++) {
    long token = (task.row + r) / fold, head = task.kv_head * fold + (task.row + r) % fold;
    long position = task.span->length - task.span->count + token;
    Pair query[MAX_DIM / 2];
    query[pairs - 1] = query[std::max(0l, pairs - 2)] = 0;
    memcpy(query, problem.queries + (task.span->first + token) * problem.stride + head * layout.dim, 2 * layout.dim);
    spread<float>(query, pairs, room.queries + r * pairs * Room::WORDS);
    room.upto[r] = problem.end(*task.span, token);
    room.position[r] = position;
    room.from[r] = problem.start(position);
    room.slope[r] = problem.slopes ? problem.slopes[head] : 0;
  }
  const char* later[PAGES];
  for (long i = 0; i < PAGES; i++)
    later[i] = problem.head(*following.span, following.kv_head, std::min(following.begin + i * PAGE, following.end - 1));
  if (task.sums) return Walk(room, problem, task, Sums(task.sums, task.rows, padded)).run(task.begin, task.end, later);
  Sums whole(room.whole, task.rows, padded), part(room.part, task.rows, padded);
  for (long begin = task.begin, end; begin < task.end; begin = end) {
    end = std::min(task.end, begin / SEGMENT * SEGMENT + SEGMENT);
    bool first = begin == task.begin;
    Walk(room, problem, task, first ? whole : part).run(begin, end, later);
    if (!first) join(whole, part);
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
        join(whole, Sums(cut.tasks[part].sums, task.rows, problem.padded()));
      finish(problem, task, whole);
    }
  });
}

}  // extern "C"
