"""bench/gpu.py and its modules: figures, rates, order, rows, and runs that fail.

No GPU and no peer is needed: small programs stand in for `tessera` and for bench/peers.py.
"""
import json
import os
import sys
import unittest
from unittest import mock

from bench_helpers import FolderTest, H200, metrics, quiet  # first: it finds the others
import gpu
import gpu_half
import gpu_modes
import gpu_rates
import gpu_report
import gpu_run
import peer_python
from gpu_run import Figures, RunError

# 20 ms per sequence after two slow steps; ten times that with NVMe; losses like peers'.
TESSERA_STAND_IN = """
import json, pathlib, sys
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
pathlib.Path({calls!r}).open("a").write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "bench-io":
    rate = lambda r, w: {{"read_bytes_per_s": r, "write_bytes_per_s": w}}
    print(json.dumps({{"rows": [{{"load": "read", "tessera": rate(3e9, 0)}},
                                {{"load": "write", "tessera": rate(0, 2e9)}},
                                {{"load": "mixed", "tessera": rate(1.5e9, 1e9)}}]}}))
    raise SystemExit(0)
if sys.argv[1] == "inspect":  # 9 GB besides states, of which there are 17 GB
    if {broken!r} in sys.argv:
        raise SystemExit("tessera: error: it does not fit")
    host = min(17 * 10**9, max(0, int(flag("--host-budget").rstrip("B")) - 9 * 10**9))
    print(json.dumps({{"tiers": {{"bytes": [
        {{"tier": "pinned", "role": "optimizer", "bytes": host // 4}},
        {{"tier": "host", "role": "optimizer", "bytes": host - host // 4}},
        {{"tier": "pinned", "role": "gradient", "bytes": 9 * 10**9}},
        {{"tier": "nvme", "role": "optimizer", "bytes": 17 * 10**9 - host}}]}}}}))
    raise SystemExit(0)
if {broken!r} in sys.argv:
    print("tessera: error: " + {broken!r} + " is broken", file=sys.stderr)
    raise SystemExit(1)
step_s = 0.02 * int(flag("--batch")) * (10 if "--nvme" in sys.argv else 1)
times = [9.0, 9.0] + [step_s] * (int(flag("--steps")) - 2)
pathlib.Path(flag("--metrics")).write_text("".join(json.dumps(
    {{"step": k, "step_s": s, "loss": 10.0 + k, "grad_norm": 1.0 + k, "rss_peak_bytes": 2 << 30}})
    + "\\n" for k, s in enumerate(times)))
"""
PEERS_STAND_IN = """
import json, sys
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
if flag("--system") == "fsdp2-cpu":
    print("RuntimeError: no such link", file=sys.stderr)
    print("UserWarning: destroy_process_group() was not called", file=sys.stderr)
    raise SystemExit(1)
for batch in map(int, flag("--batch").split(",")):
    print("RESULT " + json.dumps({"batch": batch, "step_s": 0.05 * batch, "free_step_s":
        0.04 * batch, "forward_s": 0.01, "backward_s": 0.02, "optimizer_s": 0.03,
        "losses": [10.0], "grad_norms": [1.0], "device_peak_gib": 3.0, "rss_gib": 4.0}))
"""


class FiguresOfARun(unittest.TestCase):
    def test_warm_up_does_not_count_and_peaks_are_of_all_steps(self):
        figures = gpu_run.metrics_figures(metrics(
            {"step_s": 9, "rss_peak_bytes": 70, "h2d_bytes": 900},
            {"step_s": 8, "rss_peak_bytes": 70, "h2d_bytes": 800},
            {"step_s": 0.1, "rss_peak_bytes": 70, "h2d_bytes": 5},
            {"step_s": 0.3, "rss_peak_bytes": 71, "h2d_bytes": 7},
            {"step_s": 0.2, "rss_peak_bytes": 71, "h2d_bytes": 6}), 5)
        self.assertEqual((figures.step_s, figures.host_peak_bytes, figures.h2d_bytes),
                         (0.2, 71, 6))

    def test_what_a_metrics_file_does_not_have_is_not_known(self):
        figures = gpu_run.metrics_figures(metrics(9, 8, 0.1), 3)
        self.assertEqual(figures.step_s, 0.1)
        for name in ("forward_s", "update_s", "device_peak_bytes", "d2h_bytes"):
            self.assertIsNone(getattr(figures, name), name)

    def test_a_metrics_file_that_ends_early_has_no_figure(self):
        with self.assertRaisesRegex(RunError, "has 4 steps; expected 5"):
            gpu_run.metrics_figures(metrics(9, 8, 0.1, 0.3), 5)
        with self.assertRaises(RunError):
            gpu_run.metrics_figures(metrics(9, 8), 2)

    def test_a_peer_has_the_smaller_of_its_two_times_at_each_batch(self):
        line = {"forward_s": 1, "backward_s": 2, "optimizer_s": 3, "losses": [7.5],
                "grad_norms": [], "device_peak_gib": 2, "rss_gib": 1}
        output = "".join("RESULT " + json.dumps({**line, "batch": batch, "step_s": step_s,
                                                 "free_step_s": free_s}) + "\nchatter\n"
                         for batch, step_s, free_s in ((8, 0.3, 0.2), (32, 0.7, 0.8)))
        figures = gpu_run.peer_figures(output)
        self.assertEqual({b: f.step_s for b, f in figures.items()}, {8: 0.2, 32: 0.7})
        self.assertEqual(figures[8].device_peak_bytes, 2 << 30)
        self.assertEqual(figures[8].update_s, 3)

    def test_the_middle_of_rounds_is_taken_figure_by_figure(self):
        middle = gpu_run.middle_of([Figures(3.0, h2d_bytes=5, losses=(1,)),
                                    Figures(1.0, losses=(2,)), Figures(2.0, h2d_bytes=9)])
        self.assertEqual((middle.step_s, middle.h2d_bytes, middle.losses, middle.forward_s),
                         (2.0, 7, (1,), None))


class Processes(FolderTest):
    def run_code(self, code, limit_s=60.0, **variables):
        return gpu_run.run_process([sys.executable, "-c", code], limit_s, self.folder / "log",
                                   variables)

    def test_the_reason_of_a_failure_is_the_last_line_that_tells_of_an_error(self):
        text = ("Traceback\nValueError: first\nRuntimeError: CUDA out of memory\n"
                "Warning: Error in destroy_process_group\nbye\n")
        self.assertEqual(gpu_run.reason_in(text, 1),
                         "exit code 1: RuntimeError: CUDA out of memory")
        self.assertEqual(gpu_run.reason_in("one\ntwo\n", -9), "signal 9: two")
        self.assertEqual(gpu_run.reason_in("", 3), "exit code 3: it printed nothing")
        self.assertLess(len(gpu_run.reason_in("error " + "x" * 999, 1)), 200)

    def test_a_process_that_does_not_end_is_killed_with_what_it_started(self):
        os.mkfifo(self.folder / "pipe")  # nobody writes to it
        code = ("import subprocess, sys\n"
                "subprocess.run([sys.executable, '-c', 'import os; open(os.environ[\"PIPE\"])'])")
        # Standard output ends only when the child's is closed, too.
        with self.assertRaisesRegex(RunError, "not done after"):
            self.run_code(code, limit_s=1.0, PIPE=self.folder / "pipe")
        self.assertIn("subprocess.run", (self.folder / "log").read_text())

    def test_the_lock_of_a_build_that_was_killed_is_removed_and_nothing_else(self):
        gpu_run.remove_stale_locks(self.folder / "none yet")
        (self.folder / "fused_adam").mkdir()
        for name in ("lock", "build.ninja"):
            (self.folder / "fused_adam" / name).touch()
        gpu_run.remove_stale_locks(self.folder)
        self.assertEqual(os.listdir(self.folder / "fused_adam"), ["build.ninja"])

    def test_a_launchers_variables_do_not_reach_a_run(self):
        with mock.patch.dict(os.environ, {"RANK": "3", "WORLD_SIZE": "8", "KEPT": "yes"}):
            out = self.run_code("import os; print(os.environ.get('RANK'), os.environ.get("
                                "'WORLD_SIZE'), os.environ['KEPT'], os.environ['ADDED'])", ADDED=7)
        self.assertEqual(out, "None None yes 7\n")

    def test_a_program_that_is_missing_is_an_error_of_the_run(self):
        with self.assertRaisesRegex(RunError, "cannot start.*missing"):
            gpu_run.run_process([self.folder / "missing"], 1.0)


class Order(unittest.TestCase):
    def test_a_peer_runs_all_batches_in_one_process_and_tessera_each_in_its_own(self):
        def ours(mode):
            return [(mode, system, (batch,)) for system in gpu_modes.OURS for batch in (8, 32)]
        tasks = gpu_modes.tasks_of(["resident", "host", "nvme"], gpu_modes.DEFAULT_SYSTEMS, [8, 32])
        self.assertEqual([(task.mode, task.name, task.batches) for task in tasks], [
            ("resident", "plain", (8, 32)), ("resident", "fsdp2", (8, 32)),
            ("resident", "deepspeed", (8, 32)), *ours("resident"),
            ("host", "fsdp2-cpu", (8, 32)), ("host", "deepspeed-cpu", (8, 32)), *ours("host"),
            *ours("nvme")])

    def test_deepspeed_on_nvme_runs_only_when_it_is_asked_for(self):
        names = [task.name for task in gpu_modes.tasks_of(
            ["nvme-optimizer"], [*gpu_modes.DEFAULT_SYSTEMS, "deepspeed-nvme"], [8])]
        self.assertEqual(names, ["deepspeed-nvmeopt", "tessera", "tessera-whole-loss"])

    def test_every_other_round_runs_backwards(self):
        self.assertEqual([task for _, task in gpu_modes.rounds_of(["a", "b"], 3)],
                         ["a", "b", "b", "a", "a", "b"])


class HalfBudget(unittest.TestCase):
    def test_it_is_found_where_other_needs_grow_with_what_is_stored(self):
        def plan(budget):  # whole tensors of 200 MB; each that is stored takes a tenth besides
            count = min(85, max(0, int((budget - 3e9 - 85 * 0.02e9) / 0.18e9)))
            return count * 200_000_000, (85 - count) * 200_000_000
        host, nvme = plan(gpu_half.find_budget(plan, 14_000_000_000))
        self.assertAlmostEqual(host / (host + nvme), 0.5, delta=0.01)

    def test_a_plan_that_never_comes_near_is_an_error(self):
        with self.assertRaisesRegex(RunError, "keeps half of the states.*100%"):
            gpu_half.find_budget(lambda budget: (17, 0), 10)
        with self.assertRaisesRegex(RunError, "no states leave"):
            gpu_half.find_budget(lambda budget: (0, 0), 10)

    def test_states_are_those_in_host_memory_pinned_or_not_and_on_nvme(self):
        lines = [("pinned", "optimizer", 1), ("host", "optimizer", 2), ("nvme", "optimizer", 4),
                 ("device", "optimizer", 8), ("pinned", "gradient", 16), ("nvme", "shard", 32)]
        plan = {"tiers": {"bytes": [dict(zip(("tier", "role", "bytes"), line)) for line in lines]}}
        self.assertEqual(gpu_half.states_of(plan), (3, 4))


class Rates(FolderTest):
    def measure(self, by_torch):
        """With an update_bench of 5 and 8 GB/s and a tessera that cannot measure disks."""
        runs = [{"name": "threads:1", "bytes_per_second": 5e9},
                {"name": "threads:2", "bytes_per_second": 8e9},
                {"name": "bound", "error_occurred": True}]
        self.write_program("bench/update_bench",
                           f"print({json.dumps(json.dumps({'benchmarks': runs}))})\n")
        program = self.write_program("bin/tessera",
                                     "#!/bin/sh\necho 'error: no such disk' >&2\nexit 1\n")
        with mock.patch.object(gpu_rates, "torch_rates", return_value=by_torch):
            return gpu_rates.measure("python3", program, self.folder, 0.1, self.folder)

    def test_the_faster_adamw_counts_and_what_fails_says_why(self):
        known = self.measure({"adamw": 6e9, "adamw_by": "torch", "h2d": 5e10,
                              "reasons": {"links": "none"}})
        self.assertEqual((known["adamw"], known["adamw_by"], known["h2d"]),
                         (8e9, "threads:2", 5e10))
        self.assertEqual(known["reasons"],
                         {"links": "none", "disk": "exit code 1: error: no such disk"})
        self.assertEqual(self.measure({"adamw": 9e9, "adamw_by": "torch"})["adamw_by"], "torch")


class Rows(unittest.TestCase):
    def rows(self, figures, reasons=None):
        tasks = gpu_modes.tasks_of(["resident", "host"], gpu_modes.DEFAULT_SYSTEMS, [8])
        rows = gpu_report.make_rows("gpt-1b4", tasks, figures, reasons or {}, H200)
        return {(row["mode"], row["system"]): row for row in rows}

    def test_ratios_are_to_plain_resident_and_to_the_best_peer_of_the_mode(self):
        rows = self.rows({("resident", "plain", 8): Figures(0.16, 0.039, 0.09),
                          ("resident", "fsdp2", 8): Figures(0.2),
                          ("host", "fsdp2", 8): Figures(1.6),
                          ("host", "deepspeed", 8): Figures(1.2),
                          ("host", "tessera", 8): Figures(0.4)})
        ours = rows["host", "tessera"]
        self.assertAlmostEqual(ours["retained"], 0.4)
        self.assertAlmostEqual(ours["peer_ratio"], 3.0)
        self.assertAlmostEqual(ours["of_bound"], 0.297 / 0.4, delta=0.003)
        self.assertAlmostEqual(ours["tokens_per_s"], 8192 / 0.4)
        # Plain PyTorch is what others are held against, and no peer.
        self.assertAlmostEqual(rows["resident", "fsdp2"]["peer_ratio"], 1.0)

    def test_a_row_without_figures_says_why(self):
        rows = self.rows({}, {("host", "deepspeed", 8): "not installed"})
        self.assertIsNone(rows["host", "deepspeed"]["step_s"])
        text = "\n".join(gpu_report.table(rows.values()))
        self.assertRegex(text, r"\| host +\| deepspeed-cpu +\| 8192 +\| all +\| - .*\| not installed +\|")

    def test_every_line_of_a_table_has_the_same_columns(self):
        rows = self.rows({("host", "tessera", 8): Figures(0.4, update_s=0.1)},
                         {("host", "fsdp2", 8): "a | b"})
        lines = gpu_report.table(rows.values())
        self.assertEqual({line.count("|") for line in lines}, {len(gpu_report.COLUMNS) + 1})
        self.assertIn("- / - / 0.100", "\n".join(lines))


class TablesOfTheDocs(unittest.TestCase):
    ROWS = gpu_report.make_rows(
        "gpt-1b4", gpu_modes.tasks_of(["resident", "host", "half"], ["plain", "deepspeed", "tessera"],
                                      [8]),
        {("resident", "plain", 8): Figures(0.15, 0.039, 0.09, device_peak_bytes=35.2 * 2**30),
         ("resident", "tessera", 8): Figures(0.14, h2d_bytes=0, d2h_bytes=0),
         ("host", "tessera", 8): Figures(0.35, h2d_bytes=8.34e9, d2h_bytes=8.26e9)},
        {("host", "deepspeed", 8): "not installed"}, H200)

    def test_a_row_has_what_is_known_and_else_why_not(self):
        lines = gpu_report.doc_table(self.ROWS)
        self.assertEqual({line.count("|") for line in lines}, {len(gpu_report.DOC_COLUMNS) + 1})
        self.assertIn("| resident | plain PyTorch | 8,192 | whole | 0.150 s | 100 % | 0.92 | 35.2 GiB "
                      "| | | |", lines)
        self.assertIn("| host | DeepSpeed | 8,192 | whole | not installed | | | | | | |", lines)
        self.assertIn("| host | Tessera | 8,192 | by 512 | 0.350 s | 43 % | 0.85 | | "
                      "| 8.3 GB, 8.3 GB | |", lines)
        self.assertIn("| half | Tessera | 8,192 | by 512 | - | | | | | | |", lines)

    def test_the_readme_has_one_line_per_number_of_tokens(self):
        lines = gpu_report.readme_table(self.ROWS)
        self.assertEqual(lines[2:], ["| 8,192 | 0.150 s | 0.140 s | - | - | 0.350 s |"])
        self.assertEqual(lines[1].count("-"), 3 * 6)


class WholeProgram(FolderTest):
    """main() with stand-ins for tessera and for peers.py."""

    def setUp(self):
        super().setUp()
        self.calls = self.folder / "calls"
        self.peers = self.folder / "peers.py"
        self.peers.write_text(PEERS_STAND_IN)
        self.write_tessera()

    def write_tessera(self, broken="--never"):
        self.program = self.write_program(
            "bin/tessera", TESSERA_STAND_IN.format(broken=broken, calls=str(self.calls)))

    def main(self, *arguments, deepspeed=None):
        python = peer_python.PeerPython(sys.executable, "2.11.0", deepspeed, True)
        with mock.patch.object(peer_python, "find", return_value=python), \
                mock.patch.object(gpu_rates, "torch_rates", side_effect=RunError("no torch")), \
                quiet() as out:
            code = gpu.main(["--program", str(self.program), "--peers", str(self.peers),
                             "--output", str(self.folder / "out"), "--directory",
                             str(self.folder / "nvme"), "--rate-seconds", "0.01", *arguments])
        document = json.loads((self.folder / "out/gpu.json").read_text())
        rows = {(row["mode"], row["system"], row["batch"]): row for row in document["rows"]}
        self.assertEqual((self.folder / "out/gpu.md").read_text(), out.getvalue())
        return code, out.getvalue(), document, rows

    def test_all_modes_and_systems_have_a_row_and_those_that_fail_say_why(self):
        code, out, document, rows = self.main("--rounds", "2", "--bits")
        self.assertEqual(code, 0)
        self.assertEqual(len(rows), 2 * (5 + 4 + 6 * 2))
        self.assertEqual(rows["ranks", "tessera", 8]["reason"],
                         "skipped: there is no nvidia-cuda-mps-control")
        self.assertIsNone(rows["accumulate", "tessera", 8]["bound_s"])
        self.assertAlmostEqual(rows["host", "tessera", 32]["step_s"], 0.64)
        self.assertAlmostEqual(rows["resident", "tessera", 8]["retained"], 0.04 / 0.02)
        self.assertEqual(rows["host", "fsdp2", 8]["reason"],
                         "exit code 1: RuntimeError: no such link")
        self.assertEqual(rows["host", "deepspeed", 8]["reason"], "not installed")
        runs = [run for run in document["runs"]
                if (run["mode"], run["system"], run["batch"]) == ("host", "tessera", 8)]
        self.assertEqual(len(runs), 2)
        self.assertAlmostEqual(document["rates"]["disk_mixed"], 2.5e9)
        self.assertEqual(document["rates"]["reasons"], {"torch": "no torch"})
        self.assertRegex(out, r"\| host, batch 8: step +\| <= 0.37 s +\| 0.160 s +\| yes")
        self.assertRegex(out, r"\| host, batch 8: x best peer .*\| - +\| not known")
        self.assertRegex(out, r"half, batch 8: losses and norms .*\| 4 steps equal +\| yes")
        self.assertRegex(out, r"half, batch 32: losses and norms .*\| - +\| not known")

    def test_tessera_is_called_with_the_arithmetic_of_the_peers_and_the_flags_of_the_mode(self):
        self.main("--batches", "8", "--systems", "tessera", "--half-budget", "3GiB", "--extra",
                  "--threads 4")
        calls = [call.split() for call in self.calls.read_text().splitlines()
                 if call.startswith("train")]
        common = ("train --preset gpt-1b4 --device cuda --precision bf16 --batch 8 --data random "
                  "--lr 1e-4 --clip 1.0").split()
        flags = []
        for call in calls:
            self.assertEqual(call[:len(common)], common)
            self.assertIn("--threads 4 --steps", " ".join(call))
            rest = call[len(common):call.index("--threads")]
            flags.append(" ".join(w for w in rest if not w.startswith(str(self.folder))))
        self.assertEqual(flags, [" ".join([*mode.split(), "--loss-chunk 512"]) for mode in [
            "", "--parameters host --optimizer host", "--optimizer nvme --nvme",
            "--parameters nvme --optimizer nvme --nvme",
            "--optimizer host --host-budget 3GiB --cpu-share 1 --nvme",
            "--parameters host --optimizer host --accumulate 4",
            "--parameters host --optimizer host --recompute --device-budget 3GiB"]])

    def test_ranks_share_the_gpu_through_mps(self):
        with_mps = self.write_program("with-mps", f"#!/bin/sh\necho mps >> {self.calls}\nexec \"$@\"\n")
        with mock.patch.object(gpu_modes, "WITH_MPS", with_mps), \
                mock.patch.object(gpu_modes.shutil, "which", return_value=str(with_mps)):
            code, _, _, rows = self.main("--batches", "8", "--modes", "ranks", "--systems", "tessera",
                                         "--bits")
        self.assertEqual(code, 0)
        self.assertAlmostEqual(rows["ranks", "tessera", 8]["step_s"], 0.16)
        calls = self.calls.read_text().splitlines()
        first = calls.index("mps")
        self.assertIn("--ranks 2 --set comm.backend=ipc", calls[first + 1])
        self.assertNotIn("mps", calls[first + 1:])  # other bits: they are not compared

    def test_a_chunk_that_the_user_gives_is_the_one_of_every_row(self):
        for extra in ("--loss-chunk 64", "--loss-chunk=64"):
            self.calls.unlink(missing_ok=True)
            _, out, _, rows = self.main("--batches", "8", "--modes", "host", "--systems",
                                        "fsdp2," + ",".join(gpu_modes.OURS), f"--extra={extra}")
            calls = [call for call in self.calls.read_text().splitlines()
                     if call.startswith("train")]
            for call in calls:
                self.assertEqual(call.count("--loss-chunk"), 1)
                self.assertIn(extra, call)
            self.assertEqual([rows["host", system, 8]["loss_chunk"]
                              for system in ("fsdp2", *gpu_modes.OURS)], [None, 64, 64])

    def test_each_run_whose_loss_is_in_chunks_has_one_beside_it_whose_loss_is_whole(self):
        _, out, _, rows = self.main("--batches", "8", "--modes", "host", "--systems",
                                    ",".join(gpu_modes.OURS))
        chunked, whole = [call for call in self.calls.read_text().splitlines()
                          if call.startswith("train")]
        self.assertIn("--loss-chunk 512", chunked)
        self.assertNotIn("--loss-chunk", whole)
        self.assertEqual([rows["host", system, 8]["loss_chunk"] for system in gpu_modes.OURS],
                         [512, None])
        self.assertRegex(out, r"\| host +\| tessera +\| 8192 +\| 512 ")
        self.assertRegex(out, r"\| host +\| tessera-whole-loss +\| 8192 +\| all ")

    def test_half_gets_the_budget_that_keeps_half_of_the_states(self):
        _, _, document, _ = self.main("--batches", "8", "--systems", "tessera", "--modes", "half")
        budget = int(document["half_budget"].rstrip("B"))
        self.assertAlmostEqual(budget, 9e9 + 8.5e9, delta=0.17e9)
        before, call, after = self.calls.read_text().splitlines()[-3:]
        self.assertIn(f"--host-budget {budget}B", call)
        for measured in (before, after):
            self.assertTrue(measured.startswith("bench-io"), measured)
        row, = document["rows"]
        self.assertAlmostEqual(row["disk_mixed"], 2.5e9)

    def test_what_no_longer_fits_is_skipped_and_said_to_be(self):
        code, out, _, rows = self.main("--time-limit", "0", "--modes", "resident", "--parity")
        self.assertEqual(code, 0)
        for row in rows.values():
            expected = "not installed" if row["system"] == "deepspeed" else "skipped: 0 s of"
            self.assertTrue(row["reason"].startswith(expected), row)
        self.assertIn("Parity was not measured: no time left", out)
        self.assertNotIn("train", self.calls.read_text())

    def test_a_mode_in_which_tessera_fails_makes_the_exit_code_one_and_others_still_run(self):
        self.write_tessera(broken="--host-budget")
        code, _, _, rows = self.main("--batches", "8", "--modes", "half,host", "--rounds", "2",
                                     "--half-budget", "9GB", "--systems", "tessera")
        self.assertEqual(code, 1)
        self.assertEqual(rows["half", "tessera", 8]["reason"],
                         "exit code 1: tessera: error: --host-budget is broken")
        self.assertAlmostEqual(rows["host", "tessera", 8]["step_s"], 0.16)
        # Not tried again in the second round.
        self.assertEqual(self.calls.read_text().count("--host-budget"), 1)

    def test_a_budget_that_cannot_be_found_is_the_reason_of_its_mode_alone(self):
        self.write_tessera(broken="--host-budget")
        code, _, _, rows = self.main("--batches", "8", "--modes", "half,host", "--systems",
                                     "tessera")
        self.assertEqual(code, 1)
        self.assertEqual(rows["half", "tessera", 8]["reason"],
                         "no budget: exit code 1: tessera: error: it does not fit")
        self.assertAlmostEqual(rows["host", "tessera", 8]["step_s"], 0.16)

    def test_parity_that_cannot_be_measured_says_why(self):
        code, out, document, _ = self.main("--batches", "8", "--modes", "resident", "--parity",
                                           "--parity-steps", "3", "--systems", "tessera")
        self.assertEqual(code, 0)
        self.assertIn("Parity was not measured: ", out)
        self.assertIsInstance(document["parity"], str)

    def test_wrong_arguments_are_refused(self):
        for arguments in (["--modes", "cloud"], ["--systems", "horovod"], ["--steps", "2"],
                          ["--nvme-steps", "2"], ["--rounds", "0"], ["--batches", "8,x"],
                          ["--batches", "0"], ["--preset", "large"]):
            self.assert_refused(gpu.parse_arguments, arguments)


if __name__ == "__main__":
    unittest.main()
