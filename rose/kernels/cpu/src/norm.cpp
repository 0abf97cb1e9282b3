// Row by row: layer norm and RMS norm, with what is added before them, and rotary position embedding.
// A row's bits depend on the row alone.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "api.h"
#include "pool.h"
#include "vector.h"

namespace rose {
namespace {

constexpr double kNsPerFloat = 0.3;  // of one thread, roughly

// Calls each(at, count) for every vector of a row; count is below kLanes in the last one only.
template <class Each>
inline void for_vectors(int64_t channels, Each each) {
  int64_t at = 0;
  for (; at + kLanes <= channels; at += kLanes) each(at, kLanes);
  if (at < channels) each(at, channels - at);
}

inline Vec load_up_to(const float* at, int64_t count) {
  return count == kLanes ? load(at) : load_some(at, count, 0.0f);
}

inline void store_up_to(float* at, Vec x, int64_t count) {
  if (count == kLanes) store(at, x);
  else store_some(at, x, count);
}

// Writes x + residual, where there is one, and returns where the norm's input lies.
const float* add(const float* x, const float* residual, float* total, int64_t channels) {
  if (!residual) return x;
  for_vectors(channels, [&](int64_t at, int64_t count) {
    store_up_to(total + at, load_up_to(x + at, count) + load_up_to(residual + at, count), count);
  });
  return total;
}

void layer_norm(const float* x, const float* weight, const float* bias, float* y, int64_t channels,
                float eps) {
  Vec sums = {}, squares = {};
  for_vectors(channels, [&](int64_t at, int64_t count) { sums += load_up_to(x + at, count); });
  const float mean = sum(sums) / channels;
  for_vectors(channels, [&](int64_t at, int64_t count) {
    const Vec d = (count == kLanes ? load(x + at) : load_some(x + at, count, mean)) - mean;
    squares += d * d;
  });
  const float inverse = 1.0f / std::sqrt(sum(squares) / channels + eps);
  for_vectors(channels, [&](int64_t at, int64_t count) {
    Vec out = (load_up_to(x + at, count) - mean) * inverse * load_up_to(weight + at, count);
    if (bias) out += load_up_to(bias + at, count);
    store_up_to(y + at, out, count);
  });
}

void rms_norm(const float* x, const float* weight, float offset, float* y, int64_t channels,
              float eps) {
  Vec squares = {};
  for_vectors(channels, [&](int64_t at, int64_t count) {
    const Vec value = load_up_to(x + at, count);
    squares += value * value;
  });
  const float inverse = 1.0f / std::sqrt(sum(squares) / channels + eps);
  for_vectors(channels, [&](int64_t at, int64_t count) {
    const Vec scale = load_up_to(weight + at, count) + offset;
    store_up_to(y + at, load_up_to(x + at, count) * inverse * scale, count);
  });
}

// Runs task(row) for every row, several at a time.
template <class Task>
void for_rows(int64_t rows, int64_t floats, int threads, Task task) {
  const int64_t group = std::max<int64_t>(1, ceil_div(rows, 4 * threads));
  const double ns = kNsPerFloat * rows * floats;
  parallel(threads, ceil_div(rows, group), static_cast<int64_t>(ns), [&](int64_t index) {
    const int64_t last = std::min(rows, (index + 1) * group);
    for (int64_t row = index * group; row < last; ++row) task(row);
  });
}

// Pairs channel i with channel i + rotary / 2; y may be x.
void rotate(const float* x, const float* cos, const float* sin, float* y, int64_t dim,
            int64_t rotary) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    y[i] = first * cos[i] - second * sin[i];
    y[i + half] = second * cos[i + half] + first * sin[i + half];
  }
  for (int64_t i = rotary; i < dim; ++i) y[i] = x[i];
}

}  // namespace
}  // namespace rose

using namespace rose;

extern "C" {

ROSE_API void rose_layer_norm(const float* x, const float* residual, const float* weight,
                              const float* bias, float* y, float* total, int64_t rows,
                              int64_t channels, float eps, int32_t threads) {
  for_rows(rows, channels, threads, [&](int64_t row) {
    const int64_t at = row * channels;
    const float* input = add(x + at, residual ? residual + at : nullptr, total + at, channels);
    layer_norm(input, weight, bias, y + at, channels, eps);
  });
}

ROSE_API void rose_rms_norm(const float* x, const float* residual, const float* weight,
                            float weight_offset, float* y, float* total, int64_t rows,
                            int64_t channels, float eps, int32_t threads) {
  for_rows(rows, channels, threads, [&](int64_t row) {
    const int64_t at = row * channels;
    const float* input = add(x + at, residual ? residual + at : nullptr, total + at, channels);
    rms_norm(input, weight, weight_offset, y + at, channels, eps);
  });
}

ROSE_API void rose_norm_and_rotate(const RoseHeads* heads, const float* q, int64_t ldq, const float* k,
                                   int64_t ldk, const float* v, int64_t ldv, const float* cos,
                                   const float* sin, const int64_t* slots, float* q_out,
                                   float* k_out, float* v_out, int64_t rows, int32_t threads) {
  const RoseHeads& h = *heads;
  const int64_t dim = h.head_dim, kv_width = h.num_kv_heads * dim;
  const auto head = [&](const float* x, const float* norm, int64_t row, float* y) {
    if (norm) {
      rms_norm(x, norm, h.norm_offset, y, dim, h.eps);
      x = y;
    }
    rotate(x, cos + row * h.rotary, sin + row * h.rotary, y, dim, h.rotary);
  };
  for_rows(rows, h.num_heads * dim + kv_width, threads, [&](int64_t row) {
    const int64_t slot = slots ? slots[row] : row;
    for (int64_t i = 0; i < h.num_heads; ++i)
      head(q + row * ldq + i * dim, h.q_norm, row, q_out + (row * h.num_heads + i) * dim);
    for (int64_t i = 0; i < h.num_kv_heads; ++i)
      head(k + row * ldk + i * dim, h.k_norm, row, k_out + slot * kv_width + i * dim);
    if (v) std::memcpy(v_out + slot * kv_width, v + row * ldv, sizeof(float) * kv_width);
  });
}

ROSE_API void rose_embed_and_norm(const int64_t* ids, const int64_t* positions, const int64_t* types,
                                  const float* word_table, const float* position_table,
                                  const float* type_table, const float* weight, const float* bias,
                                  float* y, int64_t rows, int64_t channels, float eps,
                                  int32_t threads) {
  for_rows(rows, 2 * channels, threads, [&](int64_t row) {
    float* out = y + row * channels;
    add(word_table + ids[row] * channels, type_table + (types ? types[row] : 0) * channels, out, channels);
    add(out, position_table + positions[row] * channels, out, channels);
    layer_norm(out, weight, bias, out, channels, eps);
  });
}

}  // extern "C"
