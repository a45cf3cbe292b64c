// How a kernel's threads are called together.
#pragma once

// f() by each of some threads; where one is enough, it is just called, for a team of one costs as much as a short row.
//
// Each kernel has a team of its own. One team for all kernels of a step would halve what calling it costs (about a
// microsecond for two threads), but have them wait for each other after the small kernels, too, which one thread does alone.
template <class F> void together(long threads, F f) {
  if (threads == 1) return f();
#pragma omp parallel num_threads(threads)
  f();
}
