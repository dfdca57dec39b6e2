#!/usr/bin/env python3
"""`tessera train` beside DDP, FSDP2, DeepSpeed and plain LibTorch, on CPU, in one run.

    bench/compare_peers.py [--rounds 5] [--steps 10] [--json FILE]

Every round runs every system once, and the next round in the opposite order, so that a machine that
gets slower or faster does so for all of them. The figure of a run is the median step time after the
warm-up; for the peers that, or the time per step without synchronisation inside, whichever is
smaller. The figure of a system is the median of its rounds, and a ratio is one of two such medians.

Ratios above their limit are said to be so, and do not change the exit code: a time depends on the
machine. A system that fails does: 1. docs/benchmarks.md explains the systems and the limits.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
import peer_python  # noqa: E402  (after the path is set, so that the script runs from anywhere)

PRESET = "small"
WARM_UP_STEPS = 2  # of tessera; peers.py leaves out as many
RUN_LIMIT_S = 900  # DeepSpeed's first run compiles; nothing else comes near
POLL_S = 0.1
BUSY_SHARE = 0.05  # of all cores, used by others: beyond it a figure says little

TESSERA, DDP, FSDP2, DEEPSPEED, APART = "tessera", "ddp", "fsdp2", "deepspeed", "apart"
ONE_RANK, UNSHARDED = "one-rank", "unsharded"
TITLES = {  # in the order of an even round; neighbours are compared with each other
    TESSERA: "tessera, 2 ranks",
    DDP: "DDP, 2 ranks",
    FSDP2: "FSDP2, 2 ranks",
    DEEPSPEED: "DeepSpeed ZeRO-3, 2 ranks",
    APART: "two processes without communication",
    ONE_RANK: "tessera, 1 rank",
    UNSHARDED: "tessera --unsharded",
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    batch: int
    ours: str
    theirs: str
    limit: float | None  # of our step time / theirs; None: to know what is possible


COMPARISONS = tuple(
    Comparison(batch, ours, theirs, limit if ours == TESSERA else None)
    for batch, limit in ((2, 0.75), (16, 0.94))
    for ours in (TESSERA, APART)
    for theirs in (FSDP2, DEEPSPEED)
) + (
    Comparison(2, TESSERA, APART, 1.35),
    Comparison(16, TESSERA, APART, 1.10),
    Comparison(2, TESSERA, DDP, 1.0),
    Comparison(16, TESSERA, DDP, None),
) + tuple(Comparison(batch, ONE_RANK, UNSHARDED, 1.03) for batch in (2, 16))
BATCHES = tuple(sorted({comparison.batch for comparison in COMPARISONS}))


class RunError(Exception):
    """A system did not give its figure; the text says why."""


# --- figures ----------------------------------------------------------------------------------


def peer_step_s(output):
    """The step time in the RESULT line of peers.py."""
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if len(lines) != 1:
        raise RunError(f"expected one RESULT line, found {len(lines)}")
    result = json.loads(lines[0].removeprefix("RESULT "))
    return min(result["step_s"], result["free_step_s"])


def metrics_step_s(text, num_steps):
    """The median step time in a file of --metrics, without the steps that warm up."""
    steps = [json.loads(line) for line in text.splitlines() if line.strip()]
    if len(steps) != num_steps or num_steps <= WARM_UP_STEPS:
        raise RunError(f"the metrics file has {len(steps)} steps; expected {num_steps}, more than "
                       f"{WARM_UP_STEPS}")
    return statistics.median(step["step_s"] for step in steps[WARM_UP_STEPS:])


def plan(num_rounds, systems):
    """Yields (round, batch, system) in the order in which they run."""
    for number in range(num_rounds):
        for batch in BATCHES:
            for system in systems if number % 2 == 0 else reversed(systems):
                yield number, batch, system


def medians(runs):
    """{(batch, system): (median, least, greatest)} of runs [(batch, system, seconds)]."""
    times = {}
    for batch, system, seconds in runs:
        times.setdefault((batch, system), []).append(seconds)
    return {key: (statistics.median(s), min(s), max(s)) for key, s in times.items()}


def verdict(ratio, limit):
    if ratio is None:
        return "not measured"
    if limit is None:
        return ""
    return "within the limit" if ratio <= limit else "above the limit"


def judge(figures):
    """One dictionary per comparison; ratio is None where a side was not measured."""
    rows = []
    for c in COMPARISONS:
        ours, theirs = figures.get((c.batch, c.ours)), figures.get((c.batch, c.theirs))
        ratio = ours[0] / theirs[0] if ours and theirs else None
        rows.append({**dataclasses.asdict(c), "ratio": ratio, "verdict": verdict(ratio, c.limit)})
    return rows


def step_table(figures):
    yield f"{'batch':>5}  {'system':<36} {'step':>9}  {'least .. greatest':>19}"
    for batch in BATCHES:
        for system, title in TITLES.items():
            if (batch, system) in figures:
                middle, least, greatest = (1e3 * s for s in figures[batch, system])
                yield (f"{batch:>5}  {title:<36} {middle:>6.1f} ms  "
                       f"{least:>7.1f} .. {greatest:>5.1f} ms")


def ratio_table(rows):
    yield f"{'batch':>5}  {'ratio of':<64} {'ratio':>5}  {'limit':>5}"
    for row in rows:
        what = f"{TITLES[row['ours']]} / {TITLES[row['theirs']]}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        yield f"{row['batch']:>5}  {what:<64} {ratio:>5}  {limit:>5}  {row['verdict']}".rstrip()


# --- runs -------------------------------------------------------------------------------------


def run_together(commands, folder):
    """Runs the commands [(words, variables)] at the same time; returns what each printed.

    The first that fails ends the others: ranks wait for each other, some of them for half an hour.
    """
    outputs = [folder / f"output.{k}" for k in range(len(commands))]
    processes = []
    try:
        for (words, variables), output in zip(commands, outputs):
            with output.open("wb") as out:
                processes.append(subprocess.Popen(
                    [str(word) for word in words], stdout=out, stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, cwd=folder,
                    start_new_session=True))  # so that a kill reaches what it started, too
        end = time.monotonic() + RUN_LIMIT_S
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > end:
                raise RunError(f"not done after {RUN_LIMIT_S} s")
            time.sleep(POLL_S)
    except OSError as error:
        raise RunError(f"cannot start: {error}") from error
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    texts = [output.read_text(errors="replace") for output in outputs]
    failed = [k for k, process in enumerate(processes) if process.returncode > 0] or \
             [k for k, process in enumerate(processes) if process.returncode != 0]
    if failed:
        tail = "\n".join("    " + line for line in texts[failed[0]].splitlines()[-12:])
        raise RunError(f"exit code {processes[failed[0]].returncode}:\n{tail}")
    return texts


def cpu_seconds():
    """(of the whole machine, of our ended child processes), since some time in the past."""
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = (
        int(word) for word in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    ticks = user + nice + system + irq + softirq + steal
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ticks / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime


def timed_run(runner, system, batch):
    """(step time, share of the cores that others used meanwhile)."""
    begin, (machine, ours) = time.monotonic(), cpu_seconds()
    seconds = runner.step_s(system, batch)
    machine_now, ours_now = cpu_seconds()
    others = (machine_now - machine) - (ours_now - ours)
    return seconds, max(0.0, others / (os.cpu_count() * (time.monotonic() - begin)))


class Runner:
    """Runs one system at one batch and returns its step time."""

    def __init__(self, program, python, num_steps):
        self.program = program
        self.python = python
        self.num_steps = num_steps

    def step_s(self, system, batch):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            if system in (DDP, FSDP2, DEEPSPEED):
                return self.peers(system, batch, folder)
            if system == TESSERA:
                return self.tessera(folder, batch, "--ranks", 2)
            if system == ONE_RANK:
                return self.tessera(folder, batch, "--ranks", 1)
            if system == UNSHARDED:
                return self.tessera(folder, batch, "--unsharded")
            # A step of two ranks ends with the slower one.
            return self.tessera(folder, batch // 2, "--unsharded", at_once=2)

    def tessera(self, folder, batch, *how, at_once=1):
        files = [folder / f"metrics.{k}" for k in range(at_once)]
        run_together([([self.program, "train", "--preset", PRESET, *how, "--batch", batch,
                        "--steps", self.num_steps, "--data", "random", "--threads", 1,
                        "--lr", "1e-4", "--clip", "1.0", "--metrics", file], {})
                      for file in files], folder)
        try:
            return max(metrics_step_s(file.read_text(), self.num_steps) for file in files)
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"cannot use the metrics file: {error!r}") from error

    def peers(self, system, batch, folder):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        # As torchrun and DeepSpeed's launcher set them, without a third process on the cores.
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                  "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu",
                  "TORCH_EXTENSIONS_DIR": str(peer_python.VENV / "kernels"),
                  "PATH": f"{pathlib.Path(self.python).parent}:{os.environ['PATH']}"}
        words = [self.python, ROOT / "bench/peers.py", "--system", system, "--preset", PRESET,
                 "--device", "cpu", "--batch", batch, "--steps", self.num_steps, "--threads", 1,
                 "--clip", "1.0"]
        texts = run_together([(words, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                              for rank in range(2)], folder)
        return peer_step_s(texts[0])


def busy_note(others_share):
    if others_share <= BUSY_SHARE:
        return ""
    return f"  (others used {others_share:.0%} of the cores)"


def measure(runner, num_rounds, skipped):
    """Runs the plan; a system that fails is added to `skipped` and left out of the rest."""
    systems = [system for system in TITLES if system not in skipped]
    runs = []
    for number, batch, system in plan(num_rounds, systems):
        if system in skipped:
            continue
        try:
            seconds, others = timed_run(runner, system, batch)
        except RunError as error:
            skipped[system] = f"failed at batch {batch}: {error}"
            print(f"{TITLES[system]}: {skipped[system]}", file=sys.stderr, flush=True)
            continue
        runs.append({"round": number, "batch": batch, "system": system, "step_s": seconds,
                     "others_share": round(others, 3)})
        print(f"round {number + 1}/{num_rounds}  batch {batch:>2}  {TITLES[system]:<36} "
              f"{1e3 * seconds:>7.1f} ms" + busy_note(others), file=sys.stderr, flush=True)
    return runs


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/tessera")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--only", help="of these systems, with commas: " + ", ".join(TITLES))
    parser.add_argument("--json", type=pathlib.Path, help="write all runs and ratios to this file")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.steps <= WARM_UP_STEPS:
        parser.error(f"--rounds {args.rounds}, --steps {args.steps}: at least one round, and more "
                     f"than {WARM_UP_STEPS} steps")
    args.only = args.only.split(",") if args.only else list(TITLES)
    unknown = [name for name in args.only if name not in TITLES]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the systems are {', '.join(TITLES)}")
    return args


def main(arguments):
    args = parse_arguments(arguments)
    python = peer_python.find()
    reasons = python.skip_reasons()
    skipped = {s: reasons.get(s, "not in --only") for s in TITLES
               if s in reasons or s not in args.only}
    print(f"{PRESET}, one thread per process, {os.cpu_count()} cores, {platform.machine()}; "
          f"rounds: {args.rounds}, interleaved; torch {python.torch}, DeepSpeed {python.deepspeed}",
          flush=True)
    not_to_run = dict(skipped)
    runs = measure(Runner(args.program.resolve(), str(python.program), args.steps), args.rounds,
                   skipped)
    figures = medians((run["batch"], run["system"], run["step_s"]) for run in runs)
    rows = judge(figures)
    print("", *step_table(figures), "", *ratio_table(rows), sep="\n")
    busy = sum(run["others_share"] > BUSY_SHARE for run in runs)
    if busy:
        print(f"notice: during {busy} of {len(runs)} runs others used more than {BUSY_SHARE:.0%} "
              "of the cores; repeat this on an idle machine")
    for system, reason in skipped.items():
        print(f"without {TITLES[system]}: {reason.splitlines()[0]}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({
            "preset": PRESET, "rounds": args.rounds, "steps": args.steps, "cores": os.cpu_count(),
            "machine": platform.machine(), "torch": python.torch, "deepspeed": python.deepspeed,
            "runs": runs, "ratios": rows, "skipped": skipped}, indent=1) + "\n")
    return 1 if skipped.keys() - not_to_run.keys() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
