// Attention over packed sequences whose keys and values lie in rows side by side or in pages.
//
// A task is one key/value head of one sequence with some of its queries. It transposes the keys into
// panels, and then, for a block of rows (a row is a query of one head of the group), computes all
// scores, their softmax, and the weighted values. Keys keep their places in panels and vectors
// whatever is computed beside them, and what is hidden weighs exactly 0, so the bits of a row depend
// on its query and the keys it sees alone: not on the batch, on chunks of a prompt, or on pages.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "api.h"
#include "block.h"
#include "functions.h"
#include "pool.h"
#include "transpose.h"

namespace rose {
namespace {

constexpr int64_t kTaskRows = 96;  // rows of a task, roughly: enough to pay for transposed keys
constexpr double kNsPerExp = 1.0;

struct Task {
  int64_t sequence, kv_head, first, last;  // queries [first, last) of the sequence
};

// Rows of keys or values of one sequence and head, by position.
struct Rows {
  const float* base;
  int64_t stride;
  const int32_t* pages;  // null where rows lie side by side
  int32_t page_size;

  const float* at(int64_t position) const {
    if (!pages) return base + position * stride;
    const int32_t place = static_cast<int32_t>(position);
    const int64_t page = pages[place / page_size];
    return base + (page * page_size + place % page_size) * stride;
  }

  // How many rows from `position` on lie side by side.
  int64_t run(int64_t position, int64_t end) const {
    if (!pages) return end - position;
    return std::min<int64_t>(end - position, page_size - position % page_size);
  }
};

struct Call {
  const RoseAttention& spec;
  const RoseSequences& batch;
  const float *q, *k, *v;
  int64_t ldq, ldk, ldv;
  float* out;

  int64_t group() const { return spec.num_heads / spec.num_kv_heads; }

  Rows rows(const float* base, int64_t stride, const Task& task) const {
    base += task.kv_head * spec.head_dim;
    if (!batch.block_table)
      return {base + batch.query_starts[task.sequence] * stride, stride, nullptr, 0};
    const int32_t* pages = batch.block_table + task.sequence * batch.table_stride;
    return {base, stride, pages, batch.page_size};
  }
};

// A thread's buffers, which only grow.
struct Scratch {
  std::vector<float> panels, queries, scores, sums, values;

  static float* of(std::vector<float>& buffer, int64_t floats) {
    if (static_cast<int64_t>(buffer.size()) < floats) buffer.resize(floats);
    return buffer.data();
  }
};

// Transposes the keys [begin, end), begin a multiple of kWidth, into panels [dim][kWidth].
void pack_keys(const Rows& keys, int64_t begin, int64_t end, int64_t dim, float* panels) {
  for (int64_t key = begin; key < end; key += kLanes) {
    float* panel = panels + (key - begin) / kWidth * kWidth * dim + (key - begin) % kWidth;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, dim - d);
      Vec square[kLanes] = {};
      for (int i = 0; i < kLanes && key + i < end; ++i) {
        const float* row = keys.at(key + i) + d;
        square[i] = count == kLanes ? load(row) : load_some(row, count, 0.0f);
      }
      transpose(square);
      for (int i = 0; i < count; ++i) store(panel + (d + i) * kWidth, square[i]);
    }
  }
}

struct Span {
  int64_t begin, end;
};

// The keys that the query at `position` sees.
Span visible(const RoseAttention& spec, int64_t position, int64_t keys) {
  return {std::max<int64_t>(0, position - spec.left),
          position + spec.right >= keys ? keys : position + spec.right + 1};
}

// Turns a row of scores into weights that are yet to be divided by the sum that is returned.
// `scores` holds the keys [begin, end), both multiples of kWidth.
float softmax(float* scores, int64_t begin, int64_t end, Span seen, const RoseAttention& spec,
              const float* bias) {
  Vec most = splat(-INFINITY), sums = {};
  VecInt key;
  for (int i = 0; i < kLanes; ++i) key[i] = static_cast<int32_t>(begin) + i;
  const int32_t from = static_cast<int32_t>(seen.begin), to = static_cast<int32_t>(seen.end);
  const int64_t count = end - begin;
  for (int64_t i = 0; i < count; i += kLanes, key += kLanes) {
    Vec s = load(scores + i);
    if (spec.soft_cap > 0.0f)  // tanh x is 2 sigmoid(2 x) - 1
      s = spec.soft_cap * (2.0f * sigmoid(s * (2.0f / spec.soft_cap)) - 1.0f);
    if (bias) s += load(bias + begin + i);
    s = (key >= from) & (key < to) ? s : splat(-INFINITY);
    store(scores + i, s);
    most = vmax(s, most);
  }
  const float peak = largest(most);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = exp(load(scores + i) - peak);
    store(scores + i, weight);
    sums += weight;
  }
  return sum(sums);
}

// Adds weights times values [begin, end) to the sums [rows][columns], columns a multiple of kWidth.
void weigh_values(const Rows& values, int64_t begin, int64_t end, int64_t dim, const float* weights,
                  int64_t ldw, int rows, float* sums, int64_t columns, Scratch& scratch) {
  for (int64_t key = begin; key < end;) {
    int64_t count = values.run(key, end), stride = values.stride;
    const float* from = values.at(key);
    if (dim != columns) {  // rows end within a panel
      count = std::min<int64_t>(count, 256);
      float* copy = Scratch::of(scratch.values, count * columns);
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(copy + i * columns, from + i * stride, sizeof(float) * dim);
        std::fill(copy + i * columns + dim, copy + (i + 1) * columns, 0.0f);
      }
      from = copy;
      stride = columns;
    }
    for (int64_t c = 0; c < columns; c += kWidth)
      kMultiply[rows - 1](weights + key - begin, ldw, from + c, stride, count, sums + c, columns, true);
    key += count;
  }
}

void attend(const Call& call, const Task& task) {
  static thread_local Scratch scratch;
  const RoseAttention& spec = call.spec;
  const int64_t dim = spec.head_dim, group = call.group(), keys = call.batch.kv_lens[task.sequence];
  const int64_t before = keys - call.batch.query_lens[task.sequence];  // cached keys
  const int64_t start = call.batch.query_starts[task.sequence];
  const Rows k = call.rows(call.k, call.ldk, task), v = call.rows(call.v, call.ldv, task);
  const int64_t columns = ceil_div(dim, kWidth) * kWidth;
  const int64_t all_begin = visible(spec, before + task.first, keys).begin / kWidth * kWidth;
  const int64_t all_end = visible(spec, before + task.last - 1, keys).end;
  const int64_t tiles = ceil_div(all_end - all_begin, kWidth), width = tiles * kWidth;
  float* panels = Scratch::of(scratch.panels, tiles * kWidth * dim);
  float* queries = Scratch::of(scratch.queries, kRows * dim);
  float* scores = Scratch::of(scratch.scores, kRows * width);
  float* sums = Scratch::of(scratch.sums, kRows * columns);
  pack_keys(k, all_begin, all_end, dim, panels);

  const Blocks blocks((task.last - task.first) * group);
  for (int64_t b = 0; b < blocks.count; ++b) {
    const int64_t row = blocks.start(b), end_row = blocks.start(b + 1);
    const int rows = static_cast<int>(end_row - row);
    const auto query = [&](int64_t r) { return task.first + r / group; };
    const auto head = [&](int64_t r) { return task.kv_head * group + r % group; };
    for (int r = 0; r < rows; ++r) {
      const float* from = call.q + (start + query(row + r)) * call.ldq + head(row + r) * dim;
      for (int64_t d = 0; d < dim; ++d) queries[r * dim + d] = from[d] * spec.scale;
    }
    const int64_t begin = visible(spec, before + query(row), keys).begin / kWidth * kWidth;
    const int64_t end = visible(spec, before + query(end_row - 1), keys).end;
    const int64_t padded = begin + ceil_div(end - begin, kWidth) * kWidth;
    for (int64_t key = begin; key < padded; key += kWidth)
      kMultiply[rows - 1](queries, dim, panels + (key - all_begin) * dim, kWidth, dim,
                          scores + key - begin, width, false);
    float inverse[kRows];
    for (int r = 0; r < rows; ++r) {
      const int64_t position = before + query(row + r);
      const float* bias = nullptr;
      if (spec.bias) bias = spec.bias + head(row + r) * spec.bias_width + spec.bias_center - position;
      const Span seen = visible(spec, position, keys);
      inverse[r] = 1.0f / softmax(scores + r * width, begin, padded, seen, spec, bias);
    }
    std::fill(sums, sums + rows * columns, 0.0f);
    weigh_values(v, begin, end, dim, scores, width, rows, sums, columns, scratch);
    for (int r = 0; r < rows; ++r) {
      float* to = call.out + ((start + query(row + r)) * spec.num_heads + head(row + r)) * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = sums[r * columns + d] * inverse[r];
    }
  }
}

}  // namespace
}  // namespace rose

using namespace rose;

extern "C" {

ROSE_API void rose_attend(const RoseAttention* spec, const RoseSequences* batch, const float* q,
                          int64_t ldq, const float* k, int64_t ldk, const float* v, int64_t ldv,
                          float* out, int32_t threads) {
  const Call call{*spec, *batch, q, k, v, ldq, ldk, ldv, out};
  const int64_t step = std::max<int64_t>(1, kTaskRows / call.group());
  std::vector<Task> tasks;
  double ns = 0;
  for (int64_t s = 0; s < batch->count; ++s) {
    const int64_t queries = batch->query_lens[s], chunks = ceil_div(queries, step);
    const double pairs = static_cast<double>(queries) * batch->kv_lens[s] * spec->num_heads;
    ns += pairs * (2 * spec->head_dim * kNsPerFma + kNsPerExp);
    ns += kNsPerByte * 8 * spec->head_dim * spec->num_kv_heads * batch->kv_lens[s];
    for (int64_t c = chunks; c-- > 0;)  // the last first: causal ones cost most
      for (int64_t h = 0; h < spec->num_kv_heads; ++h)
        tasks.push_back({s, h, queries * c / chunks, queries * (c + 1) / chunks});
  }
  parallel(threads, tasks.size(), static_cast<int64_t>(ns),
           [&](int64_t i) { attend(call, tasks[i]); });
}

ROSE_API void rose_store_rows(const float* k, int64_t ldk, const float* v, int64_t ldv,
                              const int64_t* slots, int64_t rows, int64_t width, float* keys,
                              float* values, int32_t threads) {
  const int64_t group = std::max<int64_t>(1, ceil_div(rows, 4 * threads));
  const double ns = 4 * kNsPerByte * 4 * rows * width;
  parallel(threads, ceil_div(rows, group), static_cast<int64_t>(ns), [&](int64_t task) {
    const int64_t last = std::min(rows, (task + 1) * group);
    for (int64_t row = task * group; row < last; ++row) {
      std::memcpy(keys + slots[row] * width, k + row * ldk, sizeof(float) * width);
      std::memcpy(values + slots[row] * width, v + row * ldv, sizeof(float) * width);
    }
  });
}

}  // extern "C"
