// A double-array trie over byte strings: one cache line for each step of a look-up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace rose {

struct TrieEntry {
  std::string_view key;
  int32_t id;
  double score;
};

class Trie {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kRoot = 0;
  static constexpr double kNoKey = -std::numeric_limits<double>::infinity();

  // Of entries with the same key the last one counts.
  explicit Trie(std::vector<TrieEntry> entries) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const TrieEntry& a, const TrieEntry& b) { return a.key < b.key; });
    add_block();
    take(kRoot);
    fill(entries);
    next_free_ = prev_free_ = std::vector<uint32_t>();
    nodes_.shrink_to_fit();
    ids_.shrink_to_fit();
  }

  uint32_t child(uint32_t node, char label) const {
    const uint32_t next = nodes_[node].base ^ static_cast<uint8_t>(label);
    return nodes_[next].check == node ? next : kNone;
  }

  // The score of the key that ends at a node, `kNoKey` if none does.
  double score(uint32_t node) const { return nodes_[node].score; }
  bool is_key(uint32_t node) const { return nodes_[node].score != kNoKey; }
  int32_t id(uint32_t node) const { return ids_[node]; }

  // The node of a string, `kNone` if no key starts with it.
  uint32_t find(std::string_view text, uint32_t node = kRoot) const {
    for (size_t i = 0; i < text.size() && node != kNone; ++i) node = child(node, text[i]);
    return node;
  }

  int64_t num_bytes() const {
    return static_cast<int64_t>(nodes_.size() * (sizeof(Node) + sizeof(int32_t)));
  }

 private:
  struct Node {
    uint32_t base;   // children are at base ^ label
    uint32_t check;  // the parent
    double score;
  };

  struct Range {
    uint32_t node;
    size_t first, last;
    size_t depth;
  };

  // Free places that are tried for siblings before a new block is begun.
  static constexpr int kTries = 64;

  void fill(const std::vector<TrieEntry>& entries) {
    std::vector<Range> todo{{kRoot, 0, entries.size(), 0}};
    std::vector<uint8_t> labels;
    std::vector<size_t> starts;
    while (!todo.empty()) {
      Range range = todo.back();
      todo.pop_back();
      for (; range.first < range.last && entries[range.first].key.size() == range.depth;
           ++range.first) {
        nodes_[range.node].score = entries[range.first].score;
        ids_[range.node] = entries[range.first].id;
      }
      if (range.first == range.last) continue;
      labels.clear();
      starts.clear();
      for (size_t i = range.first; i < range.last; ++i) {
        const auto label = static_cast<uint8_t>(entries[i].key[range.depth]);
        if (labels.empty() || labels.back() != label) labels.push_back(label), starts.push_back(i);
      }
      starts.push_back(range.last);
      const uint32_t base = place(labels);
      nodes_[range.node].base = base;
      for (size_t i = labels.size(); i-- > 0;) {
        const uint32_t next = base ^ labels[i];
        take(next);
        nodes_[next].check = range.node;
        todo.push_back({next, starts[i], starts[i + 1], range.depth + 1});
      }
    }
  }

  uint32_t place(const std::vector<uint8_t>& labels) {
    int tries = 0;
    for (uint32_t at = free_; at != kNone && tries < kTries; at = next_free_[at], ++tries) {
      const uint32_t base = at ^ labels[0];
      if (std::all_of(labels.begin() + 1, labels.end(),
                      [&](uint8_t label) { return is_free(base ^ label); })) {
        return base;
      }
    }
    return add_block();
  }

  bool is_free(uint32_t at) const { return nodes_[at].check == kNone && at != kRoot; }

  // New free places come first: the old ones are what hardly anything fits into.
  uint32_t add_block() {
    const auto start = static_cast<uint32_t>(nodes_.size());
    nodes_.resize(start + 256, Node{0, kNone, kNoKey});
    ids_.resize(start + 256, -1);
    next_free_.resize(start + 256);
    prev_free_.resize(start + 256);
    for (uint32_t i = start; i < start + 256; ++i) {
      next_free_[i] = i + 1;
      prev_free_[i] = i - 1;
    }
    next_free_[start + 255] = free_;
    prev_free_[start] = kNone;
    if (free_ != kNone) prev_free_[free_] = start + 255;
    free_ = start;
    return start;
  }

  void take(uint32_t at) {
    const uint32_t next = next_free_[at], previous = prev_free_[at];
    if (next != kNone) prev_free_[next] = previous;
    (previous != kNone ? next_free_[previous] : free_) = next;
  }

  std::vector<Node> nodes_;
  std::vector<int32_t> ids_;
  std::vector<uint32_t> next_free_, prev_free_;
  uint32_t free_ = kNone;
};

}  // namespace rose
