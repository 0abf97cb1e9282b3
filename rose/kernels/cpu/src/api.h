// What Python calls through ctypes. Pointers are to contiguous float32 unless said otherwise; strides
// are in elements; `threads` includes the caller.
#pragma once

#include <cstdint>

#define ROSE_API __attribute__((visibility("default")))

extern "C" {

// A packed linear layer. `outputs` counts the channels of the result: a gated layer has twice as many
// rows of weights, all gates first. `bias` is in the order of the panels, or null.
struct RoseLinear {
  const float* panels;
  const float* bias;
  int64_t inputs;
  int64_t outputs;
  int32_t activation;
  int32_t gated;
};

// Floats that the panels and the packed bias of a layer take.
int64_t rose_panel_floats(int64_t inputs, int64_t outputs, int32_t gated);
int64_t rose_bias_floats(int64_t outputs, int32_t gated);

// Packs weight [rows, inputs] and bias [rows] or null for a layer of `linear`'s shape.
void rose_pack(const float* weight, const float* bias, const RoseLinear* linear, float* panels,
               float* panel_bias, int32_t threads);

// y = act(x W^T + b), or act(gate) * up; x [rows, inputs], y [rows, outputs].
void rose_linear(const RoseLinear* linear, const float* x, int64_t ldx, float* y, int64_t ldy,
                 int64_t rows, int32_t threads);

// Copies rows of the weight matrix of a layer that is not gated; ids are int64 and in range.
void rose_panel_rows(const RoseLinear* linear, const int64_t* ids, float* y, int64_t rows,
                     int32_t threads);

}  // extern "C"
