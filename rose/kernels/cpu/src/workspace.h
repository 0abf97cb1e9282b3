// Memory for what is computed on the way to a result, which a thread keeps from call to call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rose {

// Parts are taken one after another from memory that is as large as was needed once, unless that was
// far more. It lies on huge pages, where the system has them: rows of a matrix are far apart, and on
// small pages nearly each of them costs a miss of the TLB.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(memory_); }

  // Makes room for so many floats. What was taken before is lost.
  void start(int64_t floats) {
    if (size_ < floats || size_ > std::max<int64_t>(8 * floats, kSmall)) {
      std::free(memory_);
      memory_ = nullptr;
      size_ = 0;
      const int64_t bytes = (4 * floats + kHugePage - 1) / kHugePage * kHugePage;
      memory_ = static_cast<float*>(std::aligned_alloc(kHugePage, bytes));
      if (!memory_) throw std::bad_alloc();
#if defined(__linux__)
      madvise(memory_, bytes, MADV_HUGEPAGE);  // a wish: what it answers changes nothing
#endif
      size_ = bytes / 4;
    }
    used_ = 0;
  }

  float* take(int64_t floats) {
    float* start = memory_ + used_;
    used_ += floats;
    return start;
  }

  int64_t used() const { return used_; }
  void give_back(int64_t used) { used_ = used; }

 private:
  static constexpr int64_t kHugePage = 2 << 20, kSmall = 1 << 22;
  float* memory_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

}  // namespace rose
