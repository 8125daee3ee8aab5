// Tasks on threads: by the OpenMP runtime that torch has loaded, so that both share one pool; else by a pool of ours.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hfq {

// GOMP_parallel of the runtime in the process (libgomp, libomp and libiomp5 have it); null if there is none.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
void set_gomp_parallel(GompParallel function);

// Calls body(context, i) for i in 0..count, each once, on up to `threads` threads. The body must not throw.
void run_tasks(int64_t count, int threads, void (*body)(void*, int64_t), void* context);

template <class Body>
void parallel_for(int64_t count, int threads, Body&& body) {
  run_tasks(
      count, threads, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// An uninitialized buffer of this thread's, aligned to 64 bytes, valid until the slot is asked for again; null if
// there is no memory. Slots: 0 for what a call keeps, 1 and 2 for what a task does, 3 for a block of calls.
constexpr int kSlots = 6;
void* thread_scratch(int slot, size_t bytes);

}  // namespace hfq
