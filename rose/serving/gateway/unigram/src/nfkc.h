// Unicode's NFKC by tables that Python's `unicodedata` fills.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stage.h"
#include "utf8.h"

namespace rose {

// What the constructor of `Nfkc` is given.
struct NfkcTables {
  // Characters that have a combining class, a full compatibility decomposition, or both.
  const uint32_t* points;
  const uint8_t* classes;
  const int32_t* lengths;      // of the decompositions, 0 for none
  const uint32_t* decomposed;  // the decompositions, one after another
  int64_t num_points;
  const uint32_t* pairs;  // triples: two characters, and the one that they compose
  int64_t num_pairs;
  const uint32_t* unknown;  // characters of which the tables are no authority
  int64_t num_unknown;
};

class Nfkc : public Stage {
 public:
  explicit Nfkc(const NfkcTables& tables) {
    for (int64_t i = 0; i < tables.num_pairs; ++i) {
      const uint32_t* pair = tables.pairs + 3 * i;
      pairs_[key(pair[0], pair[1])] = pair[2];
      table_.at(pair[1]).kind = kComplex;
    }
    for (uint32_t i = 1; i < kVowels; ++i) table_.at(kVowel + i).kind = kComplex;
    table_.at(kVowel).kind = kComplex;
    for (uint32_t i = 1; i < kTails; ++i) table_.at(kTail + i).kind = kComplex;
    fill(tables);
    for (int64_t i = 0; i < tables.num_points; ++i) classify(tables.points[i]);
    for (int64_t i = 0; i < tables.num_unknown; ++i) table_.at(tables.unknown[i]).kind = kUnknown;
  }

  Change apply(const std::string& in, std::string& out) const override {
    size_t start = 0;
    size_t at = skip_inert(in, 0);
    if (at == in.size()) return Change::kNone;
    std::vector<uint32_t> run;
    for (; at < in.size(); at = skip_inert(in, start)) {
      out.append(in, start, at - start);
      const Entry entry = entry_at(in, at);
      if (entry.kind == kSimple) {
        out += normal_[entry.normal];
        start = at + char_length(in[at]);
        continue;
      }
      pop_starter(out, run);
      start = take_complex(in, at, run);
      if (start == at) return Change::kUnsure;
      normalize(run);
      for (const uint32_t point : run) append(out, point);
    }
    out.append(in, start, std::string::npos);
    return Change::kDone;
  }

  bool keeps_ascii() const override { return true; }

 private:
  enum Kind : uint8_t {
    kInert,    // stays, whatever is around it
    kSimple,   // becomes others that are inert
    kComplex,  // may be reordered or composed with what is before it
    kUnknown,
  };

  struct Entry {
    Kind kind = kInert;
    uint8_t combining = 0;  // the canonical combining class
    uint16_t parts = 0;     // the decomposition's place in `parts_`
    uint16_t normal = 0;    // the normal form's place in `normal_`, of what is kSimple
  };

  // Hangul syllables are composed by arithmetic (Unicode, section 3.12).
  static constexpr uint32_t kLead = 0x1100, kVowel = 0x1161, kTail = 0x11A7, kSyllable = 0xAC00;
  static constexpr uint32_t kLeads = 19, kVowels = 21, kTails = 28;
  static constexpr uint32_t kSyllables = kLeads * kVowels * kTails;

  static uint64_t key(uint32_t first, uint32_t second) {
    return static_cast<uint64_t>(first) << 32 | second;
  }

  void fill(const NfkcTables& tables) {
    const uint32_t* next = tables.decomposed;
    for (int64_t i = 0; i < tables.num_points; ++i) {
      Entry& entry = table_.at(tables.points[i]);
      entry.combining = tables.classes[i];
      if (entry.combining) entry.kind = kComplex;
      if (!tables.lengths[i]) continue;
      entry.parts = static_cast<uint16_t>(parts_.size());
      parts_.emplace_back(next, next + tables.lengths[i]);
      next += tables.lengths[i];
    }
  }

  void classify(uint32_t point) {
    Entry& entry = table_.at(point);
    if (entry.kind == kComplex || !entry.parts) return;
    std::vector<uint32_t> normal{point};
    normalize(normal);
    const uint32_t first = parts_[entry.parts][0];
    const bool complex =
        table_[first].kind == kComplex ||
        std::any_of(normal.begin(), normal.end(),
                    [&](uint32_t part) { return table_[part].kind == kComplex; });
    if (complex) {
      entry.kind = kComplex;
    } else if (normal.size() != 1 || normal[0] != point) {
      entry.kind = kSimple;
      entry.normal = static_cast<uint16_t>(normal_.size());
      std::string text;
      for (const uint32_t part : normal) append(text, part);
      normal_.push_back(text);
    }
  }

  Entry entry_at(const std::string& text, size_t at) const {
    return table_[decode(&text[at], char_length(text[at]))];
  }

  size_t skip_inert(const std::string& text, size_t at) const {
    while ((at = skip_ascii(text, at)) < text.size() && entry_at(text, at).kind == kInert) {
      at += char_length(text[at]);
    }
    return at;
  }

  // Moves the last character of `out` that nothing before it can change, and what is behind it.
  void pop_starter(std::string& out, std::vector<uint32_t>& run) const {
    run.clear();
    for (bool complex = true; complex && !out.empty();) {
      size_t at = out.size() - 1;
      while ((out[at] & 0xC0) == 0x80) --at;
      run.push_back(decode(&out[at], char_length(out[at])));
      complex = table_[run.back()].kind == kComplex;
      out.resize(at);
    }
    std::reverse(run.begin(), run.end());
  }

  // Adds the complex characters from `at` on; returns their end, or `at` if one is unknown.
  size_t take_complex(const std::string& text, size_t at, std::vector<uint32_t>& run) const {
    size_t end = at;
    for (Kind kind; end < text.size(); end += char_length(text[end])) {
      kind = entry_at(text, end).kind;
      if (kind == kUnknown) return at;
      if (kind != kComplex) break;
      run.push_back(decode(&text[end], char_length(text[end])));
    }
    return end;
  }

  void normalize(std::vector<uint32_t>& points) const {
    std::vector<uint32_t> parts;
    for (const uint32_t point : points) decompose(point, parts);
    reorder(parts);
    compose(parts);
    points.swap(parts);
  }

  void decompose(uint32_t point, std::vector<uint32_t>& parts) const {
    if (const uint32_t index = point - kSyllable; index < kSyllables) {
      parts.push_back(kLead + index / (kVowels * kTails));
      parts.push_back(kVowel + index / kTails % kVowels);
      if (index % kTails) parts.push_back(kTail + index % kTails);
    } else if (const uint16_t place = table_[point].parts) {
      parts.insert(parts.end(), parts_[place].begin(), parts_[place].end());
    } else {
      parts.push_back(point);
    }
  }

  void reorder(std::vector<uint32_t>& points) const {
    const auto combining = [&](uint32_t point) { return table_[point].combining; };
    for (auto start = points.begin(); start != points.end();) {
      auto end = start + 1;
      if (combining(*start)) {
        end = std::find_if(start, points.end(), [&](uint32_t p) { return !combining(p); });
        std::stable_sort(start, end, [&](uint32_t a, uint32_t b) {
          return combining(a) < combining(b);
        });
      }
      start = end;
    }
  }

  void compose(std::vector<uint32_t>& points) const {
    size_t size = 0, starter = 0;
    bool has_starter = false;
    for (const uint32_t point : points) {
      const int combining = table_[point].combining;
      if (has_starter && (size == starter + 1 || table_[points[size - 1]].combining < combining)) {
        if (const uint32_t both = pair(points[starter], point)) {
          points[starter] = both;
          continue;
        }
      }
      if (!combining) starter = size, has_starter = true;
      points[size++] = point;
    }
    points.resize(size);
  }

  // What two characters compose, or 0.
  uint32_t pair(uint32_t first, uint32_t second) const {
    const uint32_t lead = first - kLead, vowel = second - kVowel;
    if (lead < kLeads && vowel < kVowels) return kSyllable + (lead * kVowels + vowel) * kTails;
    const uint32_t syllable = first - kSyllable, tail = second - kTail;
    if (syllable < kSyllables && syllable % kTails == 0 && tail - 1 < kTails - 1) {
      return first + tail;
    }
    const auto found = pairs_.find(key(first, second));
    return found == pairs_.end() ? 0 : found->second;
  }

  CharTable<Entry> table_;
  std::vector<std::vector<uint32_t>> parts_{{}};  // 0 stands for none
  std::vector<std::string> normal_;
  std::unordered_map<uint64_t, uint32_t> pairs_;
};

}  // namespace rose
