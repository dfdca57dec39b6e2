#include "tessera/coordinator/leaf_rule.h"

#include "tessera/core/error.h"

namespace tessera::coordinator {

std::string describe(const LeafRule& rule) {
  switch (rule.kind) {
    case LeafRule::Kind::kName:
      return detail::concat("name '", rule.text, "'");
    case LeafRule::Kind::kNameSuffix:
      return detail::concat("a name that ends in '", rule.text, "'");
    case LeafRule::Kind::kType:
      return detail::concat("type '", rule.text, "'");
    case LeafRule::Kind::kNumelBelow:
      return detail::concat("at most ", rule.numel, " elements per unit inside");
  }
  return "?";
}

}  // namespace tessera::coordinator
