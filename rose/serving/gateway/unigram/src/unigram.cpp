// The library's functions. Python calls them through ctypes, without the interpreter's lock.

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "charsmap.h"
#include "encoder.h"
#include "nfkc.h"

#define ROSE_API extern "C" __attribute__((visibility("default")))

namespace {

using rose::Encoder;

// What an encoder is made of, while Python hands it over piece by piece.
struct Builder {
  std::vector<std::unique_ptr<rose::Stage>> stages;
  std::vector<int32_t> prefix, suffix;
  rose::Words words;
};

// Strings one after another as entries of a trie, with their places as ids where none are given.
std::vector<rose::TrieEntry> entries(const char* bytes, const int64_t* ends, int64_t count,
                                     const double* scores, const int32_t* ids) {
  std::vector<rose::TrieEntry> found(count);
  for (int64_t i = 0, start = 0; i < count; start = ends[i++]) {
    const auto size = static_cast<size_t>(ends[i] - start);
    const auto id = ids ? ids[i] : static_cast<int32_t>(i);
    found[i] = {{bytes + start, size}, id, scores ? scores[i] : 0.0};
  }
  return found;
}

// What a call says where a C++ exception must not leave the library.
template <class Value, class Work>
Value guarded(Value failure, Work work) {
  try {
    return work();
  } catch (const std::exception&) {
    return failure;
  }
}

int add_stage(Builder* builder, rose::Stage* stage) {
  builder->stages.emplace_back(stage);
  return 1;
}

// Encodes texts in turn until none is left.
struct Job {
  Encoder& encoder;
  const char* const* texts;
  const int64_t* lengths;
  int64_t count;
  bool special;
  int32_t* ids;
  int64_t* counts;
  std::vector<int64_t> starts;
  std::atomic<int64_t> next{0};

  void run() {
    for (int64_t i; (i = next++) < count;) {
      const int64_t room = lengths[i] + encoder.slack();
      counts[i] = guarded<int64_t>(-1, [&] {
        const std::string_view text(texts[i], static_cast<size_t>(lengths[i]));
        return encoder.encode(text, special, ids + starts[i], room);
      });
    }
  }
};

void run_on(Job& job, int threads) {
  std::vector<std::thread> helpers;
  try {
    while (static_cast<int>(helpers.size()) < threads - 1) helpers.emplace_back([&] { job.run(); });
  } catch (const std::exception&) {
    // The machine gives no more threads: those that run do the work.
  }
  job.run();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

ROSE_API Builder* rose_unigram_builder() {
  return guarded<Builder*>(nullptr, [] { return new Builder; });
}

ROSE_API void rose_unigram_builder_free(Builder* builder) { delete builder; }

ROSE_API int rose_unigram_words(Builder* builder, int at_white_space, int prepend, int split,
                                const char* mark, int64_t length) {
  return guarded(0, [&] {
    builder->words = {at_white_space != 0, prepend != 0, split != 0,
                      std::string(mark, static_cast<size_t>(length))};
    return 1;
  });
}

ROSE_API int rose_unigram_template(Builder* builder, const int32_t* prefix, int64_t num_prefix,
                                   const int32_t* suffix, int64_t num_suffix) {
  return guarded(0, [&] {
    builder->prefix.assign(prefix, prefix + num_prefix);
    builder->suffix.assign(suffix, suffix + num_suffix);
    return 1;
  });
}

// An empty pattern stands for ` {2,}`.
ROSE_API int rose_unigram_replace(Builder* builder, const char* pattern, int64_t pattern_length,
                                  const char* content, int64_t content_length) {
  return guarded(0, [&] {
    std::string from(pattern, static_cast<size_t>(pattern_length));
    std::string to(content, static_cast<size_t>(content_length));
    if (from.empty()) return add_stage(builder, new rose::CollapseSpaces(std::move(to)));
    return add_stage(builder, new rose::Replace(std::move(from), std::move(to)));
  });
}

ROSE_API int rose_unigram_nmt(Builder* builder) {
  return guarded(0, [&] { return add_stage(builder, new rose::Nmt); });
}

ROSE_API int rose_unigram_nfkc(Builder* builder, const rose::NfkcTables* tables) {
  return guarded(0, [&] { return add_stage(builder, new rose::Nfkc(*tables)); });
}

ROSE_API int rose_unigram_charsmap(Builder* builder, const char* blob, int64_t length,
                                   const uint32_t* borders, int64_t num_borders) {
  return guarded(0, [&] {
    const std::string_view view(blob, static_cast<size_t>(length));
    return add_stage(builder, new rose::Charsmap(view, borders, num_borders));
  });
}

// Pieces are bytes one after another with their ends; so are literals, whose ids are -1 where only
// the `tokenizers` library knows what becomes of them. The builder is used up.
ROSE_API Encoder* rose_unigram_encoder(Builder* builder, const char* pieces, const int64_t* ends,
                                       const double* scores, int64_t count, int32_t unk_id,
                                       int byte_fallback, const char* literals,
                                       const int64_t* literal_ends, const int32_t* literal_ids,
                                       int64_t num_literals) {
  return guarded<Encoder*>(nullptr, [&] {
    return new Encoder(rose::Model(entries(pieces, ends, count, scores, nullptr), unk_id,
                                   byte_fallback != 0),
                       std::move(builder->words), std::move(builder->stages),
                       entries(literals, literal_ends, num_literals, nullptr, literal_ids),
                       std::move(builder->prefix), std::move(builder->suffix));
  });
}

ROSE_API void rose_unigram_free(Encoder* encoder) { delete encoder; }

// Bytes of the trie.
ROSE_API int64_t rose_unigram_num_bytes(const Encoder* encoder) { return encoder->num_bytes(); }

// Ids that a text may have beyond one for each of its bytes.
ROSE_API int64_t rose_unigram_slack(const Encoder* encoder) { return encoder->slack(); }

// The ids of text i begin where the room of text i-1 ends: one for each byte, and the slack.
// counts[i] is their number, or -1 for a text that is the `tokenizers` library's to encode.
ROSE_API int rose_unigram_encode(Encoder* encoder, const char* const* texts, const int64_t* lengths,
                                 int64_t count, int special, int threads, int32_t* ids,
                                 int64_t* counts) {
  return guarded(0, [&] {
    Job job{*encoder, texts, lengths, count, special != 0, ids, counts, {}};
    for (int64_t i = 0, start = 0; i < count; start += lengths[i++] + encoder->slack()) {
      job.starts.push_back(start);
    }
    run_on(job, threads);
    return 1;
  });
}
