"""bench/gpu_capacity.py: what is run, and the plan beside what was measured."""
import json
import unittest

from bench_helpers import FolderTest, metrics, quiet  # first: it finds the others
import gpu_capacity
from gpu_run import RunError

PLAN = """bytes per rank                device          host          NVMe
parameters                  3.27 MiB      12.8 GiB             -
all                         18.9 GiB      98.3 GiB             -
device memory with activations: 37.2 GiB at most
all                      117 GiB                 115 GiB
"""
STAND_IN = """
import pathlib, sys
pathlib.Path({calls!r}).open("a").write(" ".join(sys.argv[1:]) + "\\n")
if "gpt-13b" in sys.argv and {fails!r}:
    raise SystemExit("error: no such GPU")
print({plan!r})
pathlib.Path(sys.argv[sys.argv.index("--metrics") + 1]).write_text({metrics!r})
"""


class Capacity(FolderTest):
    def setUp(self):
        super().setUp()
        self.calls = self.folder / "calls"

    def main(self, *arguments, fails=False):
        steps = metrics(*({"step_s": s, "device_peak_bytes": 36 << 30, "rss_peak_bytes": 99 << 30}
                          for s in (20, 1.4, 1.3, 1.3)))
        program = self.write_program("tessera", STAND_IN.format(
            calls=str(self.calls), fails=fails, plan=PLAN, metrics=steps))
        with quiet() as out:
            code = gpu_capacity.main(["--program", str(program), "--output",
                                      str(self.folder / "out"), *arguments])
        self.assertEqual((self.folder / "out/capacity.md").read_text(), out.getvalue())
        return code, out.getvalue(), json.loads((self.folder / "out/capacity.json").read_text())

    def test_the_plan_stands_beside_what_was_measured(self):
        code, out, rows = self.main()
        self.assertEqual(code, 0)
        self.assertEqual([row["preset"] for row in rows], ["gpt-7b", "gpt-13b"])
        self.assertRegex(out, r"6,860,447,744 +\| 4,096 +\| 1.300 +\| 36.0 +\| 37.2 +\| 99.0 +"
                              r"\| 98.3 +\|")

    def test_each_model_is_run_where_it_is_said_to_be(self):
        self.main()
        seven, thirteen = self.calls.read_text().splitlines()
        self.assertIn("--preset gpt-7b --device cuda --precision bf16 --batch 4", seven)
        self.assertIn("--parameters host --optimizer host", seven)
        self.assertIn("--device-budget 110GiB --host-budget 112GiB", thirteen)
        self.assertNotIn("--nvme", seven + thirteen)

    def test_a_run_that_fails_says_why_and_makes_the_exit_code_one(self):
        code, out, rows = self.main(fails=True)
        self.assertEqual(code, 1)
        self.assertIsNone(rows[0]["reason"])
        self.assertIn("error: no such GPU", rows[1]["reason"])
        self.assertEqual(self.main("--only", "gpt-7b", fails=True)[0], 0)

    def test_output_without_a_plan_is_no_figure(self):
        with self.assertRaisesRegex(RunError, "no plan"):
            gpu_capacity.planned_bytes("all   117 GiB   115 GiB\n")
        self.assertEqual(gpu_capacity.planned_bytes(PLAN), (37.2 * 2**30, 98.3 * 2**30))

    def test_too_few_steps_are_refused(self):
        self.assert_refused(gpu_capacity.parse_arguments, ["--steps", "2"])


if __name__ == "__main__":
    unittest.main()
