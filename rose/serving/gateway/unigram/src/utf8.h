// Code points and UTF-8. All text here is valid UTF-8: Python has encoded it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace rose {

inline int char_length(char lead) {
  const auto byte = static_cast<uint8_t>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

inline uint32_t decode(const char* at, int length) {
  const auto* p = reinterpret_cast<const uint8_t*>(at);
  switch (length) {
    case 1: return p[0];
    case 2: return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    case 3: return (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    default:
      return (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
  }
}

inline void append(std::string& text, uint32_t point) {
  if (point < 0x80) {
    text += static_cast<char>(point);
  } else if (point < 0x800) {
    text += static_cast<char>(0xC0 | point >> 6);
    text += static_cast<char>(0x80 | (point & 0x3F));
  } else {
    if (point < 0x10000) {
      text += static_cast<char>(0xE0 | point >> 12);
    } else {
      text += static_cast<char>(0xF0 | point >> 18);
      text += static_cast<char>(0x80 | (point >> 12 & 0x3F));
    }
    text += static_cast<char>(0x80 | (point >> 6 & 0x3F));
    text += static_cast<char>(0x80 | (point & 0x3F));
  }
}

// Whether all characters are ASCII and none is a control character.
inline bool is_printable_ascii(std::string_view text) {
  unsigned odd = 0;
  for (const char c : text) odd |= static_cast<uint8_t>(c - 0x20) > 0x5E;
  return !odd;
}

// Where the next byte from `at` on is that is not ASCII, or `end`.
inline size_t skip_ascii(const std::string& text, size_t at) {
  const size_t end = text.size();
  for (uint64_t eight; at + 8 <= end; at += 8) {
    std::memcpy(&eight, text.data() + at, 8);
    if (eight & 0x8080808080808080ull) break;
  }
  while (at < end && static_cast<uint8_t>(text[at]) < 0x80) ++at;
  return at;
}

// A value for every code point; pages without any are shared.
template <class Value>
class CharTable {
 public:
  CharTable() : index_(0x110000 >> 8, 0), values_(256, Value{}) {}

  Value operator[](uint32_t point) const {
    return values_[static_cast<size_t>(index_[point >> 8]) << 8 | (point & 0xFF)];
  }

  Value& at(uint32_t point) {
    uint16_t& page = index_[point >> 8];
    if (!page) {
      page = static_cast<uint16_t>(values_.size() >> 8);
      values_.resize(values_.size() + 256, Value{});
    }
    return values_[static_cast<size_t>(page) << 8 | (point & 0xFF)];
  }

 private:
  std::vector<uint16_t> index_;
  std::vector<Value> values_;
};

}  // namespace rose
