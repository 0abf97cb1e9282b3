// Whole layers in one call: between two calls from Python, caches go cold and threads fall asleep.
#include <algorithm>

#include "api.h"
#include "workspace.h"

namespace {

thread_local rose::Workspace workspace;

// Projects, rotates and attends: from x [rows, channels] to out [rows, heads * dim].
void attend(const RoseSelfAttention& layer, const RoseBatch& batch, const float* x, float* out) {
  const RoseHeads& heads = *layer.heads;
  const int64_t rows = batch.rows, width = layer.qkv->outputs, inputs = layer.qkv->inputs;
  const int64_t q_width = heads.num_heads * heads.head_dim;
  const int64_t kv_width = heads.num_kv_heads * heads.head_dim, before = workspace.used();
  float* qkv = workspace.take(rows * width);
  float* q_rotated = workspace.take(rows * q_width);
  float* k_rotated = workspace.take(rows * kv_width);
  rose_linear(layer.qkv, x, inputs, qkv, width, rows, batch.threads);
  const float *q = qkv, *k = qkv + q_width, *v = k + kv_width;
  int64_t ldq = width, ldk = width, ldv = width;
  if (batch.slots && !batch.cos) {
    rose_store_rows(k, ldk, v, ldv, batch.slots, rows, kv_width, batch.keys, batch.values,
                    batch.threads);
  } else if (batch.cos) {
    float* k_out = batch.slots ? batch.keys : k_rotated;
    rose_norm_and_rotate(&heads, q, ldq, k, ldk, batch.slots ? v : nullptr, ldv, batch.cos, batch.sin,
                         batch.slots, q_rotated, k_out, batch.values, rows, batch.threads);
    q = q_rotated;
    k = k_rotated;
    ldq = q_width;
    ldk = kv_width;
  }
  if (batch.slots) {
    k = batch.keys;
    v = batch.values;
    ldk = ldv = kv_width;
  }
  float* attended = workspace.take(rows * q_width);
  rose_attend(layer.spec, batch.sequences, q, ldq, k, ldk, v, ldv, attended, batch.threads);
  rose_linear(layer.output, attended, q_width, out, layer.output->outputs, rows, batch.threads);
  workspace.give_back(before);
}

// Floats of the workspace that a layer takes at most.
int64_t needed(const RoseSelfAttention& layer, const RoseLinear& up, int64_t rows) {
  const int64_t channels = layer.output->outputs, q_width = layer.output->inputs;
  return rows * (3 * channels + std::max(2 * layer.qkv->outputs + q_width, up.outputs));
}

}  // namespace

extern "C" {

ROSE_API void rose_decoder_layer(const RoseDecoderLayer* layer, const RoseBatch* batch, const float* x,
                                 const float* residual, float* y, float* next_residual) {
  const RoseDecoderLayer& l = *layer;
  const int64_t rows = batch->rows, channels = l.attention.output->outputs, inner = l.up->outputs;
  const int threads = batch->threads;
  workspace.start(needed(l.attention, *l.up, rows));
  float* sum = workspace.take(rows * channels);
  float* normed = workspace.take(rows * channels);
  float* attended = workspace.take(rows * channels);
  rose_rms_norm(x, residual, l.attention_norm, l.norm_offset, normed, sum, rows, channels, l.eps,
                threads);
  attend(l.attention, *batch, normed, attended);
  rose_rms_norm(attended, residual ? sum : x, l.mlp_norm, l.norm_offset, normed, next_residual, rows,
                channels, l.eps, threads);
  float* hidden = workspace.take(rows * inner);
  rose_linear(l.up, normed, channels, hidden, inner, rows, threads);
  rose_linear(l.down, hidden, inner, y, channels, rows, threads);
}

ROSE_API void rose_encoder_layer(const RoseEncoderLayer* layer, const RoseBatch* batch, const float* x,
                                 float* y) {
  const RoseEncoderLayer& l = *layer;
  const int64_t rows = batch->rows, channels = l.attention.output->outputs, inner = l.up->outputs;
  const int threads = batch->threads;
  workspace.start(needed(l.attention, *l.up, rows));
  float* normed = workspace.take(rows * channels);
  float* out = workspace.take(rows * channels);
  attend(l.attention, *batch, x, out);
  rose_layer_norm(out, x, l.attention_norm, l.attention_bias, normed, normed, rows, channels, l.eps,
                  threads);
  float* hidden = workspace.take(rows * inner);
  rose_linear(l.up, normed, channels, hidden, inner, rows, threads);
  rose_linear(l.down, hidden, inner, out, channels, rows, threads);
  rose_layer_norm(out, normed, l.mlp_norm, l.mlp_bias, y, y, rows, channels, l.eps, threads);
}

}  // extern "C"
