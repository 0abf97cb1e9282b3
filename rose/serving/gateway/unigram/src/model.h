// The Unigram model: the best pieces of a word by their scores, as the `tokenizers` library finds
// them: the same sums in double, in the same order, and of equals the one that is found first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include "trie.h"
#include "utf8.h"

namespace rose {

// Token ids of one text; `full` once there were more than fit.
struct Output {
  int32_t* next;
  int32_t* end;
  bool full = false;

  void add(int32_t id) {
    if (next == end) {
      full = true;
    } else {
      *next++ = id;
    }
  }
};

class Model {
 public:
  // What a thread needs to encode words.
  struct Scratch {
    struct Cell {
      double score;    // of the best pieces up to here
      uint32_t start;  // of the last of them
      uint32_t node;   // its node, `kNone` for an unknown character
    };
    std::vector<Cell> cells;
    std::vector<uint32_t> ends;
  };

  Model(std::vector<TrieEntry> entries, int32_t unk_id, bool byte_fallback)
      : trie_(entries), unk_id_(unk_id) {
    double least = -Trie::kNoKey;
    for (const TrieEntry& entry : entries) least = std::min(least, entry.score);
    unk_score_ = least - 10.0;
    has_bytes_ = byte_fallback;
    for (int byte = 0; byte < 256; ++byte) {
      char name[8];
      std::snprintf(name, sizeof name, "<0x%02X>", byte);
      byte_ids_[byte] = id_of(name);
    }
  }

  void encode(std::string_view word, Scratch& scratch, Output& out) const {
    auto& cells = scratch.cells;
    search(word, cells);
    auto& ends = scratch.ends;
    ends.clear();
    for (auto at = static_cast<uint32_t>(word.size()); at; at = cells[at].start) ends.push_back(at);
    size_t unknown = std::string_view::npos;  // where characters without a piece began
    for (size_t i = ends.size(); i-- > 0;) {
      const auto& cell = cells[ends[i]];
      const int32_t id = cell.node == Trie::kNone ? unk_id_ : trie_.id(cell.node);
      if (id == unk_id_) {
        unknown = std::min<size_t>(unknown, cell.start);
        continue;
      }
      flush(word, unknown, cell.start, out);
      out.add(id);
    }
    flush(word, unknown, word.size(), out);
  }

  int64_t num_bytes() const { return trie_.num_bytes(); }

 private:
  using Cells = std::vector<Scratch::Cell>;

  // Fills in the best way to every place of a word.
  void search(std::string_view word, Cells& cells) const {
    const size_t size = word.size();
    cells.assign(size + 1, {Trie::kNoKey, 0, Trie::kNone});
    cells[0].score = 0;
    for (size_t start = 0; start < size;) {
      const double score = cells[start].score;
      const size_t next = start + char_length(word[start]);
      bool single = false;
      uint32_t node = Trie::kRoot;
      for (size_t at = start; at < size && (node = trie_.child(node, word[at])) != Trie::kNone;) {
        ++at;
        // A node that ends no piece has a score of minus infinity.
        better(cells[at], score + trie_.score(node), start, node);
        if (at == next) single = trie_.is_key(node);
      }
      if (!single) better(cells[next], score + unk_score_, start, Trie::kNone);
      start = next;
    }
  }

  static void better(Scratch::Cell& cell, double score, size_t start, uint32_t node) {
    if (score > cell.score) cell = {score, static_cast<uint32_t>(start), node};
  }

  // Adds what stands for unknown characters in a row, which become one token.
  void flush(std::string_view word, size_t& start, size_t end, Output& out) const {
    if (start == std::string_view::npos) return;
    const std::string_view text = word.substr(start, end - start);
    start = std::string_view::npos;
    if (const int32_t id = id_of(text); id >= 0) return out.add(id);
    const bool bytes = has_bytes_ && std::all_of(text.begin(), text.end(), [&](char c) {
      return byte_ids_[static_cast<uint8_t>(c)] >= 0;
    });
    if (!bytes) return out.add(unk_id_);
    for (const char c : text) out.add(byte_ids_[static_cast<uint8_t>(c)]);
  }

  int32_t id_of(std::string_view text) const {
    const uint32_t node = trie_.find(text);
    return node != Trie::kNone && trie_.is_key(node) ? trie_.id(node) : -1;
  }

  Trie trie_;
  int32_t unk_id_;
  double unk_score_;
  bool has_bytes_;
  std::array<int32_t, 256> byte_ids_;
};

}  // namespace rose
