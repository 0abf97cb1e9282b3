// Transposing a square of kLanes vectors in registers.
#pragma once

#include <utility>

#include "vector.h"

namespace rose {

// Lanes of two vectors a and b where blocks of `step` lanes alternate: a0 b0 a2 b2 ... of the even
// blocks, or with `odd` a1 b1 a3 b3 ... of the odd ones.
constexpr int mixed_lane(int lane, int step, bool odd) {
  const int from = odd ? lane | step : lane & ~step;
  return (lane & step) ? kLanes + from : from;
}

template <int Step, bool Odd, int... Lane>
inline Vec mix(Vec a, Vec b, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, mixed_lane(Lane, Step, Odd)...);
#else
  return __builtin_shuffle(a, b, VecInt{mixed_lane(Lane, Step, Odd)...});
#endif
}

template <int Step>
inline void swap_blocks(Vec (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Step) continue;
    const Vec a = rows[i], b = rows[i + Step];
    rows[i] = mix<Step, false>(a, b, lanes);
    rows[i + Step] = mix<Step, true>(a, b, lanes);
  }
}

inline void transpose(Vec (&rows)[kLanes]) {
  swap_blocks<1>(rows);
  swap_blocks<2>(rows);
  if constexpr (kLanes > 4) swap_blocks<4 % kLanes>(rows);
  if constexpr (kLanes > 8) swap_blocks<8 % kLanes>(rows);
}

}  // namespace rose
