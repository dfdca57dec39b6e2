#include "tessera/core/units.h"

#include <cstdint>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Bytes, AreReadAsPeopleWriteThem) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("300MiB"), 300LL << 20);
  EXPECT_EQ(parse_bytes("1.5GB"), 1500000000);
  EXPECT_EQ(parse_bytes("0.1GB"), 100000000)
      << "0.1 is no binary fraction, but it is meant exactly";
  EXPECT_EQ(parse_bytes("64 KiB"), 65536);
  EXPECT_EQ(parse_bytes(" 2 gib "), 2LL << 30);
  EXPECT_EQ(parse_bytes("1e9"), 1000000000);
  EXPECT_EQ(parse_bytes("7k"), 7000);
  EXPECT_EQ(parse_bytes("5B"), 5);
  EXPECT_EQ(parse_bytes("1TiB"), 1LL << 40);
  EXPECT_EQ(parse_bytes("9007199254740993"), 9007199254740993) << "2^53 + 1 passes no double";
  EXPECT_EQ(parse_bytes("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
}

TEST(Bytes, AreRefusedWhenTheyAreNotAWholeCount) {
  for (const char* text : {"", " ", "B", "-1", "-1GB", "1.5", "0.3B", "1 parsec", "1MiBB", "1e400",
                           "nan", "inf", "9223372036854775808", "0x10", "1,5GB", "12345678901TB"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
  }
}

TEST(Bytes, ExactTextIsReadBackAsTheSameNumber) {
  EXPECT_EQ(exact_bytes(65536), "64KiB");
  EXPECT_EQ(exact_bytes(100000000), "100MB");
  EXPECT_EQ(exact_bytes(4000000000), "4GB");
  EXPECT_EQ(exact_bytes(4097), "4097B");
  EXPECT_EQ(exact_bytes(0), "0B");
  std::mt19937_64 random(3);
  for (int i = 0; i < 10000; ++i) {
    const auto bytes =
        static_cast<std::int64_t>((random() >> (random() % 63 + 1)) << (random() % 8));
    if (bytes >= 0) {
      EXPECT_EQ(parse_bytes(exact_bytes(bytes)), bytes);
    }
  }
}

TEST(Bytes, ForPeopleHaveThreeDigits) {
  EXPECT_EQ(approximate_bytes(0), "0 B");
  EXPECT_EQ(approximate_bytes(1023), "1023 B");
  EXPECT_EQ(approximate_bytes(1536), "1.50 KiB");
  EXPECT_EQ(approximate_bytes(std::uint64_t{100} << 30), "100 GiB");
  EXPECT_EQ(approximate_bytes(std::numeric_limits<std::uint64_t>::max()), "16.0 EiB");
}

TEST(Seconds, AreReadAsPeopleWriteThem) {
  EXPECT_EQ(parse_seconds("30"), 30.0);
  EXPECT_EQ(parse_seconds("10min"), 600.0);
  EXPECT_EQ(parse_seconds("500ms"), 0.5);
  EXPECT_EQ(parse_seconds("2h"), 7200.0);
  EXPECT_EQ(parse_seconds("1.5 s"), 1.5);
  EXPECT_EQ(parse_seconds("5m"), std::nullopt) << "minutes or milli? we do not guess";
  EXPECT_EQ(parse_seconds("-1"), std::nullopt);
  EXPECT_EQ(parse_seconds("inf"), std::nullopt);
  EXPECT_EQ(parse_seconds("1e308h"), std::nullopt);
}

TEST(Numbers, ExactTextIsReadBackAsTheSameValue) {
  for (const double value : {0.0, 0.1, -2.5, 5e-5, 1e30, 1.0 / 3.0, 65536.0}) {
    EXPECT_EQ(parse_number(exact_number(value)), value);
  }
  EXPECT_EQ(parse_number("1.5x"), std::nullopt);
  EXPECT_EQ(parse_number("nan"), std::nullopt);
}

}  // namespace
}  // namespace tessera
