// Threads that share the tasks of one job at a time with the caller.
#pragma once

#include <cstdint>
#include <functional>

namespace rose {

// Runs task(0) to task(count - 1) on at most `threads` threads, the caller among them, and returns
// when all are done. `nanoseconds` is about what the job takes one thread: it decides whether others
// are worth a hand-off. Tasks must not throw. Any thread may call; callers that find the pool busy do
// their tasks alone.
void parallel(int threads, int64_t count, int64_t nanoseconds, const std::function<void(int64_t)>& task);

}  // namespace rose
