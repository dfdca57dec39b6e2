#include "cli/plot_page.h"

#include "cli/plot_page_parts.h"

namespace tessera::cli {
namespace {

// Inside of a script element only "</script" and "<!--" mean something: no "<" gets there.
std::string escape_json(std::string_view json) {
  std::string escaped;
  escaped.reserve(json.size());
  for (const char c : json) {
    if (c == '<') {
      escaped += "\\u003c";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string plot_page(std::string_view title, std::string_view json) {
  // In one pass from left to right: what is filled in is not searched.
  std::string page;
  std::string_view rest = kPageHtml;
  for (std::size_t at = rest.find("{{"); at != std::string_view::npos; at = rest.find("{{")) {
    page += rest.substr(0, at);
    const std::size_t end = rest.find("}}", at);
    const std::string_view name = rest.substr(at + 2, end - at - 2);
    if (name == "title") {
      page += escape_html(title);
    } else if (name == "style") {
      page += kPageStyle;
    } else if (name == "script") {
      page += kPageScript;
    } else {
      page += escape_json(json);
    }
    rest = rest.substr(end + 2);
  }
  page += rest;
  return page;
}

}  // namespace tessera::cli
