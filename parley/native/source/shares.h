// How a team divides tasks that nobody needs in order. It must not know what a task is.
#pragma once
#include <atomic>
#include <memory>

// Each member of a team has a share of the tasks, one after another, because they lie so in memory; who is done with its
// own helps with the others'. Cores do not run equally fast, least of all while other programs use one of them.
class Shares {
  struct alignas(64) Share {  // apart, or their counters would share a cache line
    std::atomic<long> next;
    long end;
  };
  long team;
  std::unique_ptr<Share[]> shares;

 public:
  struct Tasks {
    long first = 0, end = 0;  // end 0: none is left
    bool last = true;         // the end is that of a share
  };

  Shares(long tasks, long team) : team(team), shares(new Share[team]) {
    for (long i = 0; i < team; i++) {
      shares[i].next.store(tasks * i / team, std::memory_order_relaxed);
      shares[i].end = tasks * (i + 1) / team;
    }
  }

  // What member `me` does next: a part of what a share still has, for each taking costs a moment without loads from memory.
  Tasks take(long me) {
    for (long i = 0; i < team; i++) {
      Share& share = shares[(me + i) % team];
      long first = share.next.load(std::memory_order_relaxed);
      while (first < share.end) {
        long end = first + (share.end - first + 7) / 8;
        if (share.next.compare_exchange_weak(first, end, std::memory_order_relaxed)) return {first, end, end == share.end};
      }
    }
    return {};
  }
};
