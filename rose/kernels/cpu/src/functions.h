// exp, erf and the activation functions on vectors.
#pragma once

#include "vector.h"

namespace rose {

constexpr float kLog2e = 1.44269504f;

// e^r for r = x - n ln 2, which is within ln 2 / 2 of 0, by its series. Error about 1 ulp.
inline Vec exp_of_rest(Vec x, Vec n) {
  Vec r = n * -0.693145752f + x;
  r = n * -1.42860677e-6f + r;
  Vec p = r * splat(1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  return p * r + 1.0f;
}

// e^x for any x: 2^n comes in two factors, so that results overflow to infinity and underflow to 0.
inline Vec exp(Vec x) {
  const Vec low = splat(-104.0f), high = splat(89.0f);
  x = x < low ? low : x;  // NaN compares false, so it stays
  x = x > high ? high : x;
  const Vec shifted = x * kLog2e + kRounder;
  const VecInt exponent = (VecInt)shifted - kRounderBits;
  const VecInt first = exponent >> 1, second = exponent - first;
  return exp_of_rest(x, shifted - kRounder) * (Vec)((first + 127) << 23) *
         (Vec)((second + 127) << 23);
}

// 2^x for x of at most 0, with 0 below 2^-125. The polynomial is fitted on half around 0 to a relative
// error of 2e-9, with 1 at 0; in float the error is below 1e-7.
inline Vec power_of_two(Vec x) {
  const Vec shifted = x + kRounder;
  const Vec r = x - (shifted - kRounder);
  Vec p = r * splat(0.00015353362f) + 0.00133988739f;
  p = p * r + 0.00961843692f;
  p = p * r + 0.0555033237f;
  p = p * r + 0.240226477f;
  p = p * r + 0.693147182f;
  p = p * r + 1.0f;
  const Vec result = (Vec)((VecInt)p + ((VecInt)shifted << 23));
  return x < -125.0f ? Vec{} : result;
}

// erf(x) = x P(x^2) / Q(x^2) up to 3.92, beyond which it is 1 in float. P and Q are a least-squares fit
// on that range, reweighted towards the smallest largest error; in float the error is below 4e-7.
inline Vec erf(Vec x) {
  const Vec one = splat(1.0f), edge = splat(3.92f);
  const Vec s = x * x;
  Vec p = s * 2.02594424e-06f + 0.000284680893f;
  p = p * s + 0.00380789838f;
  p = p * s + 0.0528746434f;
  p = p * s + 0.191544309f;
  p = p * s + 1.12837911f;
  Vec q = s * 3.78318109e-05f + 0.0011706599f;
  q = q * s + 0.0150545677f;
  q = q * s + 0.114557132f;
  q = q * s + 0.503084421f;
  q = q * s + 1.0f;
  const Vec inside = x * p / q;  // NaN stays: it compares false
  return x > edge ? one : x < -edge ? -one : inside;
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

enum Activation : int32_t { kIdentity, kGelu, kGeluTanh, kQuickGelu, kRelu, kSilu };

inline Vec activate(Vec x, int32_t activation) {
  switch (activation) {
    case kGelu:
      return 0.5f * x * (1.0f + erf(x * 0.707106781f));
    case kGeluTanh:  // 0.5 (1 + tanh u) is sigmoid(2 u)
      return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    case kQuickGelu:
      return x * sigmoid(1.702f * x);
    case kRelu:
      return x < 0.0f ? Vec{} : x;
    case kSilu:
      return x * sigmoid(x);
    default:
      return x;
  }
}

}  // namespace rose
