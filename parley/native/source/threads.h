// How the threads of a kernel start, and divide tasks among them when their order does not matter: work stealing. Knows
// nothing about the tasks.
#pragma once
#include <atomic>
#include <memory>

// Calls f() on each of `threads` threads. A single thread calls it directly: a team of one costs as much as a short
// row.
//
// Each kernel has its own team. One team for all kernels of a step would halve the cost of starting it (about a
// microsecond for two threads), but the threads would also wait for each other after small kernels, which one thread
// computes alone.
template <class F> void run_parallel(long threads, F f) {
  if (threads == 1) return f();
#pragma omp parallel num_threads(threads)
  f();
}

// Each thread of a team has a range of consecutive tasks, because they are adjacent in memory. A thread that has
// finished its range takes tasks of other ranges. Cores do not run equally fast, especially while other programs use
// one of them.
class WorkStealing {
  struct alignas(64) ThreadRange {  // aligned, or their counters would share a cache line
    std::atomic<long> next;
    long end;
  };
  long team;
  std::unique_ptr<ThreadRange[]> ranges;

 public:
  struct Tasks {
    long first = 0, end = 0;  // end 0: no task is left
    bool last = true;         // whether `end` is the end of a range
  };

  WorkStealing(long tasks, long team) : team(team), ranges(new ThreadRange[team]) {
    for (long i = 0; i < team; i++) {
      ranges[i].next.store(tasks * i / team, std::memory_order_relaxed);
      ranges[i].end = tasks * (i + 1) / team;
    }
  }

  // Returns the next tasks of thread `me`: a fraction of a range's remainder, because each call costs a moment.
  Tasks next_tasks(long me) {
    for (long i = 0; i < team; i++) {
      ThreadRange& range = ranges[(me + i) % team];
      long first = range.next.load(std::memory_order_relaxed);
      while (first < range.end) {
        long end = first + (range.end - first + 7) / 8;
        if (range.next.compare_exchange_weak(first, end, std::memory_order_relaxed))
          return {first, end, end == range.end};
      }
    }
    return {};
  }
};
