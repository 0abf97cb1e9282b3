// The inner loop for weights of 8 and 4 bits: whole numbers times whole numbers.
//
// Weights come with a scale for each kGroup inputs of an output, and those of 4 bits with a minimum: what
// code 0 means. The rows of x are encoded on the way, each group of a row as bytes: for weights of 8 bits
// from its least number to its greatest; for those of 4 bits, which meet activations on both sides of
// zero and have to be fast, as multiples of a step. Sums within a group are whole
// numbers, hence the same with every instruction set; those over groups are chains of fused
// multiply-adds in order. So a result's bits depend on its own row and column alone.
#pragma once

#include <array>
#include <cstring>
#include <utility>

#include "block.h"

namespace rose {

constexpr int kGroup = 32;  // inputs

// An instruction multiplies kStep inputs of each column with those of a row: 32 bits of `Code`.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr int kStep = 4;
typedef uint8_t Code;
typedef int8_t SignedCode;  // the same bits
constexpr int32_t kOnes = 0x01010101;
#else
constexpr int kStep = 2;
typedef int16_t Code;
typedef int16_t SignedCode;
constexpr int32_t kOnes = 0x00010001;
#endif
constexpr int kCodedRows = kRows - 1;  // one set of sums is for the columns themselves

// `Stored` is a vector's worth of bytes in memory, `Weights` what `dot` takes.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
typedef __m512i Stored;
typedef __m512i Weights;
inline Stored load_stored(const void* at) { return _mm512_loadu_si512(at); }
inline Stored low_nibbles(Stored x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Stored high_nibbles(Stored x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
inline Weights widen(Stored x) { return x; }
inline VecInt dot(VecInt sums, Weights w, int32_t codes) {
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(codes), w);
}
// The same with weights from 0 on, and codes that have a sign.
inline VecInt dot_signed(VecInt sums, Weights w, int32_t codes) {
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sums, w, _mm512_set1_epi32(codes));
}
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
typedef __m256i Stored;
typedef __m512i Weights;
inline Stored load_stored(const void* at) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(at));
}
inline Stored low_nibbles(Stored x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Stored high_nibbles(Stored x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline Weights widen(Stored x) { return _mm512_cvtepi8_epi16(x); }
inline VecInt dot(VecInt sums, Weights w, int32_t codes) {
  return sums + (VecInt)_mm512_madd_epi16(w, _mm512_set1_epi32(codes));
}
#else
typedef __m128i Stored;
typedef __m256i Weights;
inline Stored load_stored(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
inline Stored low_nibbles(Stored x) { return _mm_and_si128(x, _mm_set1_epi8(15)); }
inline Stored high_nibbles(Stored x) { return low_nibbles(_mm_srli_epi16(x, 4)); }
inline Weights widen(Stored x) { return _mm256_cvtepi8_epi16(x); }
inline VecInt dot(VecInt sums, Weights w, int32_t codes) {
  return sums + (VecInt)_mm256_madd_epi16(w, _mm256_set1_epi32(codes));
}
#endif
#else
typedef int8_t Stored __attribute__((vector_size(kLanes * kStep)));
typedef Stored UnalignedStored __attribute__((aligned(1), may_alias));
typedef int16_t Weights __attribute__((vector_size(kLanes * kStep * 2)));
inline Stored load_stored(const void* at) { return *static_cast<const UnalignedStored*>(at); }
inline Stored low_nibbles(Stored x) { return x & 15; }
inline Stored high_nibbles(Stored x) { return low_nibbles(x >> 4); }
inline Weights widen(Stored x) { return __builtin_convertvector(x, Weights); }
inline VecInt dot(VecInt sums, Weights w, int32_t codes) {
  const VecInt pairs = (VecInt)w;  // two inputs in one lane
  return sums + (pairs << 16 >> 16) * static_cast<int16_t>(codes) + (pairs >> 16) * (codes >> 16);
}
#endif

#if !(defined(__AVX512VNNI__) && defined(__AVX512F__))
inline VecInt dot_signed(VecInt sums, Weights w, int32_t codes) { return dot(sums, w, codes); }
#endif

// How the weights of a group are stored: steps of [kWidth][kStep] bytes. A byte holds the same place of
// `kShare` steps that follow one another. `kFacts` says what a group has beside them: a scale for each
// column, then perhaps a minimum for each. `kSigned` says how rows of x are encoded.
struct Bytes {
  static constexpr int kShare = 1, kFacts = 1;
  static constexpr bool kSigned = false;
  static Weights take(Stored x, int) { return widen(x); }
  static int32_t one(uint8_t x, int) { return static_cast<int8_t>(x); }
  static uint8_t put(uint8_t, int, int32_t code) { return static_cast<uint8_t>(code); }
};

struct Nibbles {
  static constexpr int kShare = 2, kFacts = 2;
  static constexpr bool kSigned = true;
  static Weights take(Stored x, int step) { return widen(step ? high_nibbles(x) : low_nibbles(x)); }
  static int32_t one(uint8_t x, int step) { return x >> 4 * step & 15; }
  static uint8_t put(uint8_t x, int step, int32_t code) {
    return static_cast<uint8_t>(x | code << 4 * step);
  }
};

template <class Kind>
constexpr int64_t kGroupBytes = kGroup / Kind::kShare * kWidth;

// Where the weight of input k of a group and of a column lies: a byte, and which of its steps.
template <class Kind>
inline std::pair<int64_t, int> place_of(int64_t k, int64_t column) {
  const int64_t step = k / kStep;
  return {(step / Kind::kShare * kWidth + column) * kStep + k % kStep,
          static_cast<int>(step % Kind::kShare)};
}

// Encoded rows: an input is its code times the scale of its group, plus the group's least number; where
// codes have a sign it is the code times the scale alone, and `offsets` are the sums of the inputs.
struct Coded {
  Code* codes;     // [rows][groups][kGroup]
  float* scales;   // [rows][groups]
  float* offsets;  // [rows][groups]
  int64_t groups;
  bool is_signed;
};

// Encodes the `count` inputs of a group. One that is not finite makes the scale NaN.
inline void encode_group(const float* x, int64_t count, bool is_signed, Code* codes, float* scale,
                         float* offset) {
  constexpr int kParts = kGroup / kLanes;
  typedef Code Codes __attribute__((vector_size(kLanes * sizeof(Code))));
  typedef Codes UnalignedCodes __attribute__((aligned(1), may_alias));
  Vec part[kParts], high = splat(x[0]), low = high, guard = {};
  for (int i = 0; i < kParts; ++i) {
    const int64_t left = count - i * kLanes;
    part[i] = left >= kLanes ? load(x + i * kLanes)
                             : load_some(x + i * kLanes, left > 0 ? left : 0, x[0]);
    high = vmax(part[i], high);
    low = vmin(part[i], low);
    guard = guard + part[i] * 0.0f;
  }
  const float top = largest(vmax(high, -low));
  const float start = is_signed ? 0.0f : -largest(-low);
  const float range = is_signed ? top * (255.0f / 127.0f) : largest(high) - start;
  const Vec inverse = splat(range > 0.0f ? 255.0f / range : 0.0f), first = splat(start);
  for (int i = 0; i < kParts; ++i) {
    const VecInt whole = (VecInt)((part[i] - first) * inverse + kRounder) - kRounderBits;
    *reinterpret_cast<UnalignedCodes*>(codes + i * kLanes) = __builtin_convertvector(whole, Codes);
  }
  *scale = range / 255.0f + sum(guard);
  *offset = start;
  if (!is_signed) return;
  int32_t whole = 0;
  for (int64_t i = 0; i < count; ++i) whole += static_cast<SignedCode>(codes[i]);
  *offset = static_cast<float>(whole) * *scale;
}

inline void encode_row(const float* x, int64_t inputs, const Coded& out, int64_t row) {
  for (int64_t g = 0; g < out.groups; ++g) {
    const int64_t at = row * out.groups + g;
    encode_group(x + g * kGroup, std::min<int64_t>(kGroup, inputs - g * kGroup),
                 out.is_signed, out.codes + at * kGroup, out.scales + at, out.offsets + at);
  }
}

// Sums over a group of the products of R rows with the columns of a panel, and of the columns alone
// where codes have no sign.
template <int R, class Kind>
inline void sum_group(const Code* codes, int64_t stride, const uint8_t* weights,
                      VecInt (&sums)[R + 1][kVecs]) {
  const RowPointers<R, Code> rows(codes, stride);
#pragma GCC unroll 16
  for (int r = 0; r <= R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[r][v] = VecInt{};
  for (int k = 0; k < kGroup;) {
    Stored stored[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      stored[v] = load_stored(weights + v * kLanes * kStep);
      __builtin_prefetch(weights + v * kLanes * kStep + 2048);
    }
    weights += kWidth * kStep;
#pragma GCC unroll 2
    for (int part = 0; part < Kind::kShare; ++part, k += kStep) {
      Weights column[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        column[v] = Kind::take(stored[v], part);
        if constexpr (!Kind::kSigned) sums[R][v] = dot(sums[R][v], column[v], kOnes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t packed;
        std::memcpy(&packed, rows.at(r, k), sizeof packed);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          if constexpr (Kind::kSigned) sums[r][v] = dot_signed(sums[r][v], column[v], packed);
          else sums[r][v] = dot(sums[r][v], column[v], packed);
        }
      }
    }
  }
}

// y[r][c] = bias[c] + sum over k of x[r][k] w[k][c] for R rows from `row` on and the columns of a panel;
// `y` is written again and again, so it has to be a small place of its own.
template <int R, class Kind>
void multiply_codes(const Coded& x, int64_t row, const uint8_t* weights, const uint16_t* scales,
                    const float* bias, float* y) {
  const int64_t stride = x.groups * kGroup;
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v)
      store(y + r * kWidth + v * kLanes, bias ? load(bias + v * kLanes) : Vec{});
  for (int64_t g = 0; g < x.groups; ++g) {
    VecInt sums[R + 1][kVecs];
    sum_group<R, Kind>(x.codes + row * stride + g * kGroup, stride, weights + g * kGroupBytes<Kind>,
                       sums);
    // What the offsets of rows are multiplied with: minima, or sums of columns in steps.
    Vec scale[kVecs], other[kVecs];
    const uint16_t* facts = scales + g * kWidth * Kind::kFacts;
    load_halves(facts, scale);
    if constexpr (Kind::kSigned) {
      load_halves(facts + kWidth, other);
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) other[v] = __builtin_convertvector(sums[R][v], Vec);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r) * x.groups + g;
      const Vec x_scale = splat(x.scales[at]), offset = splat(x.offsets[at]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        float* out = y + r * kWidth + v * kLanes;
        const Vec product = __builtin_convertvector(sums[r][v], Vec);
        if constexpr (Kind::kSigned) {
          const Vec before = other[v] * offset + load(out);
          store(out, product * x_scale * scale[v] + before);
        } else {
          const Vec least = other[v] * offset;
          store(out, (product * x_scale + least) * scale[v] + load(out));
        }
      }
    }
  }
}

template <class Kind>
using MultiplyCodes = void (*)(const Coded&, int64_t, const uint8_t*, const uint16_t*,
                               const float*, float*);

template <class Kind, int... R>
constexpr std::array<MultiplyCodes<Kind>, sizeof...(R)> multiply_codes_table(
    std::integer_sequence<int, R...>) {
  return {multiply_codes<R + 1, Kind>...};
}

// kMultiplyCodes<Kind>[rows - 1] is for that many rows.
template <class Kind>
constexpr auto kMultiplyCodes =
    multiply_codes_table<Kind>(std::make_integer_sequence<int, kCodedRows>());

}  // namespace rose
