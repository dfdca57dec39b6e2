#!/usr/bin/env python3
"""Checks what no compiler checks: which file may know about which other.

    scripts/check_layers.py [ROOT]     prints "file:line: what; why; remedy" and exits with 1

The tables below are the rules. A change to them is a change of the architecture: give the reason in
docs/architecture.md. The words of the source are compared after comments and string literals are
taken out (cpp_text.py), so prose may name what code may not.
"""
import fnmatch
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import cpp_text  # noqa: E402  (after the path is set, so that the script runs from anywhere)

# A module includes only the modules before it.
MODULES = ("core", "device", "comm", "tier", "quant", "shard", "coordinator", "grad", "optim",
           "checkpoint", "planner", "engine", "report")

# Outside the library, which includes nothing of them: not even the doubles of testing/. They include
# headers of the library and their own, nothing of each other's, except for the pairs in FOLDERS_SHARED.
OUTSIDE = ("models", "cli", "bench", "examples", "tests", "testing")
FOLDERS_SHARED = {("tests", "testing"), ("bench", "testing"), ("tests", "cli"), ("tests", "models"),
                  ("bench", "models"), ("bench", "cli"), ("examples", "models"), ("cli", "models")}

# Units that may include torch. Everything else builds in two seconds and runs under sanitizers.
TORCH_UNITS = (
    "tessera/comm/store.cpp", "tessera/comm/c10d_*", "bench/c10d_yardstick.cpp",
    "tessera/comm/gloo_backend.cpp", "tessera/comm/nccl_backend.cpp", "tessera/comm/bootstrap.cpp",
    "cli/torch_probe.cpp", "cli/train_*.cpp",
    # Where tensors are: their storage, what watches their use, and models made of them.
    "tessera/shard/tensor_storage.*", "tessera/engine/*", "tessera/tessera.h",
    "models/gpt*", "models/plain_trainer.*", "models/random_tokens.cpp",
    "examples/*", "tests/engine/*", "tests/models/*", "tests/cli/train_warnings_test.cpp",
    "tests/cli/import_parity_test.cpp",
    "tests/shard/tensor_storage_test.cpp",
    "tests/optim/torch_adamw_test.cpp", "bench/*_torch_bench.cpp",
    "tests/property/*case*", "tests/property/model_program.*",
    "tests/property/engine_*",
)
# Where c10d and Gloo may be named.
C10D_UNITS = ("tessera/comm/*", "bench/c10d_yardstick.*")
# Where the CUDA run-time, NCCL, or a preprocessor condition on them may be named.
CUDA_UNITS = ("tessera/device/*", "*.cu", "*.cuh", "tessera/comm/nccl_backend.*",
              "tessera/comm/ipc_backend.cpp", "tessera/comm/peer_regions.*",
              "tessera/comm/rank_sum_cuda.h", "testing/cuda_emulation/*",
              "tessera/optim/cuda_*", "tessera/optim/kernels_cuda.cpp",
              "tessera/quant/cuda_*", "tessera/quant/block_codec_cuda.cpp")

HINT_LINES = 800  # a longer file is mentioned, and passes

CPP_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
HEADER_SUFFIXES = (".h", ".cuh")
TEXT_SUFFIXES = CPP_SUFFIXES + (".py", ".cmake", ".txt", ".md", ".json", ".sh", "")
FOLDERS = ("tessera", "python", "scripts", "cmake", "docs", ".ci") + OUTSIDE
# Put together here so that this file passes its own check.
DEBT_WORDS = tuple(a + b for a, b in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("HA", "CK")))

TORCH_INCLUDE = re.compile(r"(torch|ATen|c10|caffe2)/")
C10D_INCLUDE = re.compile(r"(torch/csrc/distributed|gloo)/")
CUDA_INCLUDE = re.compile(r"(cuda|cub|thrust|nccl|cublas|cudnn|nvtx)[\w./]*$|(ATen|c10)/cuda/")
CUDA_CONDITION = re.compile(r"#\s*(?:if|ifdef|ifndef|elif)\b.*(CUDA|NCCL|__NVCC__)")


def matches(path, patterns):
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def module_of(path):
    """The module of "tessera/<module>/...", None for the umbrella header and for other folders."""
    parts = path.split("/")
    return parts[1] if parts[0] == "tessera" and len(parts) > 2 else None


class Checker:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.problems = []  # (path, line, text)
        self.hints = []

    def report(self, path, line, what, why, remedy):
        self.problems.append((path, line, f"{what}; {why}; {remedy}"))

    def files(self):
        for path in sorted(self.root.iterdir()):
            if path.is_file() and path.suffix in TEXT_SUFFIXES and path.name != "LICENSE":
                yield path
        for folder in FOLDERS:
            for path in sorted((self.root / folder).rglob("*")):
                if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
                    yield path

    def run(self):
        num_files = 0
        for file in self.files():
            num_files += 1
            path = file.relative_to(self.root).as_posix()
            self.check_text(path, file.read_bytes())
            if file.suffix in CPP_SUFFIXES:
                self.check_cpp(path, file.read_text(encoding="utf-8", errors="replace"))
        if num_files == 0:
            self.report(str(self.root), 0, "no files were found",
                        "a check of nothing proves nothing", "name the root of the repository")
        return num_files

    # --- every text file ---

    def check_text(self, path, data):
        lines = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.isascii():
                self.report(path, number, "a character outside ASCII",
                            "every tool and terminal must show the same text",
                            "write it in ASCII (\"->\", \"x\", \"us\")")
            for word in DEBT_WORDS:
                if re.search(rb"\b" + word.encode() + rb"\b", line):
                    self.report(path, number, f"the word {word}",
                                "debt in comments is never paid", "do it now, or open an issue")
        num_lines = len(lines) - (lines[-1] == b"")
        if path.endswith(CPP_SUFFIXES + (".py",)) and num_lines > HINT_LINES:
            self.hints.append(f"{path}: {num_lines} lines; is it one subject?")

    # --- C++ ---

    def check_cpp(self, path, source):
        code = cpp_text.without_comments(source)
        if path.endswith(HEADER_SUFFIXES) and not re.search(r"^#pragma once$", code, re.M):
            self.report(path, 1, "no #pragma once", "a header may be included twice",
                        "put it after the opening comment")
        for line in cpp_text.using_namespace_lines(code):
            self.report(path, line, "`using namespace` at file scope",
                        "names of others would appear in every unit below",
                        "name what you use, or put it into a function")
        words = cpp_text.without_literals(code)
        for number, line in enumerate(words.split("\n"), 1):
            if not matches(path, C10D_UNITS) and re.search(r"\bc10d\b", line):
                self.report(path, number, "c10d is named outside tessera/comm",
                            "its names change from release to release",
                            "use tessera/comm/group.h, or extend it")
            condition = CUDA_CONDITION.search(line)
            if condition and not matches(path, CUDA_UNITS):
                self.report(path, number, f"a preprocessor condition on {condition[1]}",
                            "which device runs is decided behind the interfaces",
                            "put the two cases into two files and let CMake choose")
        module = module_of(path)
        if module is not None and module not in MODULES:
            self.report(path, 1, f"tessera/{module} is not a module",
                        "every module has its position in the order",
                        "add it to MODULES in scripts/check_layers.py and to docs/architecture.md")
        for number, form, name in cpp_text.includes(code):
            self.check_include(path, number, form, name)

    def check_include(self, path, number, form, name):
        def report(what, why, remedy):
            self.report(path, number, what, why, remedy)

        if name == "torch/torch.h" and path.endswith(HEADER_SUFFIXES):
            report("torch/torch.h in a header", "every unit below would pay 39 s for it",
                   "include the one header that is needed, in the source file")
        elif C10D_INCLUDE.match(name):
            if not matches(path, C10D_UNITS):
                report(f"{name} outside tessera/comm", "its names change from release to release",
                       "use tessera/comm/group.h, or extend it")
            elif not self.may_use_torch(path):
                report(f"{name} in a torch-free unit", "it could not be built without torch",
                       "move the use into a unit of TORCH_UNITS in scripts/check_layers.py")
        elif TORCH_INCLUDE.match(name) and not self.may_use_torch(path):
            report(f"{name} in a torch-free unit",
                   "it would build in 40 s instead of 2 s and be lost to the sanitizers",
                   "work on raw memory with a DType, or move the use into a unit of TORCH_UNITS")
        if CUDA_INCLUDE.match(name) and not matches(path, CUDA_UNITS):
            report(f"{name} outside tessera/device, comm/nccl_backend and .cu files",
                   "no other module knows which device runs", "use tessera/device/device.h")
        if form == "quotes":
            self.check_own_include(path, name, report)
        elif name.split("/")[0] in ("tessera",) + OUTSIDE:
            report(f"<{name}> in angle brackets", "these mark the headers of others",
                   f'write "{name}"')

    @staticmethod
    def may_use_torch(path):
        # Declarations of Gloo that the torch package leaves out stand for a header of torch's.
        return matches(path, TORCH_UNITS) or "/gloo/" in path

    def check_own_include(self, path, name, report):
        top, target = path.split("/")[0], name.split("/")[0]
        if "/gloo/" in path and name.startswith("gloo/"):
            return
        if target not in ("tessera",) + OUTSIDE:
            report(f'"{name}" is not a full path', "one file must have one name everywhere",
                   'write "tessera/module/file.h", and <...> for the headers of others')
            return
        if not (self.root / name).is_file():
            report(f'"{name}" does not exist', "includes name files from the repository's root",
                   "mend the path")
            return
        if target == "tessera":
            self.check_module_order(path, name, report)
        elif top == "tessera":
            report(f'the library includes "{name}"', "it must build without its users",
                   "move what is needed into a module")
        elif target != top and (top, target) not in FOLDERS_SHARED:
            report(f'{top}/ includes "{name}"', "folders outside the library know only its headers",
                   "move what both need into a module")

    def check_module_order(self, path, name, report):
        module, used = module_of(path), module_of(name)
        if module not in MODULES or used is None and path.count("/") == 1:
            return  # outside the library, or the umbrella header
        if used is None:
            report(f'a module includes "{name}"', "that header includes every module, this one too",
                   "include the headers that are needed")
        elif used not in MODULES or MODULES.index(used) > MODULES.index(module):
            report(f'module {module} includes "{name}"', f"{used} comes after {module} in the order of modules",
                   f"move what is needed down into {module} or below, or pass it in from above")


def main(arguments):
    if len(arguments) > 1:
        print("usage: check_layers.py [ROOT]", file=sys.stderr)
        return 2
    root = arguments[0] if arguments else pathlib.Path(__file__).resolve().parent.parent
    checker = Checker(root)
    num_files = checker.run()
    for path, line, text in checker.problems:
        print(f"{path}:{line}: {text}")
    for hint in checker.hints:
        print(f"hint: {hint}")
    print(f"layer check: {num_files} files, {len(checker.problems)} problems")
    return 1 if checker.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
