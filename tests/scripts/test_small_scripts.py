"""scripts/jobs in containers of every size, the report of make test, and what make tidy looks at."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import test_report  # noqa: E402
import tidy_units  # noqa: E402

GB = 1 << 30


class Jobs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        nproc = self.root / "nproc"
        nproc.write_text("#!/bin/sh\necho 16\n")
        nproc.chmod(0o755)

    def jobs(self, available_gb=1000, files=None, **environment):
        (self.root / "meminfo").write_text(
            f"MemTotal: 9 kB\nMemAvailable:  {available_gb * GB // 1024} kB\n")
        for name, text in (files or {}).items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text + "\n")
        return subprocess.run(
            [str(ROOT / "scripts/jobs")], text=True, capture_output=True, check=False,
            env={"PATH": f"{self.root}:{os.environ['PATH']}", "TESSERA_CGROUP": str(self.root),
                 "TESSERA_MEMINFO": str(self.root / "meminfo"), **environment})

    def test_one_job_per_core_where_memory_allows(self):
        self.assertEqual(self.jobs().stdout, "16\n")

    def test_one_job_per_two_gigabytes(self):
        self.assertEqual(self.jobs(available_gb=7).stdout, "3\n")

    def test_never_less_than_one(self):
        self.assertEqual(self.jobs(available_gb=1).stdout, "1\n")

    def test_the_memory_limit_of_a_container_counts(self):
        self.assertEqual(self.jobs(files={"memory.max": str(8 * GB)}).stdout, "4\n")
        self.assertEqual(self.jobs(files={"memory.max": "max",
                                          "memory/memory.limit_in_bytes": str(4 * GB)}).stdout, "2\n")

    def test_no_limit_in_any_spelling_is_no_limit(self):
        self.assertEqual(self.jobs(files={"memory.max": "max", "cpu.max": "max 100000",
                                          "memory/memory.limit_in_bytes": "9223372036854771712"}
                                   ).stdout, "16\n")

    def test_the_cpu_share_of_a_container_counts_rounded_up(self):
        self.assertEqual(self.jobs(files={"cpu.max": "250000 100000"}).stdout, "3\n")

    def test_the_users_number_wins_and_is_checked(self):
        self.assertEqual(self.jobs(JOBS="5").stdout, "5\n")
        self.assertEqual(self.jobs(JOBS="many").returncode, 2)


class TestReport(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def outcomes(self, ctest, **programs):
        junit = self.folder / "ctest"
        junit.write_text(ctest)
        for name, text in programs.items():
            (self.folder / f"{name}.xml").write_text(text)
        return [(test.name, test.outcome) for test in test_report.collect(junit, self.folder)]

    def test_each_entry_is_counted_by_what_became_of_it(self):
        self.assertEqual(self.outcomes(
            '<testsuite tests="4"><testcase name="a" status="run"/>'
            '<testcase name="b" status="fail"><failure message=""/></testcase>'
            '<testcase name="d" status="notrun"><skipped message="no gpu"/></testcase>'
            '<testcase name="e" status="disabled"/></testsuite>'),
            [("a", "passed"), ("b", "failed"), ("d", "skipped"), ("e", "skipped")])

    def test_the_tests_of_a_program_stand_for_its_entry(self):
        self.assertEqual(self.outcomes(
            '<testsuite><testcase name="core" status="run"/></testsuite>',
            core='<testsuites><testsuite><testcase name="Adds" classname="Sum" time="1.5"/>'
                 '<testcase name="Runs" classname="Gpu"><skipped message="no GPU"/></testcase>'
                 '</testsuite></testsuites>'),
            [("Sum.Adds", "passed"), ("Gpu.Runs", "skipped")])

    def test_a_program_that_fails_without_a_failing_test_is_a_failure(self):
        entry = '<testsuite><testcase name="core" status="fail"><failure/></testcase></testsuite>'
        passed = '<testsuites><testsuite><testcase name="Adds" classname="Sum"/></testsuite></testsuites>'
        self.assertEqual(self.outcomes(entry, core=passed),
                         [("Sum.Adds", "passed"), ("core", "failed")])
        self.assertEqual(self.outcomes(entry, core="<testsuites><cut off"), [("core", "failed")])
        failed = passed.replace("/></testsuite>", "><failure/></testcase></testsuite>")
        self.assertEqual(self.outcomes(entry, core=failed), [("Sum.Adds", "failed")])

    def test_a_file_that_is_no_result_is_a_failure(self):
        self.assertEqual([outcome for _, outcome in self.outcomes("")], ["failed"])
        self.assertEqual(test_report.collect("/no/such/file")[0].outcome, "failed")

    def test_the_slowest_come_first_and_every_step_has_its_sum(self):
        lines = [f"dev\t{i}\ttest{i}\n" for i in range(20)] + ["asan\t100\tlong\n"]
        text = test_report.summary(lines).splitlines()
        self.assertEqual(text[1].split(), ["100.0", "s", "asan:", "long"])
        self.assertEqual(text[2].split(), ["19.0", "s", "dev:", "test19"])
        self.assertIn("190.0 s  in 20 tests of dev", text[11])
        self.assertEqual(len(text), 13)


class TidyUnits(unittest.TestCase):
    COMMANDS = [{"file": f"/p/{path}", "command": flags} for path, flags in (
        ("a/one.cpp", ""), ("a/two.cpp", "-Itorch/csrc/api/include"), ("a/one.cpp", ""), ("a/sum.cu", ""),
        ("build/x/pch.cpp", ""), ("../usr/gtest.cc", ""))]

    def choose(self, *wanted):
        texts = {"a/one.cpp": '#include "a/used.h"', "a/two.cpp": '#include "a/used.h"'}
        return tidy_units.choose(tidy_units.units_of(self.COMMANDS, "/p"), wanted, texts.get)

    def test_all_of_the_project_are_looked_at_once_the_longest_first(self):
        self.assertEqual(self.choose(), ["a/two.cpp", "a/one.cpp"])

    def test_a_header_is_seen_through_its_source_or_one_that_includes_it(self):
        self.assertEqual(self.choose("a/one.h"), ["a/one.cpp"])
        self.assertEqual(self.choose("a/used.h"), ["a/two.cpp"])

    def test_what_is_in_no_build_is_not_looked_at(self):
        self.assertEqual(self.choose("a/kernel_cuda.cpp", "a/unused.h"), [])


if __name__ == "__main__":
    unittest.main()
