#include "tessera/comm/nodelist.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Long enough for any host name (DNS allows 253), short enough for a message.
constexpr std::size_t kMaxHostChars = 255;
constexpr std::size_t kMaxDigits = 9;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_host_char(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' ||
         c == '.';
}

// The text is shown in messages, so whatever a terminal would act on is replaced.
std::string printable(std::string_view text) {
  constexpr std::size_t kMaxShown = 200;
  std::string shown(text.substr(0, kMaxShown));
  std::replace_if(shown.begin(), shown.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text.size() > kMaxShown ? shown + "..." : shown;
}

// A cursor over the text. Every method either consumes what it returns or throws.
class Reader {
 public:
  Reader(std::string_view text, const char* what) : text_(text), what_(what) {}

  bool at_end() const { return position_ == text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[position_]; }
  bool take_if(char c) {
    if (at_end() || text_[position_] != c) return false;
    ++position_;
    return true;
  }
  void take(char c, const char* where) {
    if (!take_if(c)) fail(detail::concat("expected '", c, "' ", where));
  }
  std::string_view digits() {
    const std::size_t begin = position_;
    while (is_digit(peek())) ++position_;
    if (position_ == begin) fail("expected a number");
    if (position_ - begin > kMaxDigits) fail("a number is too long");
    return text_.substr(begin, position_ - begin);
  }
  std::string_view host_chars() {
    const std::size_t begin = position_;
    while (is_host_char(peek())) ++position_;
    return text_.substr(begin, position_ - begin);
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw ConfigError(
        detail::concat(what_, " '", printable(text_), "': ", why, " at character ", position_ + 1));
  }

 private:
  std::string_view text_;
  const char* what_;
  std::size_t position_ = 0;
};

std::uint32_t to_number(std::string_view digits) {
  std::uint32_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return value;
}

std::string padded(std::uint32_t value, std::size_t width) {
  std::string digits = std::to_string(value);
  return digits.size() < width ? std::string(width - digits.size(), '0') + digits : digits;
}

// "[01-03,7]" behind its '[': the numbers, as text.
std::vector<std::string> read_bracket(Reader& reader) {
  std::vector<std::string> numbers;
  do {
    const std::string_view first = reader.digits();
    const std::string_view last = reader.take_if('-') ? reader.digits() : first;
    const std::uint32_t begin = to_number(first);
    const std::uint32_t end = to_number(last);
    if (end < begin) reader.fail("a range runs backwards");
    if (end - begin >= kMaxHosts - numbers.size()) reader.fail("too many hosts");
    for (std::uint32_t value = begin; value <= end; ++value) {
      numbers.push_back(padded(value, first.size()));
    }
  } while (reader.take_if(','));
  reader.take(']', "to end a range");
  return numbers;
}

// One comma-separated entry with its brackets multiplied out. `room` bounds the result.
std::vector<std::string> read_entry(Reader& reader, std::size_t room) {
  std::vector<std::string> hosts{""};
  for (;;) {
    const std::string_view literal = reader.host_chars();
    for (std::string& host : hosts) host += literal;
    if (hosts.front().size() > kMaxHostChars) reader.fail("a host name is too long");
    if (!reader.take_if('[')) break;
    const std::vector<std::string> numbers = read_bracket(reader);
    if (numbers.size() > room / hosts.size()) reader.fail("too many hosts");
    std::vector<std::string> product;
    product.reserve(hosts.size() * numbers.size());
    for (const std::string& host : hosts) {
      for (const std::string& number : numbers) product.push_back(host + number);
    }
    hosts = std::move(product);
  }
  if (hosts.front().empty()) reader.fail("expected a host name");
  return hosts;
}

}  // namespace

std::vector<std::string> parse_nodelist(std::string_view text) {
  Reader reader(text, "host list");
  std::vector<std::string> hosts;
  do {
    if (hosts.size() == kMaxHosts) reader.fail("too many hosts");
    std::vector<std::string> entry = read_entry(reader, kMaxHosts - hosts.size());
    std::move(entry.begin(), entry.end(), std::back_inserter(hosts));
  } while (reader.take_if(','));
  if (!reader.at_end()) reader.fail("expected ',' or the end");
  return hosts;
}

std::vector<int> parse_tasks_per_node(std::string_view text) {
  Reader reader(text, "tasks per node");
  std::vector<int> counts;
  do {
    const std::uint32_t count = to_number(reader.digits());
    std::uint32_t repeat = 1;
    if (reader.take_if('(')) {
      reader.take('x', "in a repetition such as 4(x2)");
      repeat = to_number(reader.digits());
      reader.take(')', "to end a repetition such as 4(x2)");
    }
    if (repeat > kMaxHosts - counts.size()) reader.fail("too many nodes");
    counts.insert(counts.end(), repeat, static_cast<int>(count));
  } while (reader.take_if(','));
  if (!reader.at_end()) reader.fail("expected ',' or the end");
  return counts;
}

}  // namespace tessera::comm
