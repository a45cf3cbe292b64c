// Causal attention of query rows over pages of keys and values: decodes, prefill chunks, and both in one batch. Rows
// may also attend to later tokens of their sequence, such as those of the same image.
//
// Work is divided into units: up to UNIT_ROWS query rows (token and head) of one sequence that share a KV head. A unit
// reads its keys in blocks of absolute positions with an online softmax (flash_attention.h). If one unit would delay
// the others, its keys are split into segments of SEGMENT_KEYS, as in flash decoding; a unit that is not split computes
// the same segments, and merges their partial results from first to last. Small units of several KV heads, as in
// decodes, are one task. So the terms and order of a row's sums depend only on the row: a block or segment that is
// hidden from it changes nothing, and neither do the other heads of its task, the thread, or the time.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "../kernels.h"
#include "../threads.h"
#include "flash_attention.h"

namespace {

constexpr long SEGMENT_KEYS = 1024;    // keys whose partial result is computed at once
constexpr long SERIAL_WORK = 1 << 17;  // multiplications below which a second thread costs more than it gains

// Merges the partial result of a later segment into that of the earlier ones.
void merge(PartialResult whole, PartialResult part) {
  for (long r = 0; r < whole.rows; r++) {
    if (part.total[r] == 0) continue;  // the row sees none of its keys; where they are NaN, so is the total
    const float* from = part.out;
    float* to = whole.out;
    if (whole.total[r] == 0) {
      whole.each(r, [=](float* at, long) { store(at, load<Vec>(from + (at - to))); });
      whole.reference[r] = part.reference[r];
      whole.total[r] = part.total[r];
      continue;
    }
    float now = std::max(whole.reference[r], part.reference[r]);
    float old = pow2(whole.reference[r] - now), more = pow2(part.reference[r] - now);
    whole.each(r, [=](float* at, long) { store(at, load<Vec>(at) * old + load<Vec>(from + (at - to)) * more); });
    whole.reference[r] = now;
    whole.total[r] = whole.total[r] * old + part.total[r] * more;
  }
}

// Writes the result of rows whose keys have all been processed.
void write_result(const Problem& problem, const Task& task, PartialResult whole) {
  long left = problem.layout.value_dim;
  for (long r = 0; r < task.all_rows(); r++) {
    auto [token, head] = token_and_head(problem, task, r);
    long row = task.span->first + token;
    float total = whole.total[r], factor = 1;
    if (problem.sinks) {
      float sink = problem.sinks[head] * LOG2E, now = std::max(whole.reference[r], sink);
      factor = pow2(whole.reference[r] - now);
      total = total * factor + pow2(sink - now);
    }
    factor /= total;
    bf16* to = problem.out + (row * problem.heads + head) * left;
    whole.each(r, [=](float* at, long d) {
      if (d < left) store(to + d, load<Vec>(at) * factor, left - d);
    });
  }
}

void attend(Workspace& workspace, const Problem& problem, const Task& task, const Task& following) {
  const PageLayout& layout = problem.layout;
  long pairs = layout.pairs(), padded = problem.padded(), rows = task.all_rows();
  for (long r = 0; r < rows; r++) {
    auto [token, head] = token_and_head(problem, task, r);
    long position = task.span->length - task.span->count + token;
    Pair query[MAX_DIM / 2];
    query[pairs - 1] = query[std::max(0l, pairs - 2)] = 0;
    memcpy(query, problem.queries + (task.span->first + token) * problem.stride + head * layout.dim, 2 * layout.dim);
    expand<float>(query, pairs, workspace.queries + r * pairs * Workspace::WORDS);
    workspace.key_end[r] = problem.end(*task.span, token);
    workspace.position[r] = position;
    workspace.key_begin[r] = problem.start(position);
    workspace.slope[r] = problem.slopes ? problem.slopes[head] : 0;
  }
  if (task.partial)
    return FlashAttention(workspace, problem, task, PartialResult(task.partial, rows, padded))
        .run(task.begin, task.end, following, following.begin);
  PartialResult whole(workspace.whole, rows, padded), part(workspace.part, rows, padded);
  for (long begin = task.begin, end; begin < task.end; begin = end) {
    end = std::min(task.end, begin / SEGMENT_KEYS * SEGMENT_KEYS + SEGMENT_KEYS);
    bool first = begin == task.begin;
    FlashAttention attention(workspace, problem, task, first ? whole : part);
    end < task.end ? attention.run(begin, end, task, end) : attention.run(begin, end, following, following.begin);
    if (!first) merge(whole, part);
  }
  write_result(problem, task, whole);
}

// The tasks of each head for all spans, longest first. A unit long enough to delay the others is divided into segments.
struct TaskPlan {
  std::vector<Task> tasks;
  std::vector<std::pair<size_t, size_t>> divided;  // tasks of each divided unit: the first and the one after the last
  std::vector<float> partials;
  long work = 0;

  TaskPlan(const Problem& problem, const Span* spans, long count, long threads) {
    std::vector<Task> units;
    long group = problem.queries_per_kv_head(), heads = problem.layout.heads, padded = problem.padded();
    for (const Span* span = spans; span < spans + count; span++)
      for (long row = 0; row < span->count * group; row += UNIT_ROWS) {
        long rows = std::min(UNIT_ROWS, span->count * group - row), past = span->length - span->count;
        long last = (row + rows - 1) / group, end = problem.end(*span, last);
        for (long token = row / group; problem.visible_ends && token < last; token++)
          end = std::max(end, problem.end(*span, token));
        long begin = problem.start(past + row / group);
        units.push_back({span, 0, 1, row, rows, begin / KEY_BLOCK * KEY_BLOCK, end, nullptr});
        work += cost(units.back()) * heads;
      }
    std::stable_sort(units.begin(), units.end(), [](const Task& a, const Task& b) { return cost(a) > cost(b); });
    long floats = 0;
    auto split = [&](const Task& unit) {
      return threads > 1 && cost(unit) * threads * 2 > work &&
             unit.begin / SEGMENT_KEYS != (unit.end - 1) / SEGMENT_KEYS;
    };
    auto segments = [](const Task& unit) { return (unit.end - 1) / SEGMENT_KEYS - unit.begin / SEGMENT_KEYS + 1; };
    // The number of KV heads of a task: as many as fit the workspace, but few enough for two tasks per thread or more.
    auto count_heads = [&](const Task& unit) {
      long cost_of_head = cost(unit) / (split(unit) ? segments(unit) : 1);
      long count = std::min(heads, UNIT_ROWS / unit.rows);
      while (count > 1 && (heads % count || (threads > 1 && cost_of_head * count * threads * 2 > work))) count--;
      return count;
    };
    for (const Task& unit : units)
      if (split(unit)) floats += heads * segments(unit) * PartialResult::size(unit.rows, padded);
    partials.resize(floats);
    float* place = partials.data();
    for (Task unit : units) {
      unit.kv_heads = count_heads(unit);
      for (unit.kv_head = 0; unit.kv_head < heads; unit.kv_head += unit.kv_heads) {
        if (!split(unit)) {
          tasks.push_back(unit);
          continue;
        }
        divided.emplace_back(tasks.size(), tasks.size() + segments(unit));
        for (Task part = unit; part.begin < unit.end;
             part.begin = part.end, place += PartialResult::size(unit.all_rows(), padded)) {
          part.end = std::min(unit.end, part.begin / SEGMENT_KEYS * SEGMENT_KEYS + SEGMENT_KEYS);
          part.partial = place;
          tasks.push_back(part);
        }
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
  return PageLayout{heads, dim, value_dim, int8 != 0, latent != 0}.page_bytes();
}

// out [T, heads, value_dim] = attention of queries [T, heads, dim] over the pages. sinks [heads] and slopes [heads] may
// be null; window, chunk and softcap are 0 for none. A slope times the distance of a key, which is negative, is added
// to its score. visible_ends [T]: the position after the last one that a row sees, which is its own or a later one of
// its span; null: its own. `latent`: a value is the beginning of its key, and value_dim is even.
void attend(const bf16* queries, int64_t stride, const char* pages, bf16* out, const int64_t* spans, int64_t count,
            const int64_t* table, const float* sinks, const float* slopes, const int64_t* visible_ends, int64_t heads,
            int64_t kv_heads, int64_t dim, int64_t value_dim, int64_t int8, int64_t latent, int64_t window,
            int64_t chunk, float scale, float softcap, int64_t threads) {
  PageLayout layout{kv_heads, dim, value_dim, int8 != 0, latent != 0};
  Problem problem{queries,      stride, pages, out,    table, sinks, slopes,
                  visible_ends, layout, heads, window, chunk, scale, softcap};
  TaskPlan plan(problem, (const Span*)spans, count, threads);
  long tasks = plan.tasks.size();
  std::atomic<long> taken{0};
  run_parallel(plan.work < SERIAL_WORK ? 1 : threads, [&] {
    static thread_local Workspace workspace;
    for (long task = taken++, next; task < tasks; task = next) {
      next = taken++;
      attend(workspace, problem, plan.tasks[task], plan.tasks[next < tasks ? next : task]);
    }
#pragma omp barrier
#pragma omp for
    for (size_t i = 0; i < plan.divided.size(); i++) {
      auto [first, last] = plan.divided[i];
      const Task& task = plan.tasks[first];
      long rows = task.all_rows();
      PartialResult whole(task.partial, rows, problem.padded());
      for (size_t part = first + 1; part < last; part++)
        merge(whole, PartialResult(plan.tasks[part].partial, rows, problem.padded()));
      write_result(problem, task, whole);
    }
  });
}

}  // extern "C"
