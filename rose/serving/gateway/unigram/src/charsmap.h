// SentencePiece's precompiled map of characters, applied as the `tokenizers` library does.
//
// The library cuts a text into grapheme clusters. Of one shorter than 6 bytes it takes the shortest
// key of the map that the cluster starts with, and puts that key's text in the place of the whole
// cluster. Of others, and where no key is found, it does the same with every character. Which
// characters make up a cluster depends on the Unicode version; wherever versions might differ and
// the difference matters, kUnsure is the answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "stage.h"
#include "utf8.h"

namespace rose {

// How a character behaves at the border of a cluster.
enum Border : uint8_t {
  kPlain,    // begins a cluster
  kJoins,    // belongs to the cluster before it
  kControl,  // a cluster of its own
  kUnclear,  // one of these, or joins what is behind it
};

class Charsmap : public Stage {
 public:
  // The blob of a SentencePiece model; `borders` are triples: first and last point, their class.
  Charsmap(std::string_view blob, const uint32_t* borders, int64_t num_borders) {
    uint32_t bytes = 0;
    if (blob.size() >= 4) std::memcpy(&bytes, blob.data(), 4);
    bytes = std::min<size_t>(bytes, blob.size() - std::min<size_t>(4, blob.size())) & ~3u;
    units_.resize(bytes / 4);
    if (bytes) std::memcpy(units_.data(), blob.data() + 4, bytes);
    texts_ = blob.size() > 4 ? blob.substr(4 + bytes) : "";
    for (int64_t i = 0; i < num_borders; ++i) {
      const uint32_t* border = borders + 3 * i;
      for (uint32_t p = border[0]; p <= border[1]; ++p) table_.at(p) = static_cast<Border>(border[2]);
    }
    for (int c = 0; c < 128; ++c) {
      const char text = static_cast<char>(c);
      stays_[c] = search({&text, 1}).state == Found::kNothing;
    }
    keeps_ascii_ = std::all_of(stays_ + 0x20, stays_ + 0x7F, [](bool stays) { return stays; });
  }

  Change apply(const std::string& in, std::string& out) const override {
    bool changed = false;
    for (size_t at = 0; at < in.size();) {
      const size_t plain = skip_staying(in, at);
      out.append(in, at, plain - at);
      at = plain;
      if (at < in.size() && !take_cluster(in, at, out, changed)) return Change::kUnsure;
    }
    return changed ? Change::kDone : Change::kNone;
  }

  bool keeps_ascii() const override { return keeps_ascii_; }

 private:
  struct Found {
    enum { kNothing, kText, kBroken } state;
    std::string_view text;
  };

  static constexpr size_t kShort = 6;  // clusters below this many bytes are looked up as a whole

  // The text of the shortest key that a string starts with.
  Found search(std::string_view text) const {
    if (units_.empty()) return {Found::kBroken, {}};
    size_t node = offset(units_[0]);
    for (const char label : text) {
      const auto byte = static_cast<uint8_t>(label);
      if (!byte) break;
      node ^= byte;
      if (node >= units_.size()) return {Found::kBroken, {}};
      const uint32_t unit = units_[node];
      if ((unit & (1u << 31 | 0xFF)) != byte) break;
      node ^= offset(unit);
      if (unit >> 8 & 1) return value(node);
    }
    return {Found::kNothing, {}};
  }

  static size_t offset(uint32_t unit) {
    return static_cast<size_t>(unit >> 10) << ((unit & 1u << 9) >> 6);
  }

  Found value(size_t node) const {
    if (node >= units_.size()) return {Found::kBroken, {}};
    const size_t start = units_[node] & ~(1u << 31);
    if (start > texts_.size()) return {Found::kBroken, {}};
    if (start < texts_.size() && (texts_[start] & 0xC0) == 0x80) return {Found::kBroken, {}};
    const size_t end = std::min(texts_.find('\0', start), texts_.size());
    return {Found::kText, std::string_view(texts_).substr(start, end - start)};
  }

  // The end of the ASCII from `at` on that no cluster changes.
  size_t skip_staying(const std::string& text, size_t at) const {
    size_t end = at;
    while (end < text.size() && static_cast<uint8_t>(text[end]) < 0x80 && stays_[+text[end]]) ++end;
    const bool joined = end < text.size() && static_cast<uint8_t>(text[end]) >= 0x80;
    return joined && end > at ? end - 1 : end;
  }

  struct Char {
    uint32_t point;
    size_t length;
    Border border;
  };

  Char char_at(const std::string& text, size_t at) const {
    const int length = char_length(text[at]);
    const uint32_t point = decode(&text[at], length);
    return {point, static_cast<size_t>(length), table_[point]};
  }

  // Takes the cluster at `at` and moves behind it; false where it is not clear what to do.
  bool take_cluster(const std::string& in, size_t& at, std::string& out, bool& changed) const {
    const Char first = char_at(in, at);
    if (first.border == kControl) return take_control(in, at, out, changed);
    if (first.border == kUnclear && starts_key(in, at)) return false;
    size_t end = at + first.length;
    bool clear = true;
    while (end < in.size() && end - at < kShort) {
      const Char next = char_at(in, end);
      if (next.border == kUnclear) {
        const bool alone = end == at + first.length;
        clear = alone && end - at + next.length >= kShort;
        break;
      }
      if (next.border != kJoins) break;
      end += next.length;
    }
    if (!clear && starts_key(in, at)) return false;
    const bool whole = clear && end > at + first.length && end - at < kShort;
    if (whole && search({&in[at], end - at}).state != Found::kNothing) {
      return is_sure(in, at, first) && take(in, at, end - at, out, changed);
    }
    if (!take(in, at, first.length, out, changed)) return false;
    while (at < in.size() && char_at(in, at).border == kJoins) {
      if (!take(in, at, char_at(in, at).length, out, changed)) return false;
    }
    return true;
  }

  bool take_control(const std::string& in, size_t& at, std::string& out, bool& changed) const {
    const bool pair = in[at] == '\r' && at + 1 < in.size() && in[at + 1] == '\n';
    const bool whole = pair && search({&in[at], 2}).state != Found::kNothing;
    if (pair && !whole) return take(in, at, 1, out, changed) && take(in, at, 1, out, changed);
    return take(in, at, whole ? 2 : char_length(in[at]), out, changed);
  }

  // Whether a key starts here that is as short as a cluster that is looked up as a whole.
  bool starts_key(const std::string& in, size_t at) const {
    const std::string_view rest(in);
    return search(rest.substr(at, kShort - 1)).state != Found::kNothing;
  }

  // Whether a cluster begins here in every version of Unicode: a letter below U+0600 with marks.
  bool is_sure(const std::string& in, size_t at, const Char& first) const {
    if (first.border != kPlain || first.point >= 0x600) return false;
    if (first.point == 0xA9 || first.point == 0xAE) return false;  // pictographs
    if (!at) return true;
    do --at;
    while ((in[at] & 0xC0) == 0x80);
    return char_at(in, at).border != kUnclear;
  }

  bool take(const std::string& in, size_t& at, size_t length, std::string& out,
            bool& changed) const {
    const Found found = search({&in[at], length});
    if (found.state == Found::kBroken) return false;
    if (found.state == Found::kText) {
      changed = true;
      out.append(found.text);
    } else {
      out.append(in, at, length);
    }
    at += length;
    return true;
  }

  std::vector<uint32_t> units_;
  std::string texts_;
  CharTable<Border> table_;
  bool stays_[128];
  bool keeps_ascii_;
};

}  // namespace rose
