"""bench/compare_peers.py and bench/peer_python.py: figures, order, verdicts, and runs that fail.

No peer runs here: small programs stand in for them, and for `tessera`.
"""
import json
import os
import sys
import unittest
from unittest import mock

from bench_helpers import FolderTest, metrics, quiet  # first: it finds the others
import compare_peers
import peer_python
from compare_peers import APART, DDP, DEEPSPEED, FSDP2, ONE_RANK, TESSERA, UNSHARDED

# Writes a metrics file as `tessera train` does: 20 ms per sequence, after two slow steps.
TESSERA_STAND_IN = """
import json, pathlib, sys
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
times = [9.0, 9.0] + [0.02 * int(flag("--batch"))] * (int(flag("--steps")) - 2)
pathlib.Path(flag("--metrics")).write_text(
    "".join(json.dumps({{"step": k, "step_s": s}}) + "\\n" for k, s in enumerate(times)))
pathlib.Path({calls!r}).open("a").write(" ".join(sys.argv[1:]) + "\\n")
"""


def figures_of(**seconds):
    """Figures of both batches from one time per system (names with _ for -)."""
    return {(batch, name.replace("_", "-")): (s, s, s)
            for batch in compare_peers.BATCHES for name, s in seconds.items()}


class Figures(unittest.TestCase):
    def test_a_peer_is_given_the_smaller_of_its_two_times(self):
        for step_s, free_s in ((0.3, 0.2), (0.2, 0.3)):
            output = f'chatter\nRESULT {json.dumps({"step_s": step_s, "free_step_s": free_s})}\n'
            self.assertEqual(compare_peers.peer_step_s(output), 0.2)

    def test_a_peer_without_a_result_has_no_figure(self):
        with self.assertRaisesRegex(compare_peers.RunError, "found 0"):
            compare_peers.peer_step_s("Traceback\nRESULTS none\n")

    def test_the_first_two_steps_of_a_metrics_file_do_not_count(self):
        self.assertEqual(compare_peers.metrics_step_s(metrics(9, 8, 0.1, 0.3, 0.2), 5), 0.2)

    def test_the_median_of_an_even_number_of_steps_lies_between_them(self):
        self.assertAlmostEqual(compare_peers.metrics_step_s(metrics(9, 8, 0.1, 0.3), 4), 0.2)

    def test_a_metrics_file_that_ends_early_has_no_figure(self):
        with self.assertRaisesRegex(compare_peers.RunError, "has 4 steps; expected 5"):
            compare_peers.metrics_step_s(metrics(9, 8, 0.1, 0.3), 5)
        with self.assertRaises(compare_peers.RunError):
            compare_peers.metrics_step_s(metrics(9, 8), 2)

    def test_a_median_is_taken_over_the_rounds_of_one_system_at_one_batch(self):
        runs = [(2, FSDP2, 3.0), (2, FSDP2, 1.0), (16, FSDP2, 7.0), (2, TESSERA, 5.0),
                (2, FSDP2, 2.5)]
        self.assertEqual(compare_peers.medians(runs), {
            (2, FSDP2): (2.5, 1.0, 3.0), (16, FSDP2): (7.0, 7.0, 7.0),
            (2, TESSERA): (5.0, 5.0, 5.0)})


class Plan(unittest.TestCase):
    def test_every_round_runs_every_system_once_in_alternating_order(self):
        order = [(batch, system) for _, batch, system in compare_peers.plan(2, ["a", "b", "c"])]
        self.assertEqual(order, [(2, "a"), (2, "b"), (2, "c"), (16, "a"), (16, "b"), (16, "c"),
                                 (2, "c"), (2, "b"), (2, "a"), (16, "c"), (16, "b"), (16, "a")])


class Verdicts(unittest.TestCase):
    def test_the_limits_are_those_that_were_set(self):
        limits = {(c.batch, c.ours, c.theirs): c.limit for c in compare_peers.COMPARISONS
                  if c.limit is not None}
        self.assertEqual(limits, {
            (2, TESSERA, FSDP2): 0.75, (2, TESSERA, DEEPSPEED): 0.75,
            (16, TESSERA, FSDP2): 0.94, (16, TESSERA, DEEPSPEED): 0.94,
            (2, TESSERA, APART): 1.35, (16, TESSERA, APART): 1.10, (2, TESSERA, DDP): 1.0,
            (2, ONE_RANK, UNSHARDED): 1.03, (16, ONE_RANK, UNSHARDED): 1.03})

    def test_a_ratio_is_ours_by_theirs_and_equal_to_the_limit_is_within(self):
        rows = compare_peers.judge(figures_of(tessera=0.75, fsdp2=1.0, deepspeed=0.9, apart=0.5))
        by_key = {(r["batch"], r["ours"], r["theirs"]): r for r in rows}
        self.assertEqual(by_key[2, TESSERA, FSDP2]["ratio"], 0.75)
        self.assertEqual(by_key[2, TESSERA, FSDP2]["verdict"], "within the limit")
        self.assertEqual(by_key[2, TESSERA, DEEPSPEED]["verdict"], "above the limit")
        self.assertEqual(by_key[16, TESSERA, DEEPSPEED]["verdict"], "within the limit")
        self.assertEqual(by_key[16, APART, FSDP2]["ratio"], 0.5)
        self.assertEqual(by_key[16, APART, FSDP2]["verdict"], "")

    def test_what_was_not_measured_is_said_to_be_so(self):
        rows = compare_peers.judge(figures_of(tessera=1.0, deepspeed=2.0))
        by_key = {(r["batch"], r["ours"], r["theirs"]): r for r in rows}
        self.assertIsNone(by_key[2, TESSERA, FSDP2]["ratio"])
        self.assertEqual(by_key[2, TESSERA, FSDP2]["verdict"], "not measured")
        self.assertEqual(by_key[2, TESSERA, DEEPSPEED]["ratio"], 0.5)

    def test_the_tables_have_a_line_for_each_figure_and_each_ratio(self):
        figures = figures_of(tessera=0.1, fsdp2=0.2)
        steps = list(compare_peers.step_table(figures))
        self.assertEqual(len(steps), 1 + len(figures))
        self.assertRegex(steps[1], r"^ +2  tessera, 2 ranks +100\.0 ms +100\.0 \.\. 100\.0 ms$")
        ratios = list(compare_peers.ratio_table(compare_peers.judge(figures)))
        self.assertEqual(len(ratios), 1 + len(compare_peers.COMPARISONS))
        self.assertRegex(ratios[1], r"tessera, 2 ranks / FSDP2, 2 ranks +0\.500 +0\.75  within")
        self.assertRegex(ratios[2], r"DeepSpeed.* - +0\.75  not measured$")


class Runs(FolderTest):
    def python(self, code, **variables):
        return [sys.executable, "-c", code], variables

    def test_commands_run_at_the_same_time_and_each_output_is_kept(self):
        # Each waits for the other's end of a pipe: run one after the other, they would not end.
        os.mkfifo(self.folder / "pipe")
        texts = compare_peers.run_together(
            [self.python("open('pipe', 'w').write('x'); print('wrote')"),
             self.python("print('read', open('pipe').read())")], self.folder)
        self.assertEqual(texts, ["wrote\n", "read x\n"])

    def test_the_first_that_fails_ends_the_others_and_is_the_one_reported(self):
        os.mkfifo(self.folder / "pipe")  # nobody ever writes to it
        with self.assertRaisesRegex(compare_peers.RunError, "(?s)exit code 3.*no such luck"):
            compare_peers.run_together(
                [self.python("open('pipe').read()"),
                 self.python("print('no such luck'); raise SystemExit(3)")], self.folder)

    def test_a_program_that_is_missing_is_an_error_of_the_run(self):
        with self.assertRaisesRegex(compare_peers.RunError, "cannot start.*missing"):
            compare_peers.run_together([([self.folder / "missing"], {})], self.folder)


class WholeProgram(FolderTest):
    """main() with a stand-in for tessera, and no peers."""

    def setUp(self):
        super().setUp()
        self.calls = self.folder / "calls"
        self.program = self.write_program("tessera", TESSERA_STAND_IN.format(calls=str(self.calls)))

    def main(self, *arguments):
        no_peers = peer_python.PeerPython("python3", None, None, True)
        with mock.patch.object(peer_python, "find", return_value=no_peers), quiet() as out:
            code = compare_peers.main(["--program", str(self.program), "--rounds", "1", "--steps",
                                       "5", "--json", str(self.folder / "out/peers.json"),
                                       *arguments])
        return code, out.getvalue(), json.loads((self.folder / "out/peers.json").read_text())

    def test_without_peers_ours_are_measured_and_the_remedy_is_printed(self):
        code, out, result = self.main()
        self.assertEqual(code, 0)
        self.assertRegex(out, "without DeepSpeed.*: .*pip install deepspeed==")
        steps = {(run["batch"], run["system"]): run["step_s"] for run in result["runs"]}
        self.assertEqual(steps, {
            (2, TESSERA): 0.04, (2, APART): 0.02, (2, ONE_RANK): 0.04, (2, UNSHARDED): 0.04,
            (16, TESSERA): 0.32, (16, APART): 0.16, (16, ONE_RANK): 0.32, (16, UNSHARDED): 0.32})
        self.assertRegex(out, r"tessera, 1 rank / tessera --unsharded +1\.000 +1\.03  within")
        self.assertEqual(set(result["skipped"]), {DDP, FSDP2, DEEPSPEED})

    def test_tessera_is_called_with_the_arithmetic_of_the_peers(self):
        self.main("--only", f"{TESSERA},{APART}")
        calls = self.calls.read_text().splitlines()
        common = "--steps 5 --data random --threads 1 --lr 1e-4 --clip 1.0 --metrics "
        self.assertEqual([call[:call.index(common) + len(common)] for call in calls],
                         [f"train --preset small {how} {common}" for how in (
                             "--ranks 2 --batch 2",
                             "--unsharded --batch 1", "--unsharded --batch 1",
                             "--ranks 2 --batch 16",
                             "--unsharded --batch 8", "--unsharded --batch 8")])

    def test_a_system_that_fails_is_left_out_and_makes_the_exit_code_one(self):
        self.write_program("tessera", "#!/bin/sh\necho 'unknown command train' >&2\nexit 2\n")
        code, out, result = self.main()
        self.assertEqual(code, 1)
        self.assertIn("without tessera, 1 rank: failed at batch 2: exit code 2", out)
        self.assertEqual(result["runs"], [])
        self.assertTrue(all(row["verdict"] == "not measured" for row in result["ratios"]))

    def test_unknown_systems_and_too_few_steps_are_refused(self):
        for arguments in (["--only", "horovod"], ["--steps", "2"], ["--rounds", "0"]):
            self.assert_refused(compare_peers.parse_arguments, arguments)


class Python(FolderTest):
    def setUp(self):
        super().setUp()
        self.torch = self.folder / "lib/python3.11/site-packages/torch"
        self.torch.mkdir(parents=True)

    def test_a_torch_in_an_environment_belongs_to_its_python(self):
        self.assertEqual(peer_python.python_of(self.torch), "python3")
        (self.folder / "bin").mkdir()
        (self.folder / "bin/python3").touch()
        self.assertEqual(peer_python.python_of(self.torch), self.folder / "bin/python3")
        self.assertEqual(peer_python.python_of(None), "python3")

    def test_peers_use_the_torch_of_the_build_or_one_of_its_version(self):
        (self.torch / "build-version").write_text("2.12.1+cpu\n")
        self.assertEqual(peer_python.packages_beside(self.torch),
                         (None, ("torch==2.12.1",) + peer_python.PACKAGES))
        (self.torch / "__init__.py").touch()
        self.assertEqual(peer_python.packages_beside(self.torch),
                         (self.torch.parent, peer_python.PACKAGES))

    def test_the_torch_of_the_build_is_where_setup_noted_it(self):
        self.assertIsNone(peer_python.build_torch_dir(self.folder))
        (self.folder / "build/setup").mkdir(parents=True)
        (self.folder / "build/setup/torch_dir").write_text(f"{self.torch}\n")
        self.assertEqual(peer_python.build_torch_dir(self.folder), self.torch)

    def test_a_peer_is_skipped_for_what_it_lacks(self):
        def skipped(torch, deepspeed, headers):
            return peer_python.PeerPython("python3", torch, deepspeed, headers).skip_reasons()
        self.assertEqual(set(skipped(None, "1", True)), {"ddp", "fsdp2", "deepspeed"})
        self.assertIn("pip install", skipped("2.13.0", None, True)["deepspeed"])
        self.assertIn("python3-dev", skipped("2.13.0", "0.19.8", False)["deepspeed"])
        self.assertEqual(skipped("2.13.0", "0.19.8", True), {})

    def test_an_interpreter_that_does_not_start_has_nothing(self):
        self.assertEqual(set(peer_python.probe(self.folder / "python3").skip_reasons()),
                         {"ddp", "fsdp2", "deepspeed"})


if __name__ == "__main__":
    unittest.main()
