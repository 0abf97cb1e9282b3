// One step of a normaliser, as the `tokenizers` library takes it.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "utf8.h"

namespace rose {

enum class Change { kNone, kDone, kUnsure };

class Stage {
 public:
  virtual ~Stage() = default;

  // Writes the changed text to `out` (cleared before) and says kDone; or says kNone, or kUnsure
  // where this code does not know what the library does.
  virtual Change apply(const std::string& in, std::string& out) const = 0;

  // Whether printable ASCII stays as it is.
  virtual bool keeps_ascii() const = 0;
};

// Replace with a string as its pattern.
class Replace : public Stage {
 public:
  Replace(std::string pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}

  Change apply(const std::string& in, std::string& out) const override {
    size_t found = in.find(pattern_);
    if (found == std::string::npos) return Change::kNone;
    size_t start = 0;
    for (; found != std::string::npos; found = in.find(pattern_, start)) {
      out.append(in, start, found - start).append(content_);
      start = found + pattern_.size();
    }
    out.append(in, start, std::string::npos);
    return Change::kDone;
  }

  bool keeps_ascii() const override { return !is_printable_ascii(pattern_); }

 private:
  const std::string pattern_, content_;
};

// Replace with the pattern ` {2,}`.
class CollapseSpaces : public Stage {
 public:
  explicit CollapseSpaces(std::string content) : content_(std::move(content)) {}

  Change apply(const std::string& in, std::string& out) const override {
    if (!has_two(in)) return Change::kNone;
    for (size_t start = 0; start < in.size();) {
      size_t end = in.find(' ', start);
      if (end == std::string::npos) end = in.size();
      out.append(in, start, end - start);
      start = std::min(in.find_first_not_of(' ', end), in.size());
      out.append(start - end == 1 ? " " : start > end ? content_ : "");
    }
    return Change::kDone;
  }

  bool keeps_ascii() const override { return false; }

 private:
  static bool has_two(const std::string& text) {
    unsigned found = 0;
    for (size_t i = 1; i < text.size(); ++i) found |= (text[i - 1] == ' ') & (text[i] == ' ');
    return found;
  }

  const std::string content_;
};

// Nmt: control characters go, white space of every kind becomes a space.
class Nmt : public Stage {
 public:
  Change apply(const std::string& in, std::string& out) const override {
    size_t start = 0;
    for (size_t at = next(in, 0); at < in.size(); at = next(in, start)) {
      const int length = char_length(in[at]);
      out.append(in, start, at - start);
      if (is_space(decode(&in[at], length))) out += ' ';
      start = at + length;
    }
    if (!start) return Change::kNone;
    out.append(in, start, std::string::npos);
    return Change::kDone;
  }

  bool keeps_ascii() const override { return true; }

 private:
  static size_t next(const std::string& text, size_t at) {
    while (at < text.size()) {
      const auto lead = static_cast<uint8_t>(text[at]);
      if (lead < 0x80) {
        if ((lead < 0x20 && lead) || lead == 0x7F) return at;
        ++at;
        continue;
      }
      const int length = char_length(text[at]);
      if (lead == 0xC2 || lead == 0xE1 || lead == 0xE2 || lead == 0xEF) {
        const uint32_t point = decode(&text[at], length);
        if (point == 0x8F || point == 0x9F || is_space(point)) return at;
      }
      at += length;
    }
    return at;
  }

  static bool is_space(uint32_t c) {
    return c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
           (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
           c == 0xFEFF || c == 0xFFFD;
  }
};

}  // namespace rose
