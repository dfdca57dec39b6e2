#!/usr/bin/env python3
"""Training with states on NVMe: time against what binds it, memory against the plan.

    bench/tiers.py [--program build/tessera] [--directory DIR] [--preset gpt2-124m] [--rounds 3]

Every round measures, one after the other: the step with everything in memory (what it computes); the
step under each host budget with NVMe; the disk alone, with the same mix of reads and writes. So

    overlap     = step on NVMe / max(step in memory, bytes of a step / rate of the disk), at most 1.15
    prediction  = what `tessera train` said before it allocated anything / step on NVMe, within 25 %
    memory      = peak RSS - base and activations, at most the plan + 10 %

Base and activations are what is left of the peak RSS of an unsharded run, less parameters, gradients and
moments (16 bytes per parameter) and less the one full gradient that autograd holds. That run has two
micro-batches of the same size, so that all gradients are there while activations are at their most. Ratios
outside of their limits are said to be so, and do not change the exit code: a time depends on the
machine. A run that fails does: 1.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 2  # the first records, the second has no update behind it
OVERLAP_LIMIT = 1.15
PREDICTION_LIMIT = 0.25
MEMORY_LIMIT = 1.10
MIB = 2.0**20


def fail(text):
    print(f"tiers: {text}", file=sys.stderr)
    sys.exit(1)


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        fail(f"failed: {' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


class Training:
    """One run of `tessera train`, and what it measured."""

    def __init__(self, args, extra, accumulate=1):
        with tempfile.TemporaryDirectory() as folder:
            metrics = pathlib.Path(folder) / "metrics.jsonl"
            self.text = run([args.program, "train", "--ranks", "1", "--preset", args.preset, "--data", "random",
                             "--batch", str(args.batch * accumulate), "--accumulate", str(accumulate), "--seq", str(args.sequence), "--steps", str(args.steps),
                             "--metrics", str(metrics), *extra])
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        timed = lines[WARM_UP_STEPS:]
        self.step_s = statistics.median(line["step_s"] for line in timed)
        self.read_bytes = statistics.fmean(line.get("nvme_read_bytes", 0) for line in timed)
        self.written_bytes = statistics.fmean(line.get("nvme_written_bytes", 0) for line in timed)
        self.rss_bytes = max(line["rss_peak_bytes"] for line in lines)
        self.losses = [line["loss"] for line in lines]
        self.norms = [line["grad_norm"] for line in lines]

    def predicted_s(self):
        found = re.search(r"predicted step\s+([\d.e+-]+) (ms|s)\b", self.text)
        return float(found[1]) * (1e-3 if found[2] == "ms" else 1) if found else None


def disk_seconds(rates, read_bytes, written_bytes):
    """At least: what is read and written at once at the mixed rate, the rest by itself."""
    both = min(read_bytes, written_bytes)
    mixed = rates["mixed"]["read_bytes_per_s"] + rates["mixed"]["write_bytes_per_s"]
    return (2 * both / mixed + (read_bytes - both) / rates["read"]["read_bytes_per_s"] +
            (written_bytes - both) / rates["write"]["write_bytes_per_s"])


def disk_rates(args, directory):
    document = json.loads(run([args.program, "bench-io", directory, "--seconds", "2", "--json"]))
    return {row["load"]: row["tessera"] for row in document["rows"]}


def planned_bytes(args, budget, directory):
    """Memory that the plan of this budget states, and the full gradient that torch holds beside it."""
    document = json.loads(run([args.program, "inspect", "--preset", args.preset, "--seq", str(args.sequence),
                               "--host-budget", budget, "--nvme", directory, "--json"]))
    tiers = document["tiers"]
    memory = sum(line["bytes"] for line in tiers["bytes"] if line["tier"] != "nvme")
    return memory, tiers["full_gradient_bytes"], document["totals"]["numel"]


def verdict(good):
    return "" if good else "  <- outside of its limit"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(ROOT / "build" / "tessera"))
    parser.add_argument("--directory", help="on the disk to measure (default: build/)")
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", default="300MiB,600MiB,1200MiB")
    parser.add_argument("--json", help="writes the figures there, too")
    args = parser.parse_args()
    budgets = args.budgets.split(",")
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=args.directory or ROOT / "build") as directory:
        unsharded = Training(args, ["--unsharded"], accumulate=2)
        rounds = []
        for number in range(args.rounds):
            memory = Training(args, [])
            placed = {budget: Training(args, ["--host-budget", budget, "--nvme", directory]) for budget in budgets}
            rounds.append((memory, placed, disk_rates(args, directory)))
            print(f"round {number + 1} of {args.rounds}: in memory {memory.step_s:.2f} s, " +
                  ", ".join(f"{budget} {run_.step_s:.2f} s" for budget, run_ in placed.items()), flush=True)
        plans = {budget: planned_bytes(args, budget, directory) for budget in budgets}

    compute_s = statistics.median(memory.step_s for memory, _, _ in rounds)
    report = {"preset": args.preset, "batch": args.batch, "sequence": args.sequence, "compute_s": compute_s, "budgets": {}}
    print(f"\n{args.preset}, {args.batch} x {args.sequence} tokens, one rank; medians of {args.rounds} rounds")
    print(f"step in memory {compute_s:.2f} s")
    for budget in budgets:
        runs = [placed[budget] for _, placed, _ in rounds]
        disk_s = statistics.median(disk_seconds(rates, placed[budget].read_bytes, placed[budget].written_bytes)
                                   for _, placed, rates in rounds)
        step_s = statistics.median(each.step_s for each in runs)
        predicted = [each.predicted_s() for each in runs]
        predicted_s = statistics.median(predicted) if None not in predicted else None
        overlap = step_s / max(compute_s, disk_s)
        plan_bytes, gradient_bytes, num_params = plans[budget]
        base_bytes = unsharded.rss_bytes - 16 * num_params - gradient_bytes
        rss_bytes = max(each.rss_bytes for each in runs) - base_bytes
        allowed = plan_bytes + gradient_bytes
        same = all(each.losses == rounds[0][0].losses and each.norms == rounds[0][0].norms for each in runs)
        print(f"\nbudget {budget}: {runs[0].read_bytes / 1e9:.2f} GB read, {runs[0].written_bytes / 1e9:.2f} GB written per step")
        print(f"  step {step_s:.2f} s, disk alone {disk_s:.2f} s: {overlap:.2f} of the larger, at most {OVERLAP_LIMIT}"
              + verdict(overlap <= OVERLAP_LIMIT))
        if predicted_s is not None:
            print(f"  predicted {predicted_s:.2f} s: {predicted_s / step_s:.2f}, within {PREDICTION_LIMIT:.0%}"
                  + verdict(abs(predicted_s / step_s - 1) <= PREDICTION_LIMIT))
        print(f"  memory {rss_bytes / MIB:.0f} MiB above base and activations; plan {plan_bytes / MIB:.0f} MiB"
              f" + full gradient {gradient_bytes / MIB:.0f} MiB: {rss_bytes / allowed:.2f}, at most {MEMORY_LIMIT}"
              + verdict(rss_bytes <= MEMORY_LIMIT * allowed))
        print(f"  losses and norms {'equal' if same else 'NOT EQUAL'} to those in memory, every bit")
        if not same:
            fail("a placement changed a number")
        report["budgets"][budget] = {"step_s": step_s, "disk_s": disk_s, "overlap": overlap, "predicted_s": predicted_s,
                                     "rss_bytes": rss_bytes, "plan_bytes": plan_bytes, "gradient_bytes": gradient_bytes}
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
