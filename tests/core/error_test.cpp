#include "tessera/core/error.h"

#include <string>

#include <gtest/gtest.h>

#include "tests/support/contains.h"

namespace tessera {
namespace {

int evaluated = 0;
std::string expensive() {
  ++evaluated;
  return "expensive";
}

TEST(Check, MessagePartsAreEvaluatedOnlyOnFailure) {
  evaluated = 0;
  TESSERA_CHECK(1 + 1 == 2, ConfigError, expensive());
  TESSERA_INVARIANT(1 + 1 == 2, expensive());
  EXPECT_EQ(evaluated, 0);
  EXPECT_THROW(TESSERA_CHECK(1 + 1 == 3, ConfigError, expensive()), ConfigError);
  EXPECT_THROW(TESSERA_INVARIANT(1 + 1 == 3, expensive()), InternalError);
  EXPECT_EQ(evaluated, 2);
}

TEST(Check, ThrowsTheNamedTypeWithAllPartsInOrder) {
  try {
    TESSERA_CHECK(false, IoError, "read of ", 42, " bytes failed at ", 1.5);
    FAIL() << "expected IoError";
  } catch (const ConfigError&) {
    FAIL() << "wrong type";
  } catch (const IoError& e) {
    EXPECT_STREQ(e.what(), "read of 42 bytes failed at 1.5");
  }
}

TEST(Invariant, NamesPlaceConditionAndMessage) {
  try {
    TESSERA_INVARIANT(2 < 1, "values ", 2, " and ", 1);
    FAIL() << "expected InternalError";
  } catch (const InternalError& e) {
    const std::string what = e.what();
    EXPECT_HAS(what, "error_test.cpp:");
    EXPECT_HAS(what, "2 < 1: values 2 and 1");
    EXPECT_HAS(what, "please report it");
  }
}

// Who catches Error catches all of them; the launcher tells a peer's failure from one's own.
TEST(Errors, APeersFailureIsOneOfCommunication) {
  EXPECT_THROW(throw PeerError("x"), CommError);
  EXPECT_THROW(throw CommError("x"), Error);
}

}  // namespace
}  // namespace tessera
