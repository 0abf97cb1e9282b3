// A thread takes a task by lowering the count in `state_`, so nobody waits for a thread that is
// asleep or off its core: the others, the caller first of all, take its share.
#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace rose {
namespace {

constexpr int64_t kAlone = 2000;  // ns; less than this is done by the caller
constexpr int64_t kWake = 20000;  // ns; less than this wakes nobody from sleep
constexpr auto kSpin = std::chrono::microseconds(100);  // how long an idle thread looks for work
constexpr int kYieldAfter = 4096;  // looks at unfinished tasks before the core is offered

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  void run(int threads, int64_t count, int64_t nanoseconds, const std::function<void(int64_t)>& task) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (threads < 2 || count < 2 || nanoseconds < kAlone || !owner) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    grow(threads - 1);
    publish(threads, count, nanoseconds, task);
    while (take()) {
    }
    for (int looks = 0; done_.load(std::memory_order_acquire) < count; ++looks) {
      if (looks < kYieldAfter) pause();
      else std::this_thread::yield();
    }
  }

 private:
  // Upper half: number of the job. Lower half: tasks that nobody has taken yet.
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<int> helpers_wanted_{0};
  std::atomic<int> sleepers_{0};
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t count_ = 0;
  std::mutex owner_, sleep_;
  std::condition_variable wake_;
  int helpers_ = 0;

  static uint64_t left(uint64_t state) { return state & 0xffffffffu; }

  void grow(int helpers) {
    for (; helpers_ < helpers; ++helpers_) std::thread([this, id = helpers_] { help(id); }).detach();
  }

  void publish(int threads, int64_t count, int64_t nanoseconds, const std::function<void(int64_t)>& task) {
    task_ = &task;
    count_ = count;
    helpers_wanted_.store(threads - 1, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(job << 32 | static_cast<uint64_t>(count));
    if (nanoseconds >= kWake && sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
  }

  // Takes and does one task. The job cannot end, nor its fields change, while a task that was taken
  // is not done.
  bool take() {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (left(state) > 0) {
      if (state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
        (*task_)(count_ - static_cast<int64_t>(left(state)));
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  bool wanted(int id) const {
    return left(state_.load()) > 0 && id < helpers_wanted_.load(std::memory_order_relaxed);
  }

  void help(int id) {
    for (auto until = std::chrono::steady_clock::now();;) {
      if (wanted(id)) {
        while (take()) {
        }
        until = std::chrono::steady_clock::now() + kSpin;
      } else if (std::chrono::steady_clock::now() < until) {
        for (int i = 0; i < 16 && !wanted(id); ++i) pause();
      } else {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        if (!wanted(id)) wake_.wait(lock);
        sleepers_.fetch_sub(1);
      }
    }
  }
};

// Never destroyed: its threads run until the process ends.
Pool* pool = new Pool;

// A forked child has none of the threads, and perhaps a mutex that one of them held.
const int kAtFork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

void parallel(int threads, int64_t count, int64_t nanoseconds,
              const std::function<void(int64_t)>& task) {
  pool->run(threads, count, nanoseconds, task);
}

}  // namespace rose
