// A tokenizer of a Unigram model: normaliser, words, pieces, special tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model.h"
#include "stage.h"
#include "trie.h"
#include "utf8.h"

namespace rose {

// How a text is cut into words: the library's WhitespaceSplit, if any, and then its Metaspace.
struct Words {
  bool at_white_space = false;
  bool prepend = true;  // a mark before every word that has none
  bool split = true;    // a word begins at every mark
  std::string mark;     // stands for a space
};

class Encoder {
 public:
  Encoder(Model model, Words words, std::vector<std::unique_ptr<Stage>> stages,
          std::vector<TrieEntry> literals, std::vector<int32_t> prefix, std::vector<int32_t> suffix)
      : model_(std::move(model)),
        words_(std::move(words)),
        stages_(std::move(stages)),
        literals_(literals),
        prefix_(std::move(prefix)),
        suffix_(std::move(suffix)) {
    for (const TrieEntry& literal : literals) begins_[static_cast<uint8_t>(literal.key[0])] = true;
  }

  // Writes a text's ids; returns how many, or -1 for a text that the library has to encode.
  int64_t encode(std::string_view text, bool special, int32_t* ids, int64_t room) {
    auto scratch = borrow();
    Output out{ids, ids + room};
    for (const int32_t id : prefix_) {
      if (special) out.add(id);
    }
    const bool known = encode_text(text, *scratch, out);
    for (const int32_t id : suffix_) {
      if (special) out.add(id);
    }
    give_back(std::move(scratch));
    return known && !out.full ? out.next - ids : -1;
  }

  // Ids around a text, and two more for what a normaliser may put before it.
  int64_t slack() const { return static_cast<int64_t>(prefix_.size() + suffix_.size() + 2); }
  int64_t num_bytes() const { return model_.num_bytes(); }

 private:
  struct Scratch {
    Model::Scratch model;
    std::string text, other, marked;
  };

  // What is kept for later texts; more is returned.
  static constexpr size_t kKeptBytes = 1 << 20;
  static constexpr size_t kKeptScratches = 64;

  std::unique_ptr<Scratch> borrow() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (scratches_.empty()) return std::make_unique<Scratch>();
    auto scratch = std::move(scratches_.back());
    scratches_.pop_back();
    return scratch;
  }

  void give_back(std::unique_ptr<Scratch> scratch) {
    const size_t cells = scratch->model.cells.capacity() * sizeof(Model::Scratch::Cell);
    const size_t texts = scratch->text.capacity() + scratch->other.capacity();
    if (cells + texts + scratch->marked.capacity() > kKeptBytes) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (scratches_.size() < kKeptScratches) scratches_.push_back(std::move(scratch));
  }

  // Added tokens come out of the text first; what is between them is encoded piece by piece.
  bool encode_text(std::string_view text, Scratch& scratch, Output& out) const {
    size_t start = 0;
    for (size_t at = 0; at < text.size();) {
      if (!begins_[static_cast<uint8_t>(text[at])]) {
        ++at;
        continue;
      }
      const Literal found = literal_at(text.substr(at));
      if (found.length && found.id < 0) return false;
      if (found.length) {
        if (!encode_piece(text.substr(start, at - start), scratch, out)) return false;
        out.add(found.id);
        start = at + found.length;
      }
      at += std::max<size_t>(found.length, 1);
    }
    return encode_piece(text.substr(start), scratch, out);
  }

  bool encode_piece(std::string_view text, Scratch& scratch, Output& out) const {
    if (text.empty()) return true;
    scratch.text = text;
    bool ascii = is_printable_ascii(scratch.text);
    bool changed = false;
    for (const auto& stage : stages_) {
      if (ascii && stage->keeps_ascii()) continue;
      scratch.other.clear();
      const Change change = stage->apply(scratch.text, scratch.other);
      if (change == Change::kUnsure) return false;
      if (change == Change::kNone) continue;
      scratch.text.swap(scratch.other);
      ascii = is_printable_ascii(scratch.text);
      changed = true;
    }
    if (changed && has_literal(scratch.text)) return false;
    encode_words(scratch, out);
    return true;
  }

  struct Literal {
    size_t length;  // 0 if there is none
    int32_t id;     // -1 if only the library knows what becomes of it
  };

  // The longest added token that a text starts with.
  Literal literal_at(std::string_view text) const {
    Literal found{0, 0};
    uint32_t node = Trie::kRoot;
    for (size_t i = 0; i < text.size() && found.id >= 0; ++i) {
      if ((node = literals_.child(node, text[i])) == Trie::kNone) break;
      if (literals_.is_key(node)) found = {i + 1, literals_.id(node)};
    }
    return found;
  }

  // Whether an added token is in a text after the normaliser, where the library may look for it.
  bool has_literal(std::string_view text) const {
    for (size_t at = 0; at < text.size(); ++at) {
      if (begins_[static_cast<uint8_t>(text[at])] && literal_at(text.substr(at)).length) return true;
    }
    return false;
  }

  void encode_words(Scratch& scratch, Output& out) const {
    const std::string& text = scratch.text;
    if (!words_.at_white_space) return encode_marked(text, scratch, out);
    for (size_t at = 0; at < text.size();) {
      const size_t start = skip(text, at, true);
      at = skip(text, start, false);
      encode_marked(std::string_view(text).substr(start, at - start), scratch, out);
    }
  }

  // Metaspace: marks in the place of spaces, and words that begin with them.
  void encode_marked(std::string_view text, Scratch& scratch, Output& out) const {
    if (text.empty()) return;
    const std::string_view mark(words_.mark);
    std::string& marked = scratch.marked;
    marked.clear();
    if (words_.prepend && text[0] != ' ' && text.substr(0, mark.size()) != mark) marked = mark;
    for (size_t at = 0;;) {
      const size_t space = std::min(text.find(' ', at), text.size());
      marked.append(text, at, space - at);
      if (space == text.size()) break;
      marked += mark;
      at = space + 1;
    }
    const std::string_view whole(marked);
    for (size_t at = 0; at < whole.size();) {
      const size_t found = words_.split ? whole.find(mark, at + 1) : std::string_view::npos;
      const size_t end = std::min(found, whole.size());
      model_.encode(whole.substr(at, end - at), scratch.model, out);
      at = end;
    }
  }

  // The end of the white space at a place of a text, or of what is none.
  static size_t skip(const std::string& text, size_t at, bool white) {
    for (; at < text.size(); at += char_length(text[at])) {
      if (is_white_space(decode(&text[at], char_length(text[at]))) != white) break;
    }
    return at;
  }

  static bool is_white_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
  }

  const Model model_;
  const Words words_;
  const std::vector<std::unique_ptr<Stage>> stages_;
  const Trie literals_;
  bool begins_[256] = {};
  const std::vector<int32_t> prefix_, suffix_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> scratches_;
};

}  // namespace rose
