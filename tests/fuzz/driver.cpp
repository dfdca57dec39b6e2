// Drives a LLVMFuzzerTestOneInput without libFuzzer: seeds from a folder, simple mutations, a fixed
// random generator. The same arguments give the same inputs on every machine, so a failure can be
// repeated; it also prints its input.
//
// usage: fuzz_x [--runs N] [--seed S] [--seconds T] CORPUS_FOLDER
// Ends after N inputs or T seconds, whichever comes first (0: no limit of that kind).
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

struct Arguments {
  std::uint64_t runs = 0;
  std::uint64_t seed = 1;
  double seconds = 0;
  std::string corpus;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool has_value = i + 1 < argc;
    if (name == "--runs" && has_value) {
      arguments.runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (name == "--seed" && has_value) {
      arguments.seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (name == "--seconds" && has_value) {
      arguments.seconds = std::strtod(argv[++i], nullptr);
    } else if (name.rfind("--", 0) != 0 && arguments.corpus.empty()) {
      arguments.corpus = name;
    } else {
      std::fprintf(stderr, "fuzz driver: %s: unknown, or its value is missing\n", name.c_str());
      std::exit(2);
    }
  }
  return arguments;
}

std::vector<std::string> read_corpus(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());  // the order of a folder is no one's promise
  std::vector<std::string> seeds;
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

class Mutator {
 public:
  Mutator(std::vector<std::string> seeds, std::uint64_t seed)
      : seeds_(std::move(seeds)), random_(seed) {}

  std::string next() {
    std::string text = pick(seeds_);
    for (std::uint64_t n = random_() % 6; n > 0; --n) {
      mutate(text);
    }
    return text;
  }

 private:
  const std::string& pick(const std::vector<std::string>& from) {
    return from[random_() % from.size()];
  }
  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  void mutate(std::string& text) {
    static const std::vector<std::string> tokens = {"{",
                                                    "}",
                                                    "[",
                                                    "]",
                                                    ":",
                                                    ",",
                                                    "\"",
                                                    "null",
                                                    "true",
                                                    "false",
                                                    "-1",
                                                    "1e308",
                                                    "1e400",
                                                    "0.5",
                                                    "\"auto\"",
                                                    "\\u0000",
                                                    "\\ud800",
                                                    "\xff",
                                                    "\n",
                                                    "9223372036854775808",
                                                    "1e19",
                                                    "\"300MiB\"",
                                                    "\"enabled\": true",
                                                    "\"stage\": 3"};
    const std::size_t at = below(text.size() + 1);
    const std::size_t length = below(text.size() - at + 1);
    switch (random_() % 6) {
      case 0:
        if (!text.empty()) {
          text[at % text.size()] = static_cast<char>(random_() & 0xffU);
        }
        break;
      case 1:
        text.erase(at, std::min<std::size_t>(length, 1 + below(16)));
        break;
      case 2:
        text.insert(at, pick(tokens));
        break;
      case 3: {
        const std::string& other = pick(seeds_);
        const std::size_t from = below(other.size() + 1);
        text.insert(at, other.substr(from, below(64)));
        break;
      }
      case 4:
        text.insert(at, text.substr(at, std::min<std::size_t>(length, 64)));
        break;
      default: {  // a value replaced by another kind of value
        const std::size_t colon = text.find(':', at);
        if (colon != std::string::npos) {
          const std::size_t end = text.find_first_of(",}", colon);
          text.replace(colon + 1, end == std::string::npos ? end : end - colon - 1, pick(tokens));
        }
      }
    }
  }

  const std::vector<std::string> seeds_;
  std::mt19937_64 random_;
};

// What is being tried, for the report of a failure.
std::string current_input;

extern "C" void show_input(int) {
  constexpr char kTitle[] = "fuzz driver: the input was:\n";
  // Nothing can be done about a report that cannot be written.
  if (::write(STDERR_FILENO, kTitle, sizeof(kTitle) - 1) < 0 ||
      ::write(STDERR_FILENO, current_input.data(), current_input.size()) < 0) {
    return;
  }
}

void run(const std::string& input) {
  current_input = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  std::signal(SIGABRT, show_input);
  if (arguments.corpus.empty() || (arguments.runs == 0 && arguments.seconds <= 0)) {
    std::fprintf(stderr, "usage: %s [--runs N] [--seed S] [--seconds T] CORPUS_FOLDER\n", argv[0]);
    return 2;
  }
  const std::vector<std::string> seeds = read_corpus(arguments.corpus);
  if (seeds.empty()) {
    std::fprintf(stderr, "fuzz driver: %s is empty\n", arguments.corpus.c_str());
    return 2;
  }
  for (const std::string& seed : seeds) {
    run(seed);
  }
  Mutator mutator(seeds, arguments.seed);
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t done = 0;
  while (arguments.runs == 0 || done < arguments.runs) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (arguments.seconds > 0 && elapsed.count() >= arguments.seconds) {
      break;
    }
    run(mutator.next());
    ++done;
  }
  std::printf("%llu inputs from %zu seeds, random seed %llu: no failure\n",
              static_cast<unsigned long long>(done), seeds.size(),
              static_cast<unsigned long long>(arguments.seed));
  return 0;
}
