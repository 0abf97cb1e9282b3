// y = act(x W^T + b) with W packed in panels of columns, for any number of rows.
//
// A panel holds kWidth outputs (columns of W^T), stored [K][kWidth]: the kernel reads it front to back,
// once per block of rows, so that few rows run at the speed of the memory. An output's bits depend on
// its own row and column alone (see `multiply`). In a gated panel the first half are gate outputs and
// the second half the up outputs of the same channels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "api.h"
#include "block.h"
#include "functions.h"
#include "pool.h"

namespace rose {
namespace {

constexpr int64_t kCacheBytes = 1 << 19;  // what the panels of one task may fill

struct Job {
  const RoseLinear& linear;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
};

// Adds the bias to some rows of a panel's sums, applies the activation, and stores what are real outputs.
void finish(const Job& job, int64_t panel, const float (*sums)[kWidth], int rows, float* y) {
  const RoseLinear& w = job.linear;
  const int vecs = w.gated ? kVecs / 2 : kVecs;
  const int64_t first = panel * vecs * kLanes;
  Vec bias[kVecs] = {};
  if (w.bias)
    for (int v = 0; v < kVecs; ++v) bias[v] = load(w.bias + panel * kWidth + v * kLanes);
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) {
      Vec out = activate(load(sums[r] + v * kLanes) + bias[v], w.activation);
      if (w.gated) out = out * (load(sums[r] + (v + vecs) * kLanes) + bias[v + vecs]);
      const int64_t column = first + v * kLanes, left = w.outputs - column;
      if (left >= kLanes) store(y + r * job.ldy + column, out);
      else if (left > 0) store_some(y + r * job.ldy + column, out, left);
    }
}

int64_t element_size(const RoseLinear& w) {
  return w.storage == kFloats ? 4 : w.storage == kHalves ? 2 : 1;
}

int64_t num_groups(const RoseLinear& w) { return ceil_div(w.inputs, kGroup); }

// A panel as it is stored.
template <class Columns>
Columns columns_of(const RoseLinear& w, int64_t panel) {
  const int64_t first = panel * w.inputs * kWidth;
  if constexpr (std::is_same_v<Columns, Floats>) return {static_cast<const float*>(w.panels) + first};
  else if constexpr (std::is_same_v<Columns, Halves>)
    return {static_cast<const uint16_t*>(w.panels) + first};
  else
    return {static_cast<const int8_t*>(w.panels) + first, w.scales + panel * num_groups(w) * kWidth};
}

// Calls use(columns) with the panel as it is stored.
template <class Use>
void with_columns(const RoseLinear& w, int64_t panel, Use use) {
  if (w.storage == kHalves) use(columns_of<Halves>(w, panel));
  else if (w.storage == kBytes) use(columns_of<Bytes>(w, panel));
  else use(columns_of<Floats>(w, panel));
}

template <class Columns>
void block(const Job& job, Columns columns, int64_t panel, int64_t row, int64_t rows) {
  alignas(64) float sums[kRows][kWidth];
  kMultiply<Columns>[rows - 1](job.x + row * job.ldx, job.ldx, columns, job.linear.inputs, sums[0],
                               kWidth, false);
  finish(job, panel, sums, static_cast<int>(rows), job.y + row * job.ldy);
}

int64_t num_panels(const RoseLinear& w) {
  return ceil_div(w.outputs, w.gated ? kWidth / 2 : kWidth);
}

void run(const Job& job, int64_t rows, int threads) {
  const RoseLinear& w = job.linear;
  const int64_t panels = num_panels(w), panel_bytes = w.inputs * kWidth * element_size(w);
  const int64_t fitting = std::max<int64_t>(1, kCacheBytes / std::max<int64_t>(1, panel_bytes));
  const int64_t group = std::min(ceil_div(panels, 4 * threads), fitting);
  const Blocks blocks(rows);
  const double ns = std::max(rows * kNsPerFma, kNsPerByte * element_size(w)) * kWidth * w.inputs * panels;
  parallel(threads, ceil_div(panels, group), static_cast<int64_t>(ns), [&](int64_t task) {
    const int64_t last = std::min(panels, (task + 1) * group);
    for (int64_t b = 0; b < blocks.count; ++b) {
      const int64_t row = blocks.start(b), count = blocks.start(b + 1) - row;
      for (int64_t p = task * group; p < last; ++p)
        with_columns(w, p, [&](auto columns) { block(job, columns, p, row, count); });
    }
  });
}

// The row of the weight matrix that fills place `offset` of a panel; -1 where none does.
int64_t weight_row(const RoseLinear& w, int64_t panel, int64_t offset) {
  const int64_t share = w.gated ? kWidth / 2 : kWidth, channel = panel * share + offset % share;
  if (channel >= w.outputs) return -1;
  return channel + offset / share * w.outputs;
}

// Copies the weights of a panel, [inputs][kWidth].
void gather_panel(const RoseLinear& w, int64_t panel, const float* weight, float* out) {
  constexpr int64_t kPiece = 16;  // floats of a row at a time: a cache line
  for (int64_t start = 0; start < w.inputs; start += kPiece) {
    const int64_t end = std::min(start + kPiece, w.inputs);
    for (int64_t offset = 0; offset < kWidth; ++offset) {
      const int64_t row = weight_row(w, panel, offset);
      for (int64_t k = start; k < end; ++k)
        out[k * kWidth + offset] = row < 0 ? 0.0f : weight[row * w.inputs + k];
    }
  }
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Rounds each group of a column to whole numbers of up to 127, whose unit becomes the group's scale.
void round_to_bytes(const float* panel, int64_t inputs, int8_t* out, float* scales) {
  for (int64_t start = 0; start < inputs; start += kGroup, scales += kWidth) {
    const int64_t end = std::min<int64_t>(start + kGroup, inputs);
    for (int64_t c = 0; c < kWidth; ++c) {
      float most = 0.0f;
      for (int64_t k = start; k < end; ++k) most = std::max(most, std::fabs(panel[k * kWidth + c]));
      scales[c] = most / 127.0f;
      const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
      for (int64_t k = start; k < end; ++k)
        out[k * kWidth + c] = static_cast<int8_t>(std::lrint(panel[k * kWidth + c] * inverse));
    }
  }
}

void pack_panel(const RoseLinear& w, int64_t panel, const float* weight) {
  const int64_t count = w.inputs * kWidth;
  if (w.storage == kFloats) {
    gather_panel(w, panel, weight, static_cast<float*>(w.panels) + panel * count);
    return;
  }
  std::vector<float> gathered(count);
  gather_panel(w, panel, weight, gathered.data());
  if (w.storage == kHalves) {
    uint16_t* out = static_cast<uint16_t*>(w.panels) + panel * count;
    for (int64_t i = 0; i < count; ++i)
      out[i / kWidth * kWidth + Halves::place(i % kWidth)] =
          static_cast<uint16_t>(bits_of(gathered[i]) >> 16);
  } else {
    round_to_bytes(gathered.data(), w.inputs, static_cast<int8_t*>(w.panels) + panel * count,
                   w.scales + panel * num_groups(w) * kWidth);
  }
}

}  // namespace
}  // namespace rose

using namespace rose;

extern "C" {

ROSE_API int64_t rose_num_panels(int64_t outputs, int32_t gated) {
  RoseLinear w{};
  w.outputs = outputs;
  w.gated = gated;
  return num_panels(w);
}

ROSE_API int64_t rose_panel_width() { return kWidth; }

ROSE_API int64_t rose_group_size() { return kGroup; }

ROSE_API int32_t rose_fit_halves(const float* weight, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (bits_of(weight[i]) & 0xffff) return 0;
  return 1;
}

ROSE_API void rose_pack(const RoseLinear* linear, const float* weight, const float* bias,
                        int32_t threads) {
  const RoseLinear& w = *linear;
  const int64_t panels = num_panels(w);
  parallel(threads, panels, panels * kWidth * w.inputs, [&](int64_t panel) {
    pack_panel(w, panel, weight);
    for (int64_t offset = 0; bias && offset < kWidth; ++offset) {
      const int64_t row = weight_row(w, panel, offset);
      w.bias[panel * kWidth + offset] = row < 0 ? 0.0f : bias[row];
    }
  });
}

ROSE_API void rose_linear(const RoseLinear* linear, const float* x, int64_t ldx, float* y, int64_t ldy,
                          int64_t rows, int32_t threads) {
  run(Job{*linear, x, ldx, y, ldy}, rows, threads);
}

ROSE_API void rose_panel_rows(const RoseLinear* linear, const int64_t* ids, float* y, int64_t rows,
                              int32_t threads) {
  const RoseLinear& w = *linear;
  parallel(threads, rows, rows * w.inputs, [&](int64_t i) {
    with_columns(w, ids[i] / kWidth, [&](auto columns) {
      const int64_t offset = ids[i] % kWidth;
      for (int64_t k = 0; k < w.inputs; ++k) y[i * w.inputs + k] = columns.one(k, offset);
    });
  });
}

}  // extern "C"
