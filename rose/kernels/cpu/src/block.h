// The inner loop of everything that multiplies matrices: a few rows times a panel of columns.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "vector.h"

namespace rose {

constexpr int kVecs = kLanes == 4 && kRegisters == 32 ? 4 : 2;  // vectors of a panel's width
constexpr int kWidth = kVecs * kLanes;
constexpr int kRows = std::min(12, (kRegisters - kVecs - 2) / kVecs);  // whose sums fit in registers
constexpr int kAhead = 512 / kWidth;  // steps of k to prefetch ahead

// Cost of one thread's work, roughly; see `parallel`.
constexpr double kNsPerFma = 0.02, kNsPerByte = 0.05;

// y[r][c] = sum over k of x[r][k] w[k][c] for R rows and kWidth columns; with `add`, added to y. Every
// sum is one chain of fused multiply-adds over k in order, so its bits do not depend on R, nor on
// where a caller that adds has cut the chain.
template <int R>
void multiply(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t inputs, float* y,
              int64_t ldy, bool add) {
  Vec sums[R][kVecs] = {};
  if (add)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v) sums[r][v] = load(y + r * ldy + v * kLanes);
  for (int64_t k = 0; k < inputs; ++k, w += ldw) {
    Vec column[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      column[v] = load(w + v * kLanes);
      __builtin_prefetch(w + v * kLanes + kAhead * ldw);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = splat(x[r * ldx + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] = value * column[v] + sums[r][v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) store(y + r * ldy + v * kLanes, sums[r][v]);
}

using Multiply = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, bool);

template <int... R>
constexpr std::array<Multiply, sizeof...(R)> multiply_table(std::integer_sequence<int, R...>) {
  return {multiply<R + 1>...};
}

// kMultiply[rows - 1] is for that many rows.
constexpr auto kMultiply = multiply_table(std::make_integer_sequence<int, kRows>());

// Cuts rows into the fewest blocks of at most kRows, which differ by one row at most.
struct Blocks {
  int64_t rows, count;
  explicit Blocks(int64_t rows) : rows(rows), count(ceil_div(rows, kRows)) {}
  int64_t start(int64_t block) const { return rows * block / count; }
};

}  // namespace rose
