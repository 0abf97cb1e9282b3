// y = act(x W^T + b) with W packed in panels of columns, for any number of rows.
//
// A panel holds kWidth outputs (columns of W^T), stored [K][kWidth]: the kernel reads it front to back,
// once per block of rows, so that few rows run at the speed of the memory. Every output is one chain of
// fused multiply-adds over k, in order, whatever the block of rows: its bits depend on its own row and
// column alone. In a gated panel the first half are gate outputs and the second half the up outputs of
// the same channels.
#include <algorithm>
#include <array>
#include <utility>

#include "api.h"
#include "functions.h"
#include "pool.h"

namespace rose {
namespace {

constexpr int kVecs = kLanes == 4 && kRegisters == 32 ? 4 : 2;  // vectors of a panel's width
constexpr int kWidth = kVecs * kLanes;
constexpr int kRows = (kRegisters - kVecs - 2) / kVecs > 12 ? 12 : (kRegisters - kVecs - 2) / kVecs;
constexpr int kAhead = 512;              // floats from the one in use to the one to prefetch
constexpr int64_t kCacheBytes = 1 << 19;  // what the panels of one task may fill
constexpr double kNsPerFma = 0.02, kNsPerByte = 0.05;  // of one thread, roughly

struct Job {
  const RoseLinear& linear;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
};

// Adds the bias to R rows of a panel's sums, applies the activation, and stores what are real outputs.
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

template <int R>
void block(const Job& job, int64_t panel, int64_t row) {
  const int64_t inputs = job.linear.inputs, ldx = job.ldx;
  const float* w = job.linear.panels + panel * inputs * kWidth;
  const float* x = job.x + row * ldx;
  Vec sums[R][kVecs] = {};
  for (int64_t k = 0; k < inputs; ++k, w += kWidth) {
    Vec column[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      column[v] = load(w + v * kLanes);
      __builtin_prefetch(w + v * kLanes + kAhead);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = splat(x[r * ldx + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] = value * column[v] + sums[r][v];
    }
  }
  alignas(64) float out[R][kWidth];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) store(out[r] + v * kLanes, sums[r][v]);
  finish(job, panel, out, R, job.y + row * job.ldy);
}

using Block = void (*)(const Job&, int64_t, int64_t);

template <int... R>
constexpr std::array<Block, sizeof...(R)> make_blocks(std::integer_sequence<int, R...>) {
  return {block<R + 1>...};
}

constexpr auto kBlocks = make_blocks(std::make_integer_sequence<int, kRows>());  // [rows - 1]

int64_t num_panels(const RoseLinear& w) {
  return ceil_div(w.outputs, w.gated ? kWidth / 2 : kWidth);
}

void run(const Job& job, int64_t rows, int threads) {
  const RoseLinear& w = job.linear;
  const int64_t panels = num_panels(w), panel_bytes = w.inputs * kWidth * 4;
  const int64_t fitting = std::max<int64_t>(1, kCacheBytes / std::max<int64_t>(1, panel_bytes));
  const int64_t group = std::min(ceil_div(panels, 4 * threads), fitting);
  const int64_t blocks = ceil_div(rows, kRows);
  const double ns = std::max(rows * kNsPerFma * kWidth, kNsPerByte * kWidth * 4) * w.inputs * panels;
  parallel(threads, ceil_div(panels, group), static_cast<int64_t>(ns), [&](int64_t task) {
    const int64_t last = std::min(panels, (task + 1) * group);
    for (int64_t b = 0; b < blocks; ++b) {  // blocks differ by one row at most
      const int64_t row = rows * b / blocks, next = rows * (b + 1) / blocks;
      for (int64_t p = task * group; p < last; ++p) kBlocks[next - row - 1](job, p, row);
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
