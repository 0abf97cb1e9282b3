// y = act(x W^T + b) with W packed in panels of columns, for any number of rows.
//
// A panel holds kWidth outputs (columns of W^T), stored [K][kWidth]: the kernel reads it front to back,
// once per block of rows, so that few rows run at the speed of the memory. An output's bits depend on its
// own row and column alone (see `multiply`). In a gated panel the first half are gate outputs and the second half the up outputs of
// the same channels.
#include <algorithm>

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

void block(const Job& job, int64_t panel, int64_t row, int rows) {
  const int64_t inputs = job.linear.inputs;
  alignas(64) float sums[kRows][kWidth];
  kMultiply[rows - 1](job.x + row * job.ldx, job.ldx, job.linear.panels + panel * inputs * kWidth,
                      kWidth, inputs, sums[0], kWidth, false);
  finish(job, panel, sums, rows, job.y + row * job.ldy);
}

int64_t num_panels(const RoseLinear& w) {
  return ceil_div(w.outputs, w.gated ? kWidth / 2 : kWidth);
}

void run(const Job& job, int64_t rows, int threads) {
  const RoseLinear& w = job.linear;
  const int64_t panels = num_panels(w), panel_bytes = w.inputs * kWidth * 4;
  const int64_t fitting = std::max<int64_t>(1, kCacheBytes / std::max<int64_t>(1, panel_bytes));
  const int64_t group = std::min(ceil_div(panels, 4 * threads), fitting);
  const Blocks blocks(rows);
  const double ns = std::max(rows * kNsPerFma * kWidth, kNsPerByte * kWidth * 4) * w.inputs * panels;
  parallel(threads, ceil_div(panels, group), static_cast<int64_t>(ns), [&](int64_t task) {
    const int64_t last = std::min(panels, (task + 1) * group);
    for (int64_t b = 0; b < blocks.count; ++b) {
      const int64_t row = blocks.start(b), count = blocks.start(b + 1) - row;
      for (int64_t p = task * group; p < last; ++p) block(job, p, row, static_cast<int>(count));
    }
  });
}

// The row of the weight matrix that fills place `offset` of a panel; -1 where none does.
int64_t weight_row(const RoseLinear& w, int64_t panel, int64_t offset) {
  const int64_t share = w.gated ? kWidth / 2 : kWidth, channel = panel * share + offset % share;
  if (channel >= w.outputs) return -1;
  return channel + offset / share * w.outputs;
}

void pack_panel(const RoseLinear& w, int64_t panel, const float* weight, float* out) {
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

}  // namespace
}  // namespace rose

using namespace rose;

extern "C" {

ROSE_API int64_t rose_panel_floats(int64_t inputs, int64_t outputs, int32_t gated) {
  const RoseLinear w{nullptr, nullptr, inputs, outputs, kIdentity, gated};
  return num_panels(w) * kWidth * inputs;
}

ROSE_API int64_t rose_bias_floats(int64_t outputs, int32_t gated) {
  return rose_panel_floats(1, outputs, gated);
}

ROSE_API void rose_pack(const float* weight, const float* bias, const RoseLinear* linear,
                        float* panels, float* panel_bias, int32_t threads) {
  const RoseLinear& w = *linear;
  const int64_t panels_count = num_panels(w);
  parallel(threads, panels_count, panels_count * kWidth * w.inputs, [&](int64_t panel) {
    pack_panel(w, panel, weight, panels + panel * kWidth * w.inputs);
    for (int64_t offset = 0; bias && offset < kWidth; ++offset) {
      const int64_t row = weight_row(w, panel, offset);
      panel_bias[panel * kWidth + offset] = row < 0 ? 0.0f : bias[row];
    }
  });
}

ROSE_API void rose_linear(const RoseLinear* linear, const float* x, int64_t ldx, float* y, int64_t ldy,
                          int64_t rows, int32_t threads) {
  run(Job{*linear, x, ldx, y, ldy}, rows, threads);
}

ROSE_API void rose_panel_rows(const RoseLinear* linear, const int64_t* ids, float* y, int64_t rows,
                              int32_t threads) {
  const int64_t inputs = linear->inputs;
  parallel(threads, rows, rows * inputs, [&](int64_t i) {
    const float* from = linear->panels + ids[i] / kWidth * kWidth * inputs + ids[i] % kWidth;
    for (int64_t k = 0; k < inputs; ++k) y[i * inputs + k] = from[k * kWidth];
  });
}

}  // extern "C"
