#!/usr/bin/env python3
"""`tessera train` beside plain PyTorch, FSDP2 and DeepSpeed on one GPU, in one run.

    bench/gpu.py [--preset gpt-1b4] [--batches 8,32] [--modes resident,host] [--time-limit 540]

Measures what links, processor and disk can do, then every system in every mode that it has, then
prints one table: the step, its parts, the speed kept against plain PyTorch with everything on the
GPU, the ratio to the best peer and to the bound that follows from the measured rates, peaks of
memory and bytes per link. The same is written to --output as gpu.json and gpu.md, with a log of
each run, and as docs.md the tables of README.md and docs/benchmarks.md, which says how a figure
comes about.

A system that is missing or fails has a row that says why. Exit code 1: tessera failed in a mode.
"""
import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
# After the path is set, so that the script runs from anywhere.
import gpt_presets  # noqa: E402
import gpu_bounds  # noqa: E402
import gpu_claims  # noqa: E402
import gpu_half  # noqa: E402
import gpu_modes  # noqa: E402
import gpu_parity  # noqa: E402
import gpu_rates  # noqa: E402
import gpu_report  # noqa: E402
import gpu_run  # noqa: E402
import peer_python  # noqa: E402
from gpu_modes import OURS, TESSERA  # noqa: E402

LEAST_RUN_S = 5.0  # with less left nothing is started
HANG_S = 300.0     # a run may take this or HANG_FACTOR times what it should
HANG_FACTOR = 4


def say(text):
    print(text, file=sys.stderr, flush=True)


class Bench:
    """Runs tasks within the time limit and keeps what they gave."""

    def __init__(self, args, python, skip_reasons):
        self.args = args
        self.python = python
        self.skip_reasons = skip_reasons  # {system: reason}
        # {mode: reason}, of tessera's
        self.mode_reasons = {mode: reason for mode in args.modes
                             if (reason := gpu_modes.mode_reason(mode)) is not None}
        self.end = time.monotonic() + args.time_limit
        self.runs = {}     # (mode, system, batch): [Figures], one of each round
        self.reasons = {}  # the same: why there is none, or why there are no more
        self.took_s = {}   # Task: the longest of its runs
        # DeepSpeed's kernels have the same names for each device.
        self.kernels = ROOT / "build/peers-kernels" / args.device
        self.variables = {"TORCH_EXTENSIONS_DIR": self.kernels}

    def left_s(self):
        return self.end - time.monotonic()

    def limit_s(self, task):
        """So that a run that hangs does not take the time of all others."""
        return min(self.left_s(), max(HANG_S, HANG_FACTOR * task.guess_s(self.args.preset)))

    def find_half_budget(self):
        """Sets args.half_budget where it is needed and not given."""
        args = self.args
        if "half" not in args.modes or args.half_budget or not set(OURS) & set(args.systems):
            return
        try:
            found = gpu_half.budget_bytes(args.program, args.preset, args.device, args.directory,
                                          args.output / "half-budget.log")
            args.half_budget = f"{found}B"
        except gpu_run.RunError as error:
            self.mode_reasons["half"] = f"no budget: {error}"

    def run_all(self, tasks):
        for number, task in gpu_modes.rounds_of(tasks, self.args.rounds):
            reason = self.skip_reason(task)
            if reason is None:
                self.run(number, task)
            else:
                for batch in task.batches:
                    self.reasons.setdefault((task.mode, task.system, batch), reason)

    def skip_reason(self, task):
        """Why a task is not run (again), or None."""
        if task.system in self.skip_reasons:
            return self.skip_reasons[task.system]
        if task.system in OURS and task.mode in self.mode_reasons:
            return self.mode_reasons[task.mode]
        if all((task.mode, task.system, batch) in self.reasons for batch in task.batches):
            return self.reasons[task.mode, task.system, task.batches[0]]  # it failed before
        needed_s = self.took_s.get(task) or task.guess_s(self.args.preset)
        if self.left_s() < max(needed_s, LEAST_RUN_S):
            return (f"skipped: {max(0, self.left_s()):.0f} s of --time-limit left, needs about "
                    f"{needed_s:.0f} s")
        return None

    def run(self, number, task):
        begin = time.monotonic()
        try:
            figures = self.figures_of(number, task)
        except gpu_run.RunError as error:
            figures = {}
            reason = str(error)
        else:
            reason = "no RESULT line at this batch"
        took_s = time.monotonic() - begin
        self.took_s[task] = max(self.took_s.get(task, 0), took_s)
        for batch in task.batches:
            key = (task.mode, task.system, batch)
            if batch in figures:
                self.runs.setdefault(key, []).append(figures[batch])
            else:
                self.reasons[key] = reason
            text = f"{figures[batch].step_s:.4f} s" if batch in figures else reason
            say(f"round {number + 1}/{self.args.rounds}  {task.mode:<15}{task.name:<18}"
                f"batch {batch:>3}  {text}  ({took_s:.0f} s)")

    def figures_of(self, number, task):
        """{batch: Figures} of one process."""
        args = self.args
        steps = args.nvme_steps if task.mode in gpu_modes.NVME_MODES else args.steps
        log = args.output / f"{task.mode}-{task.name}-{task.batches[0]}-{number + 1}.log"
        with tempfile.TemporaryDirectory(prefix="gpu-", dir=args.directory) as directory:
            if task.system not in OURS:
                gpu_run.remove_stale_locks(self.kernels)
                words = gpu_modes.peer_words(self.python, args.peers, task.name, args.preset,
                                             args.device, task.batches, steps, directory)
                return gpu_run.run_peer(words, self.limit_s(task), log, self.variables)
            batch, = task.batches
            disk = []
            self.measure_disk(task, disk)
            flags = [*gpu_modes.mode_flags(task.mode, directory, args.half_budget),
                     *gpu_modes.timed_flags(task.system,
                                            batch * gpt_presets.sequence_tokens(args.preset),
                                            args.extra)]
            words = [*gpu_modes.launcher(task.mode),
                     *gpu_modes.tessera_words(args.program, args.preset, args.device, batch,
                                              [*flags, *args.extra])]
            figures = gpu_run.run_tessera(words, steps, self.limit_s(task), log,
                                          log.with_suffix(".jsonl"))
        self.measure_disk(task, disk)
        figures.disk_mixed = statistics.mean(disk) if disk else None
        return {batch: figures}

    def measure_disk(self, task, mixed):
        """Adds its rate as it is now, if this run is about it: a disk that has been idle is faster
        than one that has not, by up to 40 % within minutes."""
        if task.mode not in gpu_modes.NVME_MODES:
            return
        try:
            rates = gpu_rates.disk_rates(self.args.program, self.args.directory,
                                         self.args.rate_seconds, self.args.output / "disk-now.log")
            mixed.append(rates["disk_mixed"])
        except gpu_run.RunError as error:
            say(f"the disk cannot be measured: {error}")

    def figures(self):
        return {key: gpu_run.middle_of(runs) for key, runs in self.runs.items()}

    def bits(self):
        """{(mode, system, batch): Figures} of short runs with deterministic operators, at the first
        batch; what fails or has no time left is missing, and then its claim is not known."""
        args, batch, found = self.args, self.args.batches[0], {}
        modes = [mode for mode in args.modes
                 if mode in gpu_modes.SAME_BITS_MODES and mode != "resident"]
        for mode in ["resident", *(mode for mode in modes if mode not in self.mode_reasons)]:
            log = args.output / f"bits-{mode}.log"
            with tempfile.TemporaryDirectory(prefix="gpu-", dir=args.directory) as directory:
                flags = gpu_modes.mode_flags(mode, directory, args.half_budget)
                words = gpu_modes.tessera_words(args.program, args.preset, args.device, batch,
                                                [*flags, *args.extra, "--deterministic"])
                try:
                    found[mode, TESSERA, batch] = gpu_run.run_tessera(
                        words, args.nvme_steps, min(HANG_S, self.left_s()), log,
                        log.with_suffix(".jsonl"))
                except gpu_run.RunError as error:
                    say(f"bits of {mode}: {error}")
        return found

    def parity(self):
        """(Parity or None, reason)."""
        if self.left_s() < LEAST_RUN_S:
            return None, "no time left"
        try:
            return gpu_parity.measure(self.args, self.python, self.variables, self.args.output,
                                      self.left_s()), None
        except gpu_run.RunError as error:
            return None, str(error)


def skip_reasons_of(python):
    """{system: reason} for the peers that this interpreter cannot run."""
    reasons = {name: reason.split(";")[0] for name, reason in python.skip_reasons().items()}
    if "fsdp2" in reasons:
        reasons["plain"] = reasons["fsdp2"]
    if "deepspeed" in reasons:
        reasons["deepspeed-nvme"] = reasons["deepspeed"]
    return reasons


def machine_of(known, python):
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "gpu": known.get("gpu"), "cores": os.cpu_count(), "machine": platform.machine(),
            "torch": python.torch, "deepspeed": python.deepspeed}


def head_of(args, machine):
    return (f"{args.preset} ({gpt_presets.num_params(args.preset):,} parameters), "
            f"{gpu_modes.precision_of(args.device)}, AdamW, clipping {gpu_modes.CLIP_NORM}; "
            f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores, {machine['machine']}; torch "
            f"{machine['torch']}, DeepSpeed {machine['deepspeed'] or 'not installed'}; rounds: "
            f"{args.rounds}; {machine['date']}")


def report(args, bench, tasks, python, known, parity, parity_reason, bits):
    """(text, document)"""
    figures, rates, machine = bench.figures(), gpu_bounds.Rates.of(known), machine_of(known, python)
    rows = gpu_report.make_rows(args.preset, tasks, figures, bench.reasons, rates, args.extra)
    claims = gpu_claims.claims_of(figures, args.preset, args.batches, rates, bits)
    if parity is not None:
        claims += parity.claims()
    lines = ["# Tessera and its peers on one GPU", "", head_of(args, machine), "",
             *gpu_report.table(rows), "", *gpu_report.rates_table(known), ""]
    if claims:
        lines += gpu_report.claims_table(claims)
    else:
        lines.append(f"What is asked for is set for {gpu_claims.PRESET} at batches "
                     f"{', '.join(map(str, gpu_claims.BATCHES))}; nothing is judged here.")
    if parity_reason is not None:
        lines += ["", f"Parity was not measured: {parity_reason}"]
    document = {
        **machine, "preset": args.preset, "device": args.device, "steps": args.steps,
        "nvme_steps": args.nvme_steps, "rounds": args.rounds, "half_budget": args.half_budget,
        "num_params": gpt_presets.num_params(args.preset), "rates": known, "rows": rows,
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "parity": dataclasses.asdict(parity) if parity else parity_reason,
        "runs": [{"mode": mode, "system": system, "batch": batch, **dataclasses.asdict(run)}
                 for (mode, system, batch), runs in bench.runs.items() for run in runs],
    }
    return "\n".join(lines) + "\n", document


def listed(text, allowed, what, parser):
    words = [word for word in text.split(",") if word]
    unknown = [word for word in words if word not in allowed]
    if unknown or not words:
        parser.error(f"{what} {text}: there are {', '.join(allowed)}")
    return words


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-1b4", choices=gpt_presets.PRESETS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batches", default="8,32", help="sequences per step")
    parser.add_argument("--modes", default=",".join(gpu_modes.MODES),
                        help="of " + ", ".join(gpu_modes.MODES))
    parser.add_argument("--systems", default=",".join(gpu_modes.DEFAULT_SYSTEMS),
                        help="of " + ", ".join(gpu_modes.SYSTEMS))
    parser.add_argument("--steps", type=int, default=8, help="of each run; two of them warm up")
    parser.add_argument("--nvme-steps", type=int, default=4, help="the same, with NVMe")
    parser.add_argument("--rounds", type=int, default=1, help="each runs everything once")
    parser.add_argument("--rate-seconds", type=float, default=1.0, help="for each rate")
    parser.add_argument("--time-limit", type=float, default=3600, metavar="SECONDS",
                        help="what no longer fits is skipped, and the table says so")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/tessera")
    parser.add_argument("--python", help="with torch, for the peers (default: found)")
    parser.add_argument("--peers", type=pathlib.Path, default=ROOT / "bench/peers.py",
                        help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=pathlib.Path, default=ROOT / "build/bench-gpu/nvme",
                        help="on the disk for NVMe modes")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench-gpu")
    parser.add_argument("--half-budget",
                        help="--host-budget of mode half (default: one that keeps half)")
    parser.add_argument("--extra", default="", help="more flags of `tessera train`, with spaces")
    parser.add_argument("--bits", action="store_true",
                        help="compares modes bit for bit, in short runs with deterministic operators")
    parser.add_argument("--parity", action="store_true",
                        help="also compares losses, norms and parameters with plain PyTorch's")
    parser.add_argument("--parity-preset", default="gpt2-124m", choices=gpt_presets.PRESETS)
    parser.add_argument("--parity-batch", type=int, default=8)
    parser.add_argument("--parity-steps", type=int, default=50)
    args = parser.parse_args(arguments)
    if args.rounds < 1 or min(args.steps, args.nvme_steps,
                              args.parity_steps) <= gpu_run.WARM_UP_STEPS:
        parser.error(f"at least one round, and more than {gpu_run.WARM_UP_STEPS} steps each")
    args.modes = listed(args.modes, tuple(gpu_modes.MODES), "--modes", parser)
    args.systems = listed(args.systems, gpu_modes.SYSTEMS, "--systems", parser)
    try:
        args.batches = sorted({int(word) for word in args.batches.split(",")})
    except ValueError:
        parser.error(f"--batches {args.batches}: numbers, with commas")
    if args.batches[0] < 1:
        parser.error(f"--batches {args.batches[0]}: at least 1")
    args.extra = args.extra.split()
    return args


def main(arguments):
    args = parse_arguments(arguments)
    args.program = args.program.resolve()
    args.output = args.output.resolve()
    for folder in (args.output, args.directory):
        folder.mkdir(parents=True, exist_ok=True)
    python = peer_python.probe(args.python) if args.python else peer_python.find()
    bench = Bench(args, python.program, skip_reasons_of(python))
    known = gpu_rates.measure(python.program, args.program, args.directory, args.rate_seconds,
                              args.output)
    if "capability" in known:
        bench.variables["TORCH_CUDA_ARCH_LIST"] = known["capability"]
    bench.find_half_budget()
    tasks = gpu_modes.tasks_of(args.modes, args.systems, args.batches)
    bench.run_all(tasks)
    bits = bench.bits() if args.bits else {}
    parity, parity_reason = bench.parity() if args.parity else (None, None)
    text, document = report(args, bench, tasks, python, known, parity, parity_reason, bits)
    print(text, end="", flush=True)
    (args.output / "gpu.md").write_text(text, encoding="utf-8")
    (args.output / "docs.md").write_text("\n".join([
        *gpu_report.readme_table(document["rows"]), "", *gpu_report.doc_table(document["rows"])])
        + "\n", encoding="utf-8")
    (args.output / "gpu.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    failed = [key for key, reason in bench.reasons.items()
              if key[1] in OURS and not reason.startswith("skipped")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
