"""bench/two_hosts.py: figures, tables, cleaning up; and the program between two namespaces.

The last class runs build/tessera (or build/dev/bin/tessera) with two ranks on each of two hosts. It
is skipped, with the reason, without root, without iproute2, and where the program is not built yet
or does not know the options: so in a new checkout, where these tests run before the build.
"""
import argparse
import contextlib
import dataclasses
import json
import os
import unittest
from unittest import mock

from bench_helpers import ROOT, FolderTest, metrics, quiet  # first: it finds the others
import two_hosts
from two_hosts import CASES, Case, NotPermitted, RunError

PLAIN, HIERARCHICAL, MICS = Case(), Case(hierarchical=True), Case(shard_size=2)
TOGETHER = Case(secondary_size=2, weight_bits=8, gradient_bits=4)
COUNTERS = """Inter-|   Receive                           |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     500       5    0    0    0     0          0         0      500       5    0    0
  eth0:  123456      70    0    0    0     0          0         0   654321      80    0    0
"""


def choice(shard_size, hierarchical, seconds, host_bytes):
    return {"shard_size": shard_size, "hierarchical": hierarchical, "secondary_size": 1,
            "weight_bits": 0, "gradient_bits_inside": 0, "gradient_bits_across": 0,
            "time_s": seconds, "host_across_bytes": host_bytes}


def run_of(case, step_s, **fields):
    return {"case": case, "step_s": step_s, "exposed_wait_s": 0.1, "counted_bytes": 21e6,
            "run_counted_bytes": 100e6, "run_interface_bytes": 101e6, **fields}


PREDICTED = {case: (0.2 if case.shard_size == 2 else 0.4, 42e6) for case in CASES}


def patched(names):
    """Sets names of modules while the context lasts."""
    stack = contextlib.ExitStack()
    for name, value in names.items():
        stack.enter_context(mock.patch(name, value))
    return stack


class Figures(FolderTest):
    def test_a_rate_is_read_as_tc_writes_it(self):
        for text, rate in (("1gbit", 125e6), ("500mbit", 62.5e6), ("2.5Gbit", 312.5e6),
                           ("8kbit", 1e3)):
            self.assertEqual(two_hosts.parse_rate(text), rate)

    def test_what_is_no_rate_is_refused(self):
        for text in ("1", "gbit", "0gbit", "1GB", "-1gbit", ""):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                two_hosts.parse_rate(text)
        self.assert_refused(two_hosts.parse_arguments, ["--rate", "fast"])

    def test_sent_bytes_are_those_of_the_named_interface(self):
        self.assertEqual(two_hosts.sent_of_device(COUNTERS), 654321)
        self.assertEqual(two_hosts.sent_of_device(COUNTERS, "lo"), 500)
        with self.assertRaisesRegex(RunError, "no interface eth1"):
            two_hosts.sent_of_device(COUNTERS, "eth1")

    def test_the_metrics_of_the_warm_up_count_for_the_whole_run_alone(self):
        steps = [{"step_s": s, "exposed_wait_s": s / 2, "sent_across_bytes": sent}
                 for s, sent in ((9, 500), (8, 100), (0.2, 100), (0.4, 100), (0.3, 100))]
        figures = two_hosts.figures_of_metrics(metrics(*steps), 5)
        self.assertEqual(figures, {"step_s": 0.3, "exposed_wait_s": 0.15, "counted_bytes": 200,
                                   "run_counted_bytes": 1800})

    def test_every_other_round_runs_backwards(self):
        self.assertEqual(list(two_hosts.plan(2, [PLAIN, MICS])),
                         [(0, PLAIN), (0, MICS), (1, MICS), (1, PLAIN)])

    def test_a_prediction_is_that_of_the_same_mesh(self):
        inspected = {"mesh": {"choices": [choice(1, False, 9, 9), choice(2, False, 0.2, 21),
                                          choice(4, False, 0.4, 42), choice(4, True, 0.3, 32)]}}
        self.assertEqual([two_hosts.prediction(inspected, case)
                          for case in (PLAIN, HIERARCHICAL, MICS)],
                         [(0.4, 42), (0.3, 32), (0.2, 21)])
        del inspected["mesh"]["choices"][1]
        with self.assertRaisesRegex(RunError, "no prediction for MiCS 2"):
            two_hosts.prediction(inspected, MICS)
        modes = {"secondary_size": 2, "weight_bits": 8, "gradient_bits_inside": 4,
                 "gradient_bits_across": 4}
        inspected["mesh"]["choices"].append({**choice(4, False, 0.1, 10), **modes})
        self.assertEqual(two_hosts.prediction(inspected, TOGETHER), (0.1, 10))

    def test_flags_and_titles_say_what_a_case_does(self):
        self.assertEqual(TOGETHER.flags, ["--hpz-size", 2, "--quantize-weights",
                                          "--quantize-gradients=4"])
        self.assertEqual(TOGETHER.title, "hpZ 2 + qwZ + qgZ int4")
        self.assertFalse(TOGETHER.is_exact)
        self.assertTrue(MICS.is_exact)
        self.assertEqual(len(set(CASES)), len(CASES))
        self.assertLessEqual({PLAIN, HIERARCHICAL, MICS, TOGETHER}, set(CASES))

    def test_some_modes_can_be_chosen_and_plain_zero3_runs_beside_them(self):
        args = two_hosts.parse_arguments(["--only", "qwZ", "hpZ 2 + qwZ + qgZ int4"])
        self.assertEqual([case.title for case in args.cases if case.accumulate == 1],
                         ["plain ZeRO-3", "qwZ", "hpZ 2 + qwZ + qgZ int4"])
        self.assertEqual(two_hosts.parse_arguments([]).cases, CASES)
        self.assert_refused(two_hosts.parse_arguments, ["--only", "qxZ"])

    def test_a_ratio_is_one_of_medians_with_as_many_micro_batches(self):
        runs = [run_of(PLAIN, 0.4), run_of(PLAIN, 0.6), run_of(PLAIN, 0.5), run_of(MICS, 0.2),
                run_of(Case(accumulate=4), 2.0), run_of(Case(shard_size=2, accumulate=4), 0.5)]
        rows = {row["case"]: row for row in two_hosts.summary(runs, PREDICTED)}
        self.assertEqual(list(rows), [PLAIN, MICS, Case(accumulate=4),
                                      Case(shard_size=2, accumulate=4)])
        self.assertEqual([row["ratio"] for row in rows.values()], [1, 0.4, 1, 0.25])
        self.assertEqual((rows[PLAIN]["least_s"], rows[PLAIN]["greatest_s"]), (0.4, 0.6))
        self.assertEqual(rows[MICS]["predicted_ratio"], 0.5)
        self.assertEqual(rows[MICS]["interface_ratio"], 1.01)

    def test_a_case_without_plain_runs_has_no_ratio(self):
        rows = two_hosts.summary([run_of(MICS, 0.2)], PREDICTED)
        self.assertIsNone(rows[0]["ratio"])
        self.assertEqual(list(two_hosts.table(rows))[1].split(),
                         "1 MiCS 2 yes 200 ms 200 .. 200 ms - 100 ms 200 ms 0.50 "
                         "42.0 MB 1.00 21.0 MB 1.010".split())

    def test_runs_and_rows_are_written_as_json(self):
        args = two_hosts.parse_arguments(["--json", str(self.folder / "a/b.json")])
        runs = [run_of(PLAIN, 0.4, others_share=0.5), run_of(MICS, 0.2, others_share=0)]
        with quiet() as out:
            two_hosts.report(args, runs, two_hosts.summary(runs, PREDICTED))
        self.assertIn("during 1 of 2 runs others used more", out.getvalue())
        written = json.loads((self.folder / "a/b.json").read_text())
        self.assertEqual(written["rows"][1]["case"], dataclasses.asdict(MICS))
        self.assertEqual(written["rows"][1]["ratio"], 0.5)

    def test_ranks_that_see_one_host_are_an_error(self):
        two = "mesh: 4 ranks = 2 copies x 2 shards, on 2 hosts of 2\nsmall: over 4 ranks (gloo; x)"
        two_hosts.check_hosts(two)
        for text in (two.replace("on 2 hosts of 2", "on one host"), two.replace("gloo", "shm")):
            with self.assertRaises(RunError):
                two_hosts.check_hosts(text)


class WithoutTwoHosts(FolderTest):
    """What is printed, and what is left, where there are no namespaces."""

    def skipped(self, names):
        program = self.write_program("tessera", "print('--shard-size N')")
        with patched(names), quiet() as out:
            self.assertEqual(two_hosts.main(["--program", str(program)]), 0)
        return out.getvalue()

    def test_each_missing_thing_is_named(self):
        with quiet() as out:
            self.assertEqual(two_hosts.main(["--program", str(self.folder / "none")]), 0)
        self.assertIn("skipped: no program at none", out.getvalue())
        self.assertIn("skipped: no ip: apt-get install iproute2",
                      self.skipped({"two_hosts.shutil.which": lambda _: None}))
        found = {"two_hosts.shutil.which": lambda _: "found"}
        self.assertIn("skipped: network namespaces need root",
                      self.skipped({**found, "two_hosts.os.geteuid": lambda: 1000}))

    def test_a_program_without_the_options_is_skipped(self):
        program = self.write_program("tessera", "print('--ranks N')")
        with patched({"two_hosts.shutil.which": lambda _: "found",
                                 "two_hosts.os.geteuid": lambda: 0}):
            self.assertIn("does not know --shard-size", two_hosts.skip_reason(program))

    def test_what_was_made_is_removed_where_the_rest_is_not_permitted(self):
        calls = self.folder / "calls"
        self.write_program("ip", f"""#!/bin/sh
echo "$@" >> {calls}
case "$1 $2" in "link add") echo 'Operation not permitted' >&2; exit 2;; esac
""")
        path = {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        with mock.patch.dict(os.environ, path), \
                self.assertRaisesRegex(NotPermitted, "ip link add eth0: Operation not permitted"), \
                two_hosts.Hosts(self.folder):
            self.fail("there are no hosts")
        lines = [line.split() for line in calls.read_text().splitlines()]
        added = [words[-1] for words in lines if words[:2] == ["netns", "add"]]
        deleted = [words[-1] for words in lines if words[:2] == ["netns", "delete"]]
        self.assertEqual(len(added), 2)
        self.assertEqual(added, deleted)

    def test_a_rank_that_fails_ends_the_others(self):
        program = self.write_program("program", """
import os, pathlib, sys, time
pathlib.Path(f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
if os.environ["RANK"] == "2":
    sys.exit("no such model")
time.sleep(600)
""")
        hosts = two_hosts.Hosts(self.folder)
        hosts.words = lambda host, command: [str(word) for word in command]
        hosts.sent_bytes = lambda: [0, 0]
        with self.assertRaisesRegex(RunError, "(?s)rank 2 ended with exit code 1.*no such model"):
            two_hosts.train(hosts, [program], self.folder)
        for file in self.folder.glob("pid.*"):
            with self.assertRaises(ProcessLookupError, msg=file.name):
                os.kill(int(file.read_text()), 0)


class TwoHosts(FolderTest):
    """Payload per step against the closed forms of docs/communication.md, and both against what the
    interfaces count."""

    MODEL = ("--preset", "small", "--seq", 32)
    STEPS = 4
    AGREEMENT = 4096  # bytes per step for the norm and the words of ranks that agree
    # A frame of 1514 bytes has 66 of headers (4.6 % of its payload), and for every second one
    # another 66 may go back (2.3 %). Frames are mostly larger here.
    HEADERS = 1.08
    START = 1 << 20  # the store, connections, agreement on the model

    @classmethod
    def setUpClass(cls):
        programs = [ROOT / "build/tessera", ROOT / "build/dev/bin/tessera"]
        cls.program = next((each for each in programs if each.is_file()), programs[0]).resolve()
        reason = two_hosts.skip_reason(cls.program)
        if reason is not None:
            raise unittest.SkipTest(reason)
        cls.inspected = two_hosts.inspect(cls.program, cls.MODEL, 1)

    def setUp(self):
        super().setUp()
        try:
            self.hosts = self.enterContext(two_hosts.Hosts(self.folder))
        except NotPermitted as error:
            self.skipTest(str(error))

    def closed_form(self, case, accumulate):
        """What a host sends to the other one in a step: (gathers, everything)."""
        full = self.inspected["step"]["gathered_bytes"]  # of all parameters, once; G and D alike
        ranks = 4 if case.shard_size == 4 else 2
        if ranks == 2:  # a group per host: nothing across but the sums over the two copies
            return 0, 2 * full // 2
        gathers = 2 * full // 4 * (1 if case.hierarchical else 2)
        return gathers, gathers + accumulate * 2 * 2 * full // 4

    def check(self, case):
        file = self.folder / "metrics.jsonl"
        sent = two_hosts.train(
            self.hosts, two_hosts.train_command(self.program, self.MODEL, case, self.STEPS, file),
            self.folder)
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        gathers, expected = self.closed_form(case, case.accumulate)
        for step in steps[2:]:  # the first has no trace: it gathers more often
            counted = 2 * step["sent_across_bytes"]
            self.assertGreaterEqual(counted, expected)
            self.assertLessEqual(counted, expected + self.AGREEMENT)
        payload = 2 * sum(step["sent_across_bytes"] for step in steps)
        # Over Gloo large shards go from rank to rank along a binomial tree. Of 4 ranks it crosses
        # from one host of 2 to the other 5 times for the 4 shards, where direct sends do 4 times;
        # of 2 ranks (hierarchical gathers) it is direct.
        first = gathers * steps[0]["gathered_bytes"] / steps[-1]["gathered_bytes"]
        tree = 0 if case.hierarchical else (first + (self.STEPS - 1) * gathers) / 4
        for host in sent:
            self.assertGreaterEqual(host, payload)
            self.assertLessEqual(host, self.HEADERS * (payload + tree) + self.START)

    def test_plain_zero3_sends_what_the_closed_form_says(self):
        self.check(PLAIN)

    def test_hierarchical_gathers_send_what_the_closed_form_says(self):
        self.check(Case(hierarchical=True, accumulate=3))

    def test_mics_sends_one_sum_across_hosts_however_many_micro_batches_there_are(self):
        self.check(Case(shard_size=2, accumulate=3))


if __name__ == "__main__":
    unittest.main()
