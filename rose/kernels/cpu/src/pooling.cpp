// Pooling: one vector per sequence, summed over its own tokens in their order.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "pool.h"
#include "vector.h"

namespace rose {
namespace {

enum Mode : int32_t { kMean, kMeanSqrtLen, kWeightedMean, kMax, kFirst, kLast };

// Adds rows [first, last) of a vector's width of channels; the weight of a row is its place, from 1, in
// the sequence that starts at `start`, where asked for.
template <bool Weighted>
Vec add_rows(const float* x, int64_t channels, int64_t first, int64_t last, int64_t start) {
  Vec sums = {};
  for (int64_t row = first; row < last; ++row) {
    const Vec value = load(x + row * channels);
    if constexpr (Weighted) sums += value * static_cast<float>(row - start + 1);
    else sums += value;
  }
  return sums;
}

// The largest of the rows; NaN where one of them is.
Vec largest_row(const float* x, int64_t channels, int64_t first, int64_t last) {
  Vec most = load(x + first * channels);
  for (int64_t row = first + 1; row < last; ++row) {
    const Vec value = load(x + row * channels);
    most = (value > most) | (value != value) ? value : most;
  }
  return most;
}

// Pools rows [first, last) of the sequence that starts at `start` into y [width].
void pool_rows(const float* x, int64_t channels, int64_t first, int64_t last, int64_t start, Mode mode,
               float* y, int64_t width) {
  const double count = static_cast<double>(last - first), all = static_cast<double>(last - start);
  const double skipped = all - count;
  double divisor = count;
  if (mode == kMeanSqrtLen) divisor = std::sqrt(count);
  if (mode == kWeightedMean) divisor = (all * (all + 1) - skipped * (skipped + 1)) / 2;
  for (int64_t c = 0; c < width; c += kLanes) {
    const int64_t at = std::max<int64_t>(0, std::min(c, channels - kLanes));  // within the row
    Vec out;
    if (mode == kMax) out = largest_row(x + at, channels, first, last);
    else if (mode == kWeightedMean) out = add_rows<true>(x + at, channels, first, last, start);
    else out = add_rows<false>(x + at, channels, first, last, start);
    if (mode != kMax) out = out / static_cast<float>(divisor);
    for (int64_t i = c - at; i < kLanes && at + i < width; ++i) y[at + i] = out[i];
  }
}

}  // namespace
}  // namespace rose

using namespace rose;

extern "C" {

ROSE_API void rose_pool(const float* x, const int32_t* cu_seqlens, const int32_t* starts, int32_t mode,
                        float* y, int64_t sequences, int64_t channels, int64_t width,
                        int32_t threads) {
  const int64_t tokens = sequences ? cu_seqlens[sequences] : 0;
  parallel(threads, sequences, tokens * channels / 4, [&](int64_t s) {
    const int64_t start = cu_seqlens[s], last = cu_seqlens[s + 1];
    const int64_t first = start + (starts ? starts[s] : 0);
    float* out = y + s * width;
    if (first >= last) {
      std::fill(out, out + width, 0.0f);
    } else if (mode == kFirst || mode == kLast) {
      const float* row = x + (mode == kFirst ? first : last - 1) * channels;
      std::copy(row, row + width, out);
    } else {
      pool_rows(x, channels, first, last, start, static_cast<Mode>(mode), out, width);
    }
  });
}

}  // extern "C"
