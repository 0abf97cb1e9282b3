// The inner loop of everything that multiplies matrices: a few rows times a panel of columns.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "vector.h"

namespace rose {

constexpr int kVecs = kLanes == 4 && kRegisters == 32 ? 4 : 2;  // vectors of a panel's width
constexpr int kWidth = kVecs * kLanes;
constexpr int kRows = std::min(13, (kRegisters - kVecs - 2) / kVecs);  // whose sums fit in registers
constexpr int kAhead = 512 / kWidth;  // steps of k to prefetch ahead

// Cost of one thread's work, roughly; see `parallel`.
constexpr double kNsPerFma = 0.02, kNsPerByte = 0.05, kNsPerCode = 0.1;

// Ways in which the columns of a panel are stored; `next` gives those of one k after another. What is
// narrower than float is widened exactly.

struct Floats {
  const float* at;
  int64_t stride = kWidth;

  void next(int64_t, Vec (&column)[kVecs]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) column[v] = load(at + v * kLanes);
    // Machines see by themselves where several cache lines a step lead, and fetch them better.
    if constexpr (kWidth * sizeof(float) <= 64) __builtin_prefetch(at + kAhead * stride);
    at += stride;
  }

  float one(int64_t k, int64_t column) const { return at[k * stride + column]; }
};

// One k of a panel's columns as Halves stores them.
inline void load_halves(const uint16_t* at, Vec (&column)[kVecs]) {
#pragma GCC unroll 2
  for (int v = 0; v < kVecs; v += 2) {
    const VecInt both = (VecInt)load(reinterpret_cast<const float*>(at + v * kLanes));
    column[v] = (Vec)(both << 16);
    column[v + 1] = (Vec)(both & static_cast<int32_t>(0xffff0000));
  }
}

// The upper halves of floats whose lower halves are zero: bfloat16. Those of two neighbouring vectors
// alternate, so that a shift and a mask take them apart.
struct Halves {
  const uint16_t* at;

  static int64_t place(int64_t column) {
    const int64_t pair = column / (2 * kLanes), rest = column % (2 * kLanes);
    return pair * 2 * kLanes + rest % kLanes * 2 + rest / kLanes;
  }

  void next(int64_t, Vec (&column)[kVecs]) {
    __builtin_prefetch(at + 2 * kAhead * kWidth);
    load_halves(at, column);
    at += kWidth;
  }

  float one(int64_t k, int64_t column) const {
    const uint32_t bits = static_cast<uint32_t>(at[k * kWidth + place(column)]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// What sums start from: rows of kWidth floats, one row for all where `stride` is 0, or zeros where `at`
// is null.
struct Start {
  const float* at = nullptr;
  int64_t stride = 0;
};

// R rows, of which every three share a pointer: compilers would keep one for each, more than there are
// registers for.
template <int R, class T>
struct RowPointers {
  const T* shared[(R + 2) / 3];
  int64_t stride;

  RowPointers(const T* x, int64_t stride) : stride(stride) {
#pragma GCC unroll 16
    for (int i = 0; 3 * i < R; ++i) {
      shared[i] = x + 3 * i * stride;
      asm("" : "+r"(shared[i]));  // not to be derived from another one
    }
  }

  const T* at(int row, int64_t k) const { return shared[row / 3] + row % 3 * stride + k; }
};

// y[r][c] = start[r][c] + sum over k of x[r][k] w[k][c] for R rows and kWidth columns. Every sum is one
// chain of fused multiply-adds over k in order, so its bits do not depend on R, nor on where a caller
// that goes on from `y` has cut the chain. Loops over sums are unrolled, or these are not in registers.
template <int R, class Columns>
void multiply(const float* x, int64_t ldx, Columns columns, int64_t inputs, Start start, float* y,
              int64_t ldy) {
  const RowPointers<R, float> rows(x, ldx);
  Vec sums[R][kVecs] = {};
  if (start.at) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] = load(start.at + r * start.stride + v * kLanes);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Vec column[kVecs];
    columns.next(k, column);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = splat(*rows.at(r, k));
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] = value * column[v] + sums[r][v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(y + r * ldy + v * kLanes, sums[r][v]);
}

template <class Columns>
using Multiply = void (*)(const float*, int64_t, Columns, int64_t, Start, float*, int64_t);

template <class Columns, int... R>
constexpr std::array<Multiply<Columns>, sizeof...(R)> multiply_table(
    std::integer_sequence<int, R...>) {
  return {multiply<R + 1, Columns>...};
}

// kMultiply<Columns>[rows - 1] is for that many rows.
template <class Columns>
constexpr auto kMultiply = multiply_table<Columns>(std::make_integer_sequence<int, kRows>());

// Cuts rows, or whatever is counted, into the fewest blocks of at most `most`, which differ by one at
// most.
struct Blocks {
  int64_t rows, count;
  explicit Blocks(int64_t rows, int64_t most = kRows) : rows(rows), count(ceil_div(rows, most)) {}
  int64_t start(int64_t block) const { return rows * block / count; }
};

}  // namespace rose
