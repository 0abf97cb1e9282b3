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
// How long a thread looks for work, or for the end of others' work, before it sleeps. Longer saves
// wake-ups between the layers of a model; on a busy machine it is time taken from those who work.
constexpr auto kIdleSpin = std::chrono::microseconds(100);
constexpr auto kEndSpin = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks for `until` again and again, for a while; returns whether it came true.
template <class Until>
bool spin(std::chrono::microseconds limit, Until until) {
  if (until()) return true;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      pause();
      if (until()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
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
    wait_for_end(count);
  }

 private:
  // Upper half: number of the job. Lower half: tasks that nobody has taken yet.
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<int> helpers_wanted_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t count_ = 0;
  std::mutex owner_, sleep_;
  std::condition_variable wake_, end_;
  int helpers_ = 0;

  static uint64_t left(uint64_t state) { return state & 0xffffffffu; }

  void grow(int helpers) {
    for (; helpers_ < helpers; ++helpers_) std::thread([this, id = helpers_] { help(id); }).detach();
  }

  void publish(int threads, int64_t count, int64_t nanoseconds,
               const std::function<void(int64_t)>& task) {
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
        const int64_t count = count_;
        (*task_)(count - static_cast<int64_t>(left(state)));
        if (done_.fetch_add(1) + 1 == count && caller_sleeps_.load()) {
          std::lock_guard<std::mutex> lock(sleep_);
          end_.notify_one();
        }
        return true;
      }
    }
    return false;
  }

  void wait_for_end(int64_t count) {
    const auto ended = [&] { return done_.load() == count; };
    if (spin(kEndSpin, ended)) return;
    std::unique_lock<std::mutex> lock(sleep_);
    caller_sleeps_.store(true);
    end_.wait(lock, ended);
    caller_sleeps_.store(false);
  }

  void help(int id) {
    const auto wanted = [&] {
      return left(state_.load()) > 0 && id < helpers_wanted_.load(std::memory_order_relaxed);
    };
    for (;;) {
      if (spin(kIdleSpin, wanted)) {
        while (take()) {
        }
        continue;
      }
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1);
      if (!wanted()) wake_.wait(lock);
      sleepers_.fetch_sub(1);
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
