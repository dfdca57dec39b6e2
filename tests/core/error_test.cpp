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

TEST(Check, TheConditionIsEvaluatedOnce) {
  int calls = 0;
  const auto once = [&calls] { return ++calls == 1; };
  TESSERA_CHECK(once(), ConfigError, "called again");
  EXPECT_EQ(calls, 1);
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

TEST(Check, WorksAsTheOnlyStatementOfAnElse) {
  const bool odd = false;
  if (odd)
    TESSERA_CHECK(false, ConfigError, "not reached");
  else
    TESSERA_CHECK(true, ConfigError, "not thrown");
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

TEST(Invariant, NeedsNoMessage) { EXPECT_THROW(TESSERA_INVARIANT(false, ""), InternalError); }

TEST(Errors, EveryTypeIsCaughtAsErrorAndAPeersFailureAsCommunication) {
  EXPECT_THROW(throw ConfigError("x"), Error);
  EXPECT_THROW(throw IoError("x"), Error);
  EXPECT_THROW(throw CorruptError("x"), Error);
  EXPECT_THROW(throw DeviceError("x"), Error);
  EXPECT_THROW(throw InternalError("x"), Error);
  EXPECT_THROW(throw PeerError("x"), CommError);
  EXPECT_THROW(throw CommError("x"), std::runtime_error);
}

}  // namespace
}  // namespace tessera
