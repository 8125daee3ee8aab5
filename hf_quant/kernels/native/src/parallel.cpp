#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace hfq {

namespace {

constexpr int kMaxShares = 64;

// Tasks of one thread, in lines of their own.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Tasks {
  Share shares[kMaxShares];
  int num_shares;
  std::atomic<int> others{0};  // threads but the caller that have come so far
  std::thread::id caller;
  void (*body)(void*, int64_t);
  void* context;
};

// A thread does its share, one task behind the other, so that what a task brings into the caches ahead of itself is for
// the same thread; then what is left of the others'. A team of any size does all of them.
void work(void* data) {
  Tasks* tasks = static_cast<Tasks*>(data);
  const bool is_caller = std::this_thread::get_id() == tasks->caller;
  const int own = is_caller ? 0 : 1 + tasks->others.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < tasks->num_shares; ++i) {
    Share& share = tasks->shares[(own + i) % tasks->num_shares];
    for (;;) {
      const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= share.end) break;
      tasks->body(tasks->context, task);
    }
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
  tasks.num_shares = threads < kMaxShares ? threads : kMaxShares;
  for (int64_t i = 0; i < tasks.num_shares; ++i) {
    tasks.shares[i].next.store(count * i / tasks.num_shares, std::memory_order_relaxed);
    tasks.shares[i].end = count * (i + 1) / tasks.num_shares;
  }
  tasks.caller = std::this_thread::get_id();
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
