"""scripts/jobs in containers of every size, and the counting behind the last line of make test."""
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import count_results  # noqa: E402

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

    def test_the_processor_share_of_a_container_counts_rounded_up(self):
        self.assertEqual(self.jobs(files={"cpu.max": "250000 100000"}).stdout, "3\n")

    def test_the_users_number_wins_and_is_checked(self):
        self.assertEqual(self.jobs(JOBS="5").stdout, "5\n")
        self.assertEqual(self.jobs(JOBS="many").returncode, 2)


class CountResults(unittest.TestCase):
    def count(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(text)
            file.flush()
            with contextlib.redirect_stderr(io.StringIO()):
                return count_results.count(file.name)

    def test_each_test_is_counted_by_what_became_of_it(self):
        passed, failed, skipped = self.count(
            '<testsuite tests="5"><testcase name="a" status="run"/>'
            '<testcase name="b" status="fail"><failure message=""/></testcase>'
            '<testcase name="c" status="run"/>'
            '<testcase name="d" status="notrun"><skipped message="no gpu"/></testcase>'
            '<testcase name="e" status="disabled"/></testsuite>')
        self.assertEqual((passed, failed), (2, 1))
        self.assertEqual(skipped, ["skipped: d no gpu", "skipped: e disabled"])

    def test_a_file_that_is_no_result_is_a_failure(self):
        self.assertEqual(self.count("")[:2], (0, 1))
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(count_results.count("/no/such/file")[:2], (0, 1))


if __name__ == "__main__":
    unittest.main()
