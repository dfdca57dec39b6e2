// From the command line to an exit code: the only place that turns exceptions into words.
//
//   0    done
//   1    it failed: one line "tessera: error: ..." on stderr
//   2    a flag, a config or the environment is wrong: one line as well, nothing was written
//   130  Ctrl-C
//
// Threads: main thread only.
#pragma once

namespace tessera::cli {

int run_program(int argc, char** argv);

}  // namespace tessera::cli
