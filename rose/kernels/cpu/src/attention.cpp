// Attention over packed sequences whose keys and values lie in rows side by side or in pages.
//
// A task is some queries of one sequence with one key/value head or, where there are enough sequences,
// one head after another. It transposes a head's keys into panels, and then, for a block of rows (a row
// is a query of one head of the group), computes all scores, their softmax, and the weighted values. Keys keep their places in panels and vectors
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
#include "workspace.h"

namespace rose {
namespace {

// Rows of a task, roughly. Each task transposes its keys, so larger ones are better where they are
// many enough for all threads.
constexpr int64_t kTaskRows = 96, kLargeTaskRows = 512;
constexpr int64_t kFewBlocks = 2;  // of rows, for which values are not worth a copy
constexpr int64_t kCopiedValues = 256;  // rows at most, where they are copied for one block
constexpr double kNsPerExp = 1.0;

// Queries [first, last) of a sequence with the kv heads [first_head, last_head).
struct Task {
  int64_t sequence, first, last, first_head, last_head;
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
  int64_t most_keys = 0;  // that a task sees

  int64_t group() const { return spec.num_heads / spec.num_kv_heads; }
  int64_t queries_of(int64_t rows) const { return std::max<int64_t>(1, rows / group()); }

  int64_t chunks(int64_t queries) const {
    int64_t count = 0;
    for (int64_t s = 0; s < batch.count; ++s) count += ceil_div(batch.query_lens[s], queries);
    return count;
  }

  int64_t panel_columns() const { return ceil_div(spec.head_dim, kWidth) * kWidth; }

  // Floats of the workspace for so many keys: panels, queries, scores, sums, values.
  int64_t needed(int64_t keys) const {
    return keys * spec.head_dim + kRows * (spec.head_dim + keys + panel_columns()) + copied(keys);
  }
  int64_t copied(int64_t keys) const { return std::max(keys, kCopiedValues) * panel_columns(); }

  Rows rows(const float* base, int64_t stride, int64_t sequence, int64_t kv_head) const {
    base += kv_head * spec.head_dim;
    if (!batch.block_table)
      return {base + batch.query_starts[sequence] * stride, stride, nullptr, 0};
    const int32_t* pages = batch.block_table + sequence * batch.table_stride;
    return {base, stride, pages, batch.page_size};
  }
};

thread_local Workspace workspace;

// Asks for `floats` of each of the rows from `position` on, as many as lie side by side, which come
// cold from pages.
void prefetch(const Rows& rows, int64_t position, int64_t end, int64_t floats) {
  if (!rows.pages || position >= end) return;
  const float* row = rows.at(position);
  const int64_t count = rows.run(position, std::min<int64_t>(end, position + kLanes));
  for (int64_t i = 0; i < count; ++i, row += rows.stride)
    for (int64_t d = 0; d < floats; d += 16) __builtin_prefetch(row + d);
}

// Finds the rows from `position` on, as many as a vector has lanes but none from `end` on.
int find_rows(const Rows& rows, int64_t position, int64_t end, const float* (&found)[kLanes]) {
  const int64_t wanted = std::min<int64_t>(kLanes, end - position);
  for (int64_t i = 0; i < wanted;) {
    const float* row = rows.at(position + i);
    const int64_t stop = i + rows.run(position + i, position + wanted);
    for (; i < stop; ++i, row += rows.stride) found[i] = row;
  }
  return static_cast<int>(wanted);
}

// Transposes the keys [begin, end), begin a multiple of kWidth, into panels [dim][kWidth]. `floats` of
// each row will be wanted, by this head and the next ones.
void pack_keys(const Rows& keys, int64_t begin, int64_t end, int64_t dim, int64_t floats,
               float* panels) {
  const float* rows[kLanes];
  for (int64_t key = begin; key < end; key += kLanes) {
    const int count = find_rows(keys, key, end, rows);
    prefetch(keys, key + 2 * kLanes, end, floats);
    float* panel = panels + (key - begin) / kWidth * kWidth * dim + (key - begin) % kWidth;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t channels = std::min<int64_t>(kLanes, dim - d);
      Vec square[kLanes] = {};
      for (int i = 0; i < count; ++i)
        square[i] = channels == kLanes ? load(rows[i] + d) : load_some(rows[i] + d, channels, 0.0f);
      transpose(square);
      for (int i = 0; i < channels; ++i) store(panel + (d + i) * kWidth, square[i]);
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

// Scores are logarithms to base 2, so that a power of two makes a weight of each. What changes them,
// changes natural ones.
bool are_changed(const RoseAttention& spec) { return spec.soft_cap > 0.0f || spec.bias; }

// Caps a row of scores, adds the bias, and hides what the query does not see; returns the largest.
// `scores` and `bias` hold `count` keys from `begin` on, both multiples of kWidth.
Vec mask(float* scores, int64_t begin, int64_t count, Span seen, const RoseAttention& spec,
         const float* bias) {
  Vec most = splat(-INFINITY);
  VecInt key;
  for (int i = 0; i < kLanes; ++i) key[i] = static_cast<int32_t>(begin) + i;
  if (!are_changed(spec) && seen.begin <= begin && seen.end >= begin + count) {
    for (int64_t i = 0; i < count; i += kLanes) most = vmax(load(scores + i), most);
    return most;
  }
  const int32_t from = static_cast<int32_t>(seen.begin), to = static_cast<int32_t>(seen.end);
  for (int64_t i = 0; i < count; i += kLanes, key += kLanes) {
    Vec s = load(scores + i);
    if (spec.soft_cap > 0.0f)  // tanh x is 2 sigmoid(2 x) - 1
      s = spec.soft_cap * (2.0f * sigmoid(s * (2.0f / spec.soft_cap)) - 1.0f);
    if (bias) s += load(bias + i);
    if (are_changed(spec)) s *= kLog2e;
    s = (key >= from) & (key < to) ? s : splat(-INFINITY);
    store(scores + i, s);
    most = vmax(s, most);
  }
  return most;
}

// Turns a row of scores into weights that are yet to be divided by their sum, which is returned.
Vec powers(float* scores, int64_t count, float largest) {
  Vec sums = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = power_of_two(load(scores + i) - largest);
    store(scores + i, weight);
    sums += weight;
  }
  return sums;
}

// Copies rows of `dim` floats to rows of `columns`, filled up with zeros.
void copy_rows(const float* from, int64_t stride, int64_t count, int64_t dim, float* to,
               int64_t columns) {
  for (int64_t i = 0; i < count; ++i, from += stride, to += columns) {
    std::memcpy(to, from, sizeof(float) * dim);
    std::fill(to + dim, to + columns, 0.0f);
  }
}

// Adds weights times values [begin, end) to the sums [rows][columns], columns a multiple of kWidth.
void weigh_values(const Rows& values, int64_t begin, int64_t end, int64_t dim, int64_t floats,
                  const float* weights, int64_t ldw, int rows, float* sums, int64_t columns,
                  float* copy) {
  for (int64_t key = begin; key < end;) {
    int64_t count = values.run(key, end), stride = values.stride;
    const float* from = values.at(key);
    if (dim != columns) {  // rows end within a panel
      count = std::min<int64_t>(count, kCopiedValues);
      copy_rows(from, stride, count, dim, copy, columns);
      from = copy;
      stride = columns;
    }
    prefetch(values, key + count, end, floats);
    for (int64_t c = 0; c < columns; c += kWidth)
      kMultiply<Floats>[rows - 1](weights + key - begin, ldw, {from + c, stride}, count,
                                  {sums + c, columns}, sums + c, columns);
    key += count;
  }
}

// One kv head of a task.
class Head {
 public:
  Head(const Call& call, const Task& task, int64_t kv_head)
      : call_(call), spec_(call.spec), task_(task), kv_head_(kv_head) {
    const int64_t s = task.sequence;
    keys_ = call.batch.kv_lens[s];
    cached_ = keys_ - call.batch.query_lens[s];
    start_ = call.batch.query_starts[s];
    columns_ = call.panel_columns();
    wanted_ = (task.last_head - kv_head) * spec_.head_dim;
    if (kv_head > task.first_head) wanted_ = 0;  // the first head has asked for all
  }

  void run() {
    const int64_t dim = spec_.head_dim;
    const int64_t begin = round_down(visible(spec_, cached_ + task_.first, keys_).begin);
    const int64_t end = visible(spec_, cached_ + task_.last - 1, keys_).end;
    width_ = round_down(end - begin + kWidth - 1);
    workspace.start(call_.needed(call_.most_keys));  // the same for all tasks, or it would move
    panels_ = workspace.take(width_ * dim);
    queries_ = workspace.take(kRows * dim);
    scores_ = workspace.take(kRows * width_);
    sums_ = workspace.take(kRows * columns_);
    copied_ = workspace.take(call_.copied(width_));
    pack_keys(call_.rows(call_.k, call_.ldk, task_.sequence, kv_head_), begin, end, dim, wanted_,
              panels_);
    const Blocks blocks((task_.last - task_.first) * call_.group());
    values_ = call_.rows(call_.v, call_.ldv, task_.sequence, kv_head_);
    values_dim_ = dim;
    if (blocks.count > kFewBlocks && (values_.pages || dim != columns_)) pack_values(begin, end);
    for (int64_t b = 0; b < blocks.count; ++b) {
      block(blocks.start(b), static_cast<int>(blocks.start(b + 1) - blocks.start(b)), begin);
      wanted_ = 0;
    }
  }

 private:
  const Call& call_;
  const RoseAttention& spec_;
  const Task& task_;
  int64_t kv_head_, keys_, cached_, start_, columns_, wanted_, width_ = 0;
  Rows values_{};
  int64_t values_dim_ = 0;  // floats of a row of `values_`
  float *panels_ = nullptr, *queries_ = nullptr, *scores_ = nullptr, *sums_ = nullptr;
  float* copied_ = nullptr;  // values

  // Puts values [begin, end) side by side, in rows that are whole panels.
  void pack_values(int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end;) {
      const int64_t count = values_.run(key, end);
      prefetch(values_, key + count, end, wanted_);
      copy_rows(values_.at(key), values_.stride, count, spec_.head_dim,
                copied_ + (key - begin) * columns_, columns_);
      key += count;
    }
    values_ = {copied_ - begin * columns_, columns_, nullptr, 0};
    values_dim_ = columns_;
  }

  static int64_t round_down(int64_t key) { return key / kWidth * kWidth; }
  int64_t query(int64_t row) const { return task_.first + row / call_.group(); }
  int64_t head(int64_t row) const { return kv_head_ * call_.group() + row % call_.group(); }
  int64_t position(int64_t row) const { return cached_ + query(row); }

  // Rows [row, row + rows); the panels start at key `panels_begin`.
  void block(int64_t row, int rows, int64_t panels_begin) {
    const int64_t dim = spec_.head_dim;
    const int64_t begin = round_down(visible(spec_, position(row), keys_).begin);
    const int64_t end = visible(spec_, position(row + rows - 1), keys_).end;
    const int64_t width = round_down(end - begin + kWidth - 1);
    load_queries(row, rows);
    for (int64_t key = 0; key < width; key += kWidth)
      kMultiply<Floats>[rows - 1](queries_, dim, {panels_ + (begin - panels_begin + key) * dim}, dim,
                                  {}, scores_ + key, width_);
    Vec folded[kRows];  // step by step over all rows: the steps of one row wait for each other
    for (int r = 0; r < rows; ++r) {
      const int64_t at = position(row + r);
      const float* bias = spec_.bias;
      if (bias) bias += head(row + r) * spec_.bias_width + spec_.bias_center - at + begin;
      folded[r] = mask(scores_ + r * width_, begin, width, visible(spec_, at, keys_), spec_, bias);
    }
    for (int r = 0; r < rows; ++r)
      folded[r] = powers(scores_ + r * width_, width, largest(folded[r]));
    std::fill(sums_, sums_ + rows * columns_, 0.0f);
    weigh_values(values_, begin, end, values_dim_, wanted_, scores_, width_, rows, sums_,
                 columns_, copied_);
    for (int r = 0; r < rows; ++r) {
      const int64_t token = start_ + query(row + r);
      float* to = call_.out + (token * spec_.num_heads + head(row + r)) * dim;
      const float factor = 1.0f / sum(folded[r]);
      for (int64_t d = 0; d < dim; ++d) to[d] = sums_[r * columns_ + d] * factor;
    }
  }

  void load_queries(int64_t row, int rows) {
    const int64_t dim = spec_.head_dim;
    const float scale = are_changed(spec_) ? spec_.scale : spec_.scale * kLog2e;
    for (int r = 0; r < rows; ++r) {
      const float* from = call_.q + (start_ + query(row + r)) * call_.ldq + head(row + r) * dim;
      for (int64_t d = 0; d < dim; ++d) queries_[r * dim + d] = from[d] * scale;
    }
  }
};

}  // namespace
}  // namespace rose

using namespace rose;

extern "C" {

ROSE_API void rose_attend(const RoseAttention* spec, const RoseSequences* batch, const float* q,
                          int64_t ldq, const float* k, int64_t ldk, const float* v, int64_t ldv,
                          float* out, int32_t threads) {
  Call call{*spec, *batch, q, k, v, ldq, ldk, ldv, out};
  const int64_t heads = spec->num_kv_heads, enough = 4 * threads;
  int64_t step = call.queries_of(kLargeTaskRows), chunks = call.chunks(step);
  if (heads * chunks < enough) {
    step = call.queries_of(kTaskRows);
    chunks = call.chunks(step);
  }
  const int64_t share = chunks >= enough ? heads : 1;
  std::vector<Task> tasks;
  double ns = 0;
  for (int64_t s = 0; s < batch->count; ++s) {
    const int64_t queries = batch->query_lens[s], keys = batch->kv_lens[s];
    ns += spec->num_heads * queries * keys * (2 * spec->head_dim * kNsPerFma + kNsPerExp);
    ns += kNsPerByte * 8 * spec->head_dim * heads * keys;
    const int64_t seen = std::min(keys, std::min(queries, step) + spec->left + spec->right);
    call.most_keys = std::max(call.most_keys, ceil_div(seen, kWidth) * kWidth + kWidth);
    const int64_t parts = ceil_div(queries, step);
    for (int64_t p = parts; p-- > 0;)  // the last first: causal ones cost most
      for (int64_t h = 0; h < heads; h += share)
        tasks.push_back({s, queries * p / parts, queries * (p + 1) / parts, h, h + share});
  }
  parallel(threads, tasks.size(), static_cast<int64_t>(ns), [&](int64_t i) {
    for (int64_t h = tasks[i].first_head; h < tasks[i].last_head; ++h) Head(call, tasks[i], h).run();
  });
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
