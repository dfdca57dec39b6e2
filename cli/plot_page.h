// The page of `tessera plot`: one HTML file that needs nothing else, with our style and script
// (cli/plot_page/) and the runs inside. It loads nothing.
//
// Threads: pure functions.
#pragma once

#include <string>
#include <string_view>

namespace tessera::cli {

// Text for HTML, outside of tags and inside of quoted attributes.
std::string escape_html(std::string_view text);

// `json` as plot_json() gives it.
std::string plot_page(std::string_view title, std::string_view json);

}  // namespace tessera::cli
