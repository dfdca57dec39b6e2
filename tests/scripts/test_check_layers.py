"""Plants each violation in a small tree of its own and sees it reported, at its line, once."""
import io
import pathlib
import sys
import tempfile
import unittest
from contextlib import redirect_stdout

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_layers  # noqa: E402
import cpp_text  # noqa: E402

HEADER = "// What it is for.\n#pragma once\n"


class TreeTest(unittest.TestCase):
    """A tree that passes, to which each test adds one file."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for module in ("core", "device", "comm", "tier"):
            self.write(f"tessera/{module}/thing.h", HEADER)
        self.write("tests/support/ranks.h", HEADER)
        self.write("cli/command.h", HEADER)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    def problems(self):
        checker = check_layers.Checker(self.root)
        checker.run()
        return checker.problems

    def assert_clean(self, path, text):
        self.write(path, text)
        self.assertEqual(self.problems(), [])

    def assert_reported(self, path, text, line, words):
        self.write(path, text)
        found = self.problems()
        self.assertEqual([(p, n) for p, n, _ in found], [(path, line)], found)
        self.assertIn(words, found[0][2])
        # what; why; remedy
        self.assertGreaterEqual(found[0][2].count("; "), 2, found[0][2])


class ModuleOrder(TreeTest):
    def test_a_module_may_include_itself_and_the_modules_before_it(self):
        self.assert_clean("tessera/device/x.cpp",
                          '#include "tessera/core/thing.h"\n#include "tessera/device/thing.h"\n')

    def test_a_module_that_includes_a_later_one_is_reported(self):
        self.assert_reported("tessera/core/x.cpp", '// c\n\n#include "tessera/comm/thing.h"\n', 3,
                             "comm comes after core")

    def test_the_order_is_the_one_of_the_design(self):
        self.assertEqual(" ".join(check_layers.MODULES),
                         "core device comm tier quant shard coordinator grad optim checkpoint "
                         "planner engine report")

    def test_a_folder_that_is_no_module_is_reported(self):
        self.assert_reported("tessera/utils/x.cpp", "int x;\n", 1, "tessera/utils is not a module")

    def test_the_umbrella_header_may_include_every_module(self):
        self.assert_clean("tessera/tessera.h", HEADER + '#include "tessera/tier/thing.h"\n')

    def test_a_module_that_includes_the_umbrella_header_is_reported(self):
        self.write("tessera/tessera.h", HEADER)
        self.assert_reported("tessera/core/x.cpp", '#include "tessera/tessera.h"\n', 1,
                             "includes every module")

    def test_the_library_may_not_include_the_doubles_of_tests(self):
        self.write("testing/mock_device.h", HEADER)
        self.assert_clean("tests/device/x_test.cpp", '#include "testing/mock_device.h"\n')
        self.assert_reported("tessera/device/x.cpp", '#include "testing/mock_device.h"\n', 1,
                             "the library includes")

    def test_the_program_may_not_include_the_doubles_of_tests(self):
        self.write("testing/mock_device.h", HEADER)
        self.assert_reported("cli/x.cpp", '#include "testing/mock_device.h"\n', 1, "cli/ includes")

    def test_the_library_may_not_include_what_is_outside_of_it(self):
        self.assert_reported("tessera/core/x.cpp", '#include "cli/command.h"\n', 1,
                             "the library includes")

    def test_outside_folders_may_include_the_library_and_themselves(self):
        self.assert_clean("tests/core/x_test.cpp",
                          '#include "tessera/tier/thing.h"\n#include "tests/support/ranks.h"\n'
                          '#include "cli/command.h"\n')

    def test_outside_folders_may_not_include_each_other(self):
        self.assert_reported("cli/x.cpp", '#include "tests/support/ranks.h"\n', 1,
                             "cli/ includes")


class IncludePaths(TreeTest):
    def test_a_relative_include_is_reported(self):
        self.assert_reported("tessera/core/x.cpp", '#include "thing.h"\n', 1, "not a full path")

    def test_an_include_of_a_file_that_does_not_exist_is_reported(self):
        self.assert_reported("tessera/core/x.cpp", '#include "tessera/core/no.h"\n', 1,
                             "does not exist")

    def test_our_header_in_angle_brackets_is_reported(self):
        self.assert_reported("tessera/core/x.cpp", "#include <tessera/core/thing.h>\n", 1,
                             "angle brackets")


class Torch(TreeTest):
    def test_every_family_of_torch_headers_is_reported_in_a_torch_free_unit(self):
        for header in ("torch/version.h", "ATen/ATen.h", "c10/util/Half.h", "caffe2/x.h"):
            with self.subTest(header):
                self.assert_reported("tessera/core/x.cpp", f"#include <{header}>\n", 1,
                                     "torch-free unit")

    def test_spaces_around_the_hash_do_not_hide_an_include(self):
        self.assert_reported("tessera/core/x.cpp", "  #  include <ATen/ATen.h>\n", 1,
                             "torch-free unit")

    def test_the_units_of_the_table_may_include_torch(self):
        self.assert_clean("tessera/comm/gloo_backend.cpp", "#include <ATen/ATen.h>\n")

    def test_other_units_of_comm_may_not_include_torch(self):
        self.assert_reported("tessera/comm/group.cpp", "#include <ATen/ATen.h>\n", 1,
                             "torch-free unit")

    def test_torch_h_is_reported_in_every_header_that_may_use_torch(self):
        self.assert_reported("tessera/comm/c10d_store.h", HEADER + "#include <torch/torch.h>\n", 3,
                             "torch/torch.h in a header")

    def test_tests_may_not_include_torch_unless_they_are_listed(self):
        self.assert_reported("tests/core/x_test.cpp", "#include <torch/torch.h>\n", 1,
                             "torch-free unit")


class C10d(TreeTest):
    def test_its_headers_are_reported_outside_comm(self):
        for header in ("torch/csrc/distributed/c10d/ProcessGroup.hpp", "gloo/context.h"):
            with self.subTest(header):
                self.assert_reported("tessera/tier/x.cpp", f"#include <{header}>\n", 1,
                                     "outside tessera/comm")

    def test_its_name_is_reported_outside_comm(self):
        self.assert_reported("tessera/tier/x.cpp", "void f() {\n  c10d::Work* w = nullptr;\n}\n", 2,
                             "c10d is named outside tessera/comm")

    def test_comments_and_strings_may_name_it(self):
        self.assert_clean("tessera/tier/x.cpp",
                          '// c10d\n/* c10d\n c10d */\nconst char* a = "c10d";\n'
                          'const char* b = R"(c10d " c10d)";\nchar c = \'"\';  // c10d\n')

    def test_a_string_that_looks_like_a_comment_hides_nothing(self):
        self.assert_reported("tessera/tier/x.cpp", 'const char* a = "//"; c10d::Work* w;\n', 1,
                             "c10d is named")

    def test_a_digit_separator_hides_nothing(self):
        self.assert_reported("tessera/tier/x.cpp", "int a = 1'000; c10d::Work* w; int b = 1'0;\n", 1,
                             "c10d is named")

    def test_a_torch_free_unit_of_comm_may_not_include_its_headers(self):
        self.assert_reported("tessera/comm/group.cpp",
                             "#include <torch/csrc/distributed/c10d/Work.hpp>\n", 1,
                             "torch-free unit")


class Cuda(TreeTest):
    def test_its_headers_are_reported_outside_device(self):
        for header in ("cuda_runtime_api.h", "cuda.h", "nccl.h", "cub/cub.cuh"):
            with self.subTest(header):
                self.assert_reported("tessera/comm/group.cpp", f"#include <{header}>\n", 1,
                                     "no other module knows")

    def test_conditions_on_it_are_reported_outside_device(self):
        for condition in ("#ifdef TESSERA_HAS_CUDA", "#if defined(USE_C10D_NCCL)",
                          "# ifndef __CUDACC__"):
            with self.subTest(condition):
                self.assert_reported("tessera/comm/group.cpp", f"\n{condition}\n#endif\n", 2,
                                     "preprocessor condition")

    def test_device_cu_files_and_the_nccl_backend_may_use_it(self):
        text = "#include <cuda_runtime_api.h>\n#ifdef __CUDACC__\n#endif\n"
        self.write("tessera/tier/kernel.cu", text)
        self.write("tessera/comm/nccl_backend.cpp", text)
        self.assert_clean("tessera/device/device_cuda.cpp", text)


class Text(TreeTest):
    def test_a_long_file_is_mentioned_and_passes_and_prose_is_not_counted(self):
        self.write("docs/long.md", "word\n" * 900)
        self.write("tessera/core/fits.cpp", "int x;\n" * 800)
        self.write("scripts/long.py", "x = 1\n" * 801)
        self.write("tessera/core/long.cpp", "int x;\n" * 801)
        checker = check_layers.Checker(self.root)
        checker.run()
        self.assertEqual(checker.problems, [])
        self.assertEqual([hint.split(":")[0] for hint in checker.hints],
                         ["tessera/core/long.cpp", "scripts/long.py"])

    def test_a_character_outside_ascii_is_reported_in_code_and_prose(self):
        self.assert_reported("docs/x.md", "fine\nnot fine \u2192\n", 2, "outside ASCII")

    def test_every_word_of_debt_is_reported(self):
        for word in check_layers.DEBT_WORDS:
            with self.subTest(word):
                self.assert_reported("tessera/core/x.cpp", f"int x;  // {word}: later\n", 1, word)

    def test_a_header_without_pragma_once_is_reported(self):
        self.assert_reported("tessera/core/x.h", "// #pragma once\nint x();\n", 1,
                             "no #pragma once")

    def test_using_namespace_is_reported_at_the_top_and_inside_namespaces(self):
        self.assert_reported("tests/core/x_test.cpp", "int a;\nusing namespace std;\n", 2,
                             "using namespace")
        self.assert_reported("tests/core/x_test.cpp",
                             "namespace a {\nnamespace {\nint f() { return 1; }\n"
                             "using namespace std;\n}\n}\n", 4, "using namespace")

    def test_using_namespace_inside_a_function_passes(self):
        self.assert_clean("tests/core/x_test.cpp",
                          "namespace a {\nvoid f() {\n  using namespace std;\n}\n}\n")

    def test_other_uses_of_using_and_namespace_pass(self):
        self.assert_clean("tests/core/x_test.cpp",
                          "namespace fs = std::filesystem;\nusing std::string;\n"
                          "namespace b { using T = int; }\n")

    def test_build_folders_are_not_looked_at(self):
        self.assert_clean("build/dev/x.cpp", "c10d::Work* w;\n")


class Program(TreeTest):
    def run_main(self, *arguments):
        with redirect_stdout(io.StringIO()) as out:
            code = check_layers.main(list(arguments))
        return code, out.getvalue()

    def test_a_clean_tree_exits_with_zero(self):
        code, out = self.run_main(str(self.root))
        self.assertEqual(code, 0)
        self.assertIn("6 files, 0 problems", out)

    def test_a_problem_is_printed_with_file_and_line_and_exits_with_one(self):
        self.write("tessera/core/x.cpp", '#include "tessera/comm/thing.h"\n')
        code, out = self.run_main(str(self.root))
        self.assertEqual(code, 1)
        self.assertIn("tessera/core/x.cpp:1: module core includes", out)

    def test_an_empty_tree_is_an_error(self):
        with tempfile.TemporaryDirectory() as empty:
            self.assertEqual(self.run_main(empty)[0], 1)


class CppText(unittest.TestCase):
    def test_line_numbers_survive_everything_that_is_taken_out(self):
        source = '/* a\nb */ int x; // c \\\nd\nauto s = R"x(\n)" \n)x";\nint last;\n'
        for text in (cpp_text.without_comments(source),
                     cpp_text.without_literals(cpp_text.without_comments(source))):
            self.assertEqual(text.count("\n"), source.count("\n"))
            self.assertEqual(text.split("\n")[6], "int last;")


if __name__ == "__main__":
    unittest.main()
