#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace hfq {

namespace {

struct Tasks {
  std::atomic<int64_t> next{0};
  int64_t count;
  void (*body)(void*, int64_t);
  void* context;
};

// Threads take the next task when they are free: a team of any size does all of them.
void work(void* data) {
  Tasks* tasks = static_cast<Tasks*>(data);
  for (;;) {
    int64_t i = tasks->next.fetch_add(1, std::memory_order_relaxed);
    if (i >= tasks->count) return;
    tasks->body(tasks->context, i);
  }
}

// Where no OpenMP runtime is found. One call at a time has the helpers; another does its tasks alone.
class Pool {
 public:
  void run(Tasks* tasks, int threads) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (owner.owns_lock()) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        while (static_cast<int>(helpers_) < threads - 1) {
          std::thread([this] { serve(); }).detach();
          ++helpers_;
        }
        tasks_ = tasks;
        wanted_ = threads - 1;
      }
      wake_.notify_all();
    }
    work(tasks);
    if (owner.owns_lock()) {
      std::unique_lock<std::mutex> lock(mutex_);
      wanted_ = 0;
      done_.wait(lock, [this] { return busy_ == 0; });
    }
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++busy_;
      Tasks* tasks = tasks_;
      lock.unlock();
      work(tasks);
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  Tasks* tasks_ = nullptr;
  int wanted_ = 0, busy_ = 0, helpers_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: helpers may still wait when the process ends
  return *instance;
}

GompParallel gomp_parallel = nullptr;

struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;
  ~Buffer() { free(memory); }
};

}  // namespace

void set_gomp_parallel(GompParallel function) { gomp_parallel = function; }

void run_tasks(int64_t count, int threads, void (*body)(void*, int64_t), void* context) {
  if (count <= 0) return;
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  Tasks tasks;
  tasks.count = count;
  tasks.body = body;
  tasks.context = context;
  if (gomp_parallel != nullptr) {
    gomp_parallel(work, &tasks, static_cast<unsigned>(threads), 0);
  } else {
    pool().run(&tasks, threads);
  }
}

void* thread_scratch(int slot, size_t bytes) {
  static thread_local Buffer buffers[kSlots];
  Buffer& buffer = buffers[slot];
  if (buffer.memory == nullptr || buffer.bytes < bytes) {
    free(buffer.memory);
    const size_t size = (bytes / 4096 + 1) * 4096;  // not zero: null means that there is no memory
    buffer.memory = aligned_alloc(4096, size);
    buffer.bytes = buffer.memory == nullptr ? 0 : size;
  }
  return buffer.memory;
}

}  // namespace hfq
