// What Python calls through ctypes. Pointers are to contiguous float32 unless said otherwise; strides
// are in elements; `threads` includes the caller.
#pragma once

#include <cstdint>

#define ROSE_API __attribute__((visibility("default")))

extern "C" {

enum RoseStorage : int32_t { kFloats, kHalves, kBytes, kNibbles };

// A packed linear layer. `outputs` counts the channels of the result: a gated layer has twice as many
// rows of weights, all gates first. `panels` holds rose_num_panels panels of [inputs][rose_panel_width]
// elements: floats, their upper halves (bfloat16), or whole numbers of 8 or 4 bits. Of the latter,
// inputs are filled up to whole groups of rose_group_size, and each group of an output has a scale in
// bfloat16, [panels][groups][rose_panel_width]; those of 4 bits have a minimum too, [panels][groups][scale,
// minimum][rose_panel_width]. `bias` is in the order of the panels, or null.
struct RoseLinear {
  void* panels;
  uint16_t* scales;
  float* bias;
  int64_t inputs;
  int64_t outputs;
  int32_t activation;
  int32_t gated;
  int32_t storage;
};

int64_t rose_num_panels(int64_t outputs, int32_t gated);
int64_t rose_panel_width();
int64_t rose_group_size();

// Bytes of a panel, from the inputs and the storage of `linear` alone.
int64_t rose_panel_bytes(const RoseLinear* linear);

// Whether the upper halves of floats are all there is of them.
int32_t rose_fit_halves(const float* weight, int64_t count);

// Packs weight [rows, inputs] and bias [rows] or null into the memory of `linear`.
void rose_pack(const RoseLinear* linear, const float* weight, const float* bias, int32_t threads);

// The same for quantised weights: codes [rows, inputs] of -128 to 127, or of 0 to 15 with `minima` (else
// null); scales and minima are [rows, groups], and bfloat16 holds them exactly.
void rose_pack_codes(const RoseLinear* linear, const int8_t* codes, const float* scales,
                     const float* minima, const float* bias, int32_t threads);

// y = act(x W^T + b), or act(gate) * up; x [rows, inputs], y [rows, outputs].
void rose_linear(const RoseLinear* linear, const float* x, int64_t ldx, float* y, int64_t ldy,
                 int64_t rows, int32_t threads);

// Copies rows of the weight matrix of a layer that is not gated; ids are int64 and in range.
void rose_panel_rows(const RoseLinear* linear, const int64_t* ids, float* y, int64_t rows,
                     int32_t threads);

// Layer norm and RMS norm of x, or of x + residual, which goes to `total` (which may be y). Rows of
// `channels` floats; `bias` may be null.
void rose_layer_norm(const float* x, const float* residual, const float* weight, const float* bias,
                     float* y, float* total, int64_t rows, int64_t channels, float eps,
                     int32_t threads);
void rose_rms_norm(const float* x, const float* residual, const float* weight, float weight_offset,
                   float* y, float* total, int64_t rows, int64_t channels, float eps,
                   int32_t threads);

// Heads of an attention layer. The weights of their norms [head_dim] may be null; `rotary` channels of
// each head are rotated.
struct RoseHeads {
  int64_t num_heads, num_kv_heads, head_dim, rotary;
  const float* q_norm;
  const float* k_norm;
  float norm_offset, eps;
};

// Norms and rotates queries [rows, num_heads, head_dim] and keys [rows, num_kv_heads, head_dim]; cos
// and sin are [rows, rotary]. With `slots` a row's keys and values go to their slot of k_out and v_out,
// else v may be null and is left out.
void rose_norm_and_rotate(const RoseHeads* heads, const float* q, int64_t ldq, const float* k,
                          int64_t ldk, const float* v, int64_t ldv, const float* cos,
                          const float* sin, const int64_t* slots, float* q_out, float* k_out,
                          float* v_out, int64_t rows, int32_t threads);

// layer_norm(word + type + position), where `types` null is type 0 for all.
void rose_embed_and_norm(const int64_t* ids, const int64_t* positions, const int64_t* types,
                         const float* word_table, const float* position_table,
                         const float* type_table, const float* weight, const float* bias, float* y,
                         int64_t rows, int64_t channels, float eps, int32_t threads);

// Pools each sequence of x [tokens, channels] and keeps the first `width` channels: y [sequences, width].
// cu_seqlens is int32 [sequences + 1], starts int32 [sequences] (leading tokens to leave out) or null.
// Modes: 0 mean, 1 sum over the root of the count, 2 mean weighted by position, 3 maximum, 4 first, 5
// last. `channels` is at least as many as a vector has lanes. A sequence without tokens gives zeros.
void rose_pool(const float* x, const int32_t* cu_seqlens, const int32_t* starts, int32_t mode, float* y,
               int64_t sequences, int64_t channels, int64_t width, int32_t threads);

// Facts of an attention layer. A query at position p sees keys p - left to p + right. `soft_cap` 0 is
// none. The bias of a key at distance d (its position minus the query's) to head h is
// bias[h * bias_width + bias_center + d], or 0 where `bias` is null.
struct RoseAttention {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t left, right;
  const float* bias;
  int64_t bias_center, bias_width;
  float scale, soft_cap;
};

// Sequences of a batch: where the new tokens of each begin, how many they are, and how many keys it
// has. With a block table [count, table_stride] keys and values lie in its pages, else beside the new
// tokens, of which all keys are then part.
struct RoseSequences {
  int64_t count;
  const int64_t* query_starts;
  const int64_t* query_lens;
  const int64_t* kv_lens;
  const int32_t* block_table;
  int64_t table_stride;
  int32_t page_size;
};

// Attention; out is [tokens, num_heads, head_dim]. ldk and ldv are the strides of one token or slot.
void rose_attend(const RoseAttention* spec, const RoseSequences* batch, const float* q, int64_t ldq,
                 const float* k, int64_t ldk, const float* v, int64_t ldv, float* out,
                 int32_t threads);

// Copies rows of `width` floats of k and v to their slots.
void rose_store_rows(const float* k, int64_t ldk, const float* v, int64_t ldv, const int64_t* slots,
                     int64_t rows, int64_t width, float* keys, float* values, int32_t threads);

// The attention of a layer: its projections, heads and facts.
struct RoseSelfAttention {
  const RoseLinear* qkv;
  const RoseLinear* output;
  const RoseHeads* heads;
  const RoseAttention* spec;
};

// A batch as one layer sees it. `cos` and `sin` are null where nothing is rotated. With `slots` keys and
// values go to their slots of `keys` and `values`, and are read there.
struct RoseBatch {
  int64_t rows;
  const RoseSequences* sequences;
  const float* cos;
  const float* sin;
  const int64_t* slots;
  float* keys;
  float* values;
  int32_t threads;
};

struct RoseDecoderLayer {
  RoseSelfAttention attention;
  const RoseLinear* up;
  const RoseLinear* down;
  const float* attention_norm;
  const float* mlp_norm;
  float norm_offset, eps;
};

struct RoseEncoderLayer {
  RoseSelfAttention attention;
  const RoseLinear* up;
  const RoseLinear* down;
  const float* attention_norm;
  const float* attention_bias;
  const float* mlp_norm;
  const float* mlp_bias;
  float eps;
};

// A layer with RMS norms before attention and MLP: from x and the residual (null before the first layer)
// to the MLP's output y and the residual to add to it. All are [rows, channels].
void rose_decoder_layer(const RoseDecoderLayer* layer, const RoseBatch* batch, const float* x,
                        const float* residual, float* y, float* next_residual);

// A layer with a layer norm after attention and after the MLP; x and y are [rows, channels].
void rose_encoder_layer(const RoseEncoderLayer* layer, const RoseBatch* batch, const float* x, float* y);

}  // extern "C"
