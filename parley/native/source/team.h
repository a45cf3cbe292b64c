// Starts the threads of a kernel.
#pragma once

// Calls f() on each of `threads` threads. A single thread calls it directly: a team of one costs as much as a short
// row.
//
// Each kernel has its own team. One team for all kernels of a step would halve the cost of starting it (about a
// microsecond for two threads), but the threads would also wait for each other after small kernels, which one thread
// computes alone.
template <class F> void together(long threads, F f) {
  if (threads == 1) return f();
#pragma omp parallel num_threads(threads)
  f();
}
