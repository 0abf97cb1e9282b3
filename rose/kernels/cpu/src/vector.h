// Vectors of float by the compilers' vector extensions: one source for AVX-512, AVX2, NEON and SSE2.
//
// Arithmetic is what the operators of C++ say, lane by lane, and -ffp-contract=fast makes one fused
// multiply-add of `a * b + c`. So a lane's bits depend neither on its neighbours nor, where the
// machine has fused multiply-adds, on the width of the vectors.
#pragma once

#include <cstdint>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace rose {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vec load(const float* at) { return *reinterpret_cast<const UnalignedVec*>(at); }
inline void store(float* at, Vec x) { *reinterpret_cast<UnalignedVec*>(at) = x; }
inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, -0 and NaN included
inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
inline Vec vmin(Vec a, Vec b) { return a < b ? a : b; }

// The first `count` lanes from memory, the others `fill`.
inline Vec load_some(const float* at, int64_t count, float fill) {
  Vec x = splat(fill);
  for (int64_t i = 0; i < count; ++i) x[i] = at[i];
  return x;
}

inline void store_some(float* at, Vec x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) at[i] = x[i];
}

// Lane i is lane i ^ Step of x.
template <int Step, int... Lane>
inline Vec exchange(Vec x, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(x, x, (Lane ^ Step)...);
#else
  return __builtin_shuffle(x, VecInt{(Lane ^ Step)...});
#endif
}

// Combines all lanes, in one fixed order for each width.
template <int Step = kLanes / 2, class Combine>
inline float reduce(Vec x, Combine combine) {
  if constexpr (Step == 0) return x[0];
  else return reduce<Step / 2>(
      combine(x, exchange<Step>(x, std::make_integer_sequence<int, kLanes>())), combine);
}

inline float sum(Vec x) {
  return reduce(x, [](Vec a, Vec b) { return a + b; });
}

inline float largest(Vec x) { return reduce(x, vmax); }

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr int32_t kRounderBits = 0x4B400000;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace rose
