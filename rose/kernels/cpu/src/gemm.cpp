// y = act(x W^T + b) with W packed in panels of columns, for any number of rows.
//
// A panel holds kWidth outputs (columns of W^T), stored [K][kWidth]: the kernel reads it front to back,
// once per block of rows, so that few rows run at the speed of the memory. An output's bits depend on
// its own row and column alone (see `multiply`). In a gated panel the first half are gate outputs and
// the second half the up outputs of the same channels. Quantised weights have a loop of their own
// (integers.h), with the rows of x in 8 bits.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "api.h"
#include "block.h"
#include "functions.h"
#include "integers.h"
#include "pool.h"
#include "workspace.h"

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

// Applies the activation to some rows of a panel's sums, and stores what are real outputs.
void finish(const Job& job, int64_t panel, const float (*sums)[kWidth], int rows, float* y) {
  const RoseLinear& w = job.linear;
  const int vecs = w.gated ? kVecs / 2 : kVecs;
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) {
      Vec out = activate(load(sums[r] + v * kLanes), w.activation);
      if (w.gated) out = out * load(sums[r] + (v + vecs) * kLanes);
      const int64_t column = (panel * vecs + v) * kLanes, left = w.outputs - column;
      if (left >= kLanes) store(y + r * job.ldy + column, out);
      else if (left > 0) store_some(y + r * job.ldy + column, out, left);
    }
}

bool is_quantized(const RoseLinear& w) { return w.storage == kBytes || w.storage == kNibbles; }

int64_t num_groups(const RoseLinear& w) { return ceil_div(w.inputs, kGroup); }

int64_t panel_bytes(const RoseLinear& w) {
  if (w.storage == kBytes) return num_groups(w) * kGroupBytes<Bytes>;
  if (w.storage == kNibbles) return num_groups(w) * kGroupBytes<Nibbles>;
  return w.inputs * kWidth * (w.storage == kHalves ? 2 : 4);
}

uint8_t* panel_at(const RoseLinear& w, int64_t panel) {
  return static_cast<uint8_t*>(w.panels) + panel * panel_bytes(w);
}

// Where the scales of a group are, and behind them its minima.
uint16_t* facts_at(const RoseLinear& w, int64_t panel, int64_t group) {
  const int64_t facts = w.storage == kNibbles ? Nibbles::kFacts : Bytes::kFacts;
  return w.scales + (panel * num_groups(w) + group) * facts * kWidth;
}

// Calls use(columns) with a panel of floats or of their halves.
template <class Use>
void with_columns(const RoseLinear& w, int64_t panel, Use use) {
  const void* at = panel_at(w, panel);
  if (w.storage == kHalves) use(Halves{static_cast<const uint16_t*>(at)});
  else use(Floats{static_cast<const float*>(at)});
}

// Calls use(kind) with the kind of quantised weights.
template <class Use>
void with_kind(const RoseLinear& w, Use use) {
  if (w.storage == kNibbles) use(Nibbles{});
  else use(Bytes{});
}

// A block of rows times a panel. `coded` is x where weights are quantised. Sums that need nothing more go
// straight to y.
void block(const Job& job, const Coded& coded, int64_t panel, int64_t row, int64_t rows) {
  const RoseLinear& w = job.linear;
  const float* bias = w.bias ? w.bias + panel * kWidth : nullptr;
  float* y = job.y + row * job.ldy;
  alignas(64) float sums[kRows][kWidth];
  if (is_quantized(w)) {
    with_kind(w, [&](auto kind) {
      kMultiplyCodes<decltype(kind)>[rows - 1](coded, row, panel_at(w, panel),
                                               facts_at(w, panel, 0), bias, sums[0]);
    });
  } else {
    const bool is_done = !w.gated && w.activation == kIdentity && (panel + 1) * kWidth <= w.outputs;
    float* to = is_done ? y + panel * kWidth : sums[0];
    with_columns(w, panel, [&](auto columns) {
      kMultiply<decltype(columns)>[rows - 1](job.x + row * job.ldx, job.ldx, columns, w.inputs,
                                             {bias}, to, is_done ? job.ldy : kWidth);
    });
    if (is_done) return;
  }
  finish(job, panel, sums, static_cast<int>(rows), y);
}

int64_t num_panels(const RoseLinear& w) {
  return ceil_div(w.outputs, w.gated ? kWidth / 2 : kWidth);
}

thread_local Workspace coded_rows;

// Room for the codes of rows, good until this thread asks again.
Coded make_coded(int64_t rows, int64_t groups, bool is_signed) {
  const int64_t count = rows * groups, codes = count * kGroup * sizeof(Code) / sizeof(float);
  coded_rows.start(2 * count + codes);
  float* scales = coded_rows.take(count);
  float* offsets = coded_rows.take(count);
  return {reinterpret_cast<Code*>(coded_rows.take(codes)), scales, offsets, groups, is_signed};
}

Coded encode(const Job& job, int64_t rows, int threads) {
  constexpr int64_t kRowsOfTask = 16;
  const int64_t inputs = job.linear.inputs;
  const bool is_signed = job.linear.storage == kNibbles && Nibbles::kSigned;
  const Coded coded = make_coded(rows, num_groups(job.linear), is_signed);
  const int64_t ns = static_cast<int64_t>(rows * inputs * kNsPerCode);
  parallel(threads, ceil_div(rows, kRowsOfTask), ns, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * kRowsOfTask);
    for (int64_t r = task * kRowsOfTask; r < end; ++r)
      encode_row(job.x + r * job.ldx, inputs, coded, r);
  });
  return coded;
}

// Where each task begins among the panels, and the end of the last: large ones first, as each reads all
// of x, and single panels last, so that all threads end at once.
std::vector<int64_t> task_starts(int64_t panels, int64_t most, int threads) {
  std::vector<int64_t> starts{0};
  while (starts.back() < panels) {
    const int64_t share = (panels - starts.back()) / (4 * threads);
    starts.push_back(starts.back() + std::clamp<int64_t>(share, 1, most));
  }
  return starts;
}

void run(const Job& job, int64_t rows, int threads) {
  const RoseLinear& w = job.linear;
  const int64_t panels = num_panels(w), bytes = std::max<int64_t>(1, panel_bytes(w));
  const int64_t fitting = std::max<int64_t>(1, kCacheBytes / bytes);
  const std::vector<int64_t> starts = task_starts(panels, fitting, threads);
  const Blocks blocks(rows, is_quantized(w) ? kCodedRows : kRows);
  const double ns_per_fma = is_quantized(w) ? kNsPerFma / 2 : kNsPerFma;
  const double ns = std::max(rows * ns_per_fma * kWidth * w.inputs, kNsPerByte * bytes) * panels;
  const Coded coded = is_quantized(w) ? encode(job, rows, threads) : Coded{};
  parallel(threads, starts.size() - 1, static_cast<int64_t>(ns), [&](int64_t task) {
    for (int64_t b = 0; b < blocks.count; ++b) {
      const int64_t row = blocks.start(b), count = blocks.start(b + 1) - row;
      for (int64_t p = starts[task]; p < starts[task + 1]; ++p) block(job, coded, p, row, count);
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

uint16_t half_of(float x) { return static_cast<uint16_t>(bits_of(x) >> 16); }

void pack_panel(const RoseLinear& w, int64_t panel, const float* weight) {
  if (w.storage == kFloats) {
    gather_panel(w, panel, weight, reinterpret_cast<float*>(panel_at(w, panel)));
    return;
  }
  const int64_t count = w.inputs * kWidth;
  std::vector<float> gathered(count);
  gather_panel(w, panel, weight, gathered.data());
  uint16_t* out = reinterpret_cast<uint16_t*>(panel_at(w, panel));
  for (int64_t i = 0; i < count; ++i)
    out[i / kWidth * kWidth + Halves::place(i % kWidth)] = half_of(gathered[i]);
}

// Packs the codes of a panel. Where there is no weight, everything is 0.
template <class Kind>
void pack_panel_codes(Kind, const RoseLinear& w, int64_t panel, const int8_t* codes,
                      const float* scales, const float* minima) {
  const int64_t groups = num_groups(w);
  uint8_t* out = panel_at(w, panel);
  std::memset(out, 0, panel_bytes(w));
  for (int64_t offset = 0; offset < kWidth; ++offset) {
    const int64_t row = weight_row(w, panel, offset);
    for (int64_t k = 0; k < groups * kGroup; ++k) {
      const auto [at, step] = place_of<Kind>(k % kGroup, offset);
      const int32_t code = row < 0 || k >= w.inputs ? 0 : codes[row * w.inputs + k];
      uint8_t& byte = out[k / kGroup * kGroupBytes<Kind> + at];
      byte = Kind::put(byte, step, code);
    }
    for (int64_t g = 0; g < groups; ++g) {
      uint16_t* facts = facts_at(w, panel, g) + Halves::place(offset);
      facts[0] = row < 0 ? 0 : half_of(scales[row * groups + g]);
      if constexpr (Kind::kFacts > 1) facts[kWidth] = row < 0 ? 0 : half_of(minima[row * groups + g]);
    }
  }
}

void pack_bias(const RoseLinear& w, int64_t panel, const float* bias) {
  for (int64_t offset = 0; bias && offset < kWidth; ++offset) {
    const int64_t row = weight_row(w, panel, offset);
    w.bias[panel * kWidth + offset] = row < 0 ? 0.0f : bias[row];
  }
}

// Copies a row of quantised weights.
template <class Kind>
void decode_row(Kind, const RoseLinear& w, int64_t row, float* y) {
  const int64_t panel = row / kWidth, offset = row % kWidth;
  const Halves facts{facts_at(w, panel, 0)};
  for (int64_t k = 0; k < w.inputs; ++k) {
    const auto [at, step] = place_of<Kind>(k % kGroup, offset);
    const uint8_t byte = panel_at(w, panel)[k / kGroup * kGroupBytes<Kind> + at];
    const int64_t group = k / kGroup * Kind::kFacts;
    y[k] = Kind::one(byte, step) * facts.one(group, offset);
    if constexpr (Kind::kFacts > 1) y[k] += facts.one(group + 1, offset);
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

ROSE_API int64_t rose_panel_bytes(const RoseLinear* linear) { return panel_bytes(*linear); }

ROSE_API void rose_pack(const RoseLinear* linear, const float* weight, const float* bias,
                        int32_t threads) {
  const RoseLinear& w = *linear;
  const int64_t panels = num_panels(w);
  parallel(threads, panels, panels * kWidth * w.inputs, [&](int64_t panel) {
    pack_panel(w, panel, weight);
    pack_bias(w, panel, bias);
  });
}

ROSE_API void rose_pack_codes(const RoseLinear* linear, const int8_t* codes, const float* scales,
                              const float* minima, const float* bias, int32_t threads) {
  const RoseLinear& w = *linear;
  const int64_t panels = num_panels(w);
  parallel(threads, panels, panels * kWidth * w.inputs, [&](int64_t panel) {
    with_kind(w, [&](auto kind) { pack_panel_codes(kind, w, panel, codes, scales, minima); });
    pack_bias(w, panel, bias);
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
    float* out = y + i * w.inputs;
    if (is_quantized(w)) {
      with_kind(w, [&](auto kind) { decode_row(kind, w, ids[i], out); });
    } else {
      with_columns(w, ids[i] / kWidth, [&](auto columns) {
        for (int64_t k = 0; k < w.inputs; ++k) out[k] = columns.one(k, ids[i] % kWidth);
      });
    }
  });
}

}  // extern "C"
