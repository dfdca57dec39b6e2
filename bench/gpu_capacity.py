#!/usr/bin/env python3
"""Models that one GPU does not hold: `tessera train` runs each, and its plan stands beside the bytes.

    bench/gpu_capacity.py [--only gpt-7b] [--steps 4] [--program build/tessera]

gpt-7b has everything in host memory, gpt-13b its states split over the GPU and host memory, without
a disk. Needs a GPU of about 140 GB and 128 GiB of host memory. The table is printed, and written to
--output as capacity.md and capacity.json beside a log of each run. Exit code 1: a run failed.
"""
import argparse
import dataclasses
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
# After the path is set, so that the script runs from anywhere.
import gpt_presets  # noqa: E402
import gpu_modes  # noqa: E402
import gpu_report  # noqa: E402
import gpu_run  # noqa: E402

LIMIT_S = 600.0
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclasses.dataclass(frozen=True)
class Case:
    preset: str
    where: str
    batch: int
    flags: tuple


CASES = (
    Case("gpt-7b", "everything in host memory", 4,
         ("--parameters", "host", "--optimizer", "host")),
    Case("gpt-13b", "states on the GPU and in host memory", 1,
         ("--device-budget", "110GiB", "--host-budget", "112GiB")),
)


def bytes_of(text):
    """Of "98.3 GiB" or "-"."""
    number, _, unit = text.partition(" ")
    return 0 if text == "-" else float(number) * UNITS[unit]


def planned_bytes(output):
    """(GPU with activations, host) that the table before a run says."""
    size = r"([\d.]+ [KMGT]?i?B|-)"
    all_of = re.search(rf"^all +{size} +{size} +{size}$", output, re.M)
    device = re.search(rf"^device memory with activations: {size} at most$", output, re.M)
    if all_of is None or device is None:
        raise gpu_run.RunError("it printed no plan")
    return bytes_of(device[1]), bytes_of(all_of[2])


def run_case(case, args):
    """A row of the table."""
    log = args.output / f"capacity-{case.preset}.log"
    row = {"preset": case.preset, "where": case.where, "batch": case.batch,
           "num_params": gpt_presets.num_params(case.preset),
           "tokens": case.batch * gpt_presets.sequence_tokens(case.preset), "reason": None}
    words = gpu_modes.tessera_words(args.program, case.preset, "cuda", case.batch, case.flags)
    try:
        figures = gpu_run.run_tessera(words, args.steps, args.limit, log, log.with_suffix(".jsonl"))
        device, host = planned_bytes(log.read_text(encoding="utf-8"))
    except gpu_run.RunError as error:
        return {**row, "reason": str(error)}
    return {**row, "step_s": figures.step_s, "device_peak_bytes": figures.device_peak_bytes,
            "device_planned_bytes": device, "host_peak_bytes": figures.host_peak_bytes,
            "host_planned_bytes": host}


COLUMNS = (
    ("preset", lambda row: row["preset"]),
    ("where", lambda row: row["where"]),
    ("parameters", lambda row: f"{row['num_params']:,}"),
    ("tokens", lambda row: f"{row['tokens']:,}"),
    ("step s", lambda row: gpu_report.seconds_cell(row.get("step_s"))),
    ("GPU GiB", lambda row: gpu_report.cell(row.get("device_peak_bytes"), ".1f", 2**30)),
    ("planned", lambda row: gpu_report.cell(row.get("device_planned_bytes"), ".1f", 2**30)),
    ("host GiB", lambda row: gpu_report.cell(row.get("host_peak_bytes"), ".1f", 2**30)),
    ("planned", lambda row: gpu_report.cell(row.get("host_planned_bytes"), ".1f", 2**30)),
    ("", lambda row: (row["reason"] or "").replace("|", "/")),
)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    presets = [case.preset for case in CASES]
    parser.add_argument("--only", choices=presets, action="append", help="may be repeated")
    parser.add_argument("--steps", type=int, default=4, help="of each run; two of them warm up")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS",
                        help="of each run")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/tessera")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench-gpu")
    args = parser.parse_args(arguments)
    if args.steps <= gpu_run.WARM_UP_STEPS:
        parser.error(f"more than {gpu_run.WARM_UP_STEPS} steps")
    args.only = args.only or presets
    return args


def main(arguments):
    args = parse_arguments(arguments)
    args.program, args.output = args.program.resolve(), args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    rows = [run_case(case, args) for case in CASES if case.preset in args.only]
    text = "\n".join(gpu_report.markdown([title for title, _ in COLUMNS],
                                         [[of(row) for _, of in COLUMNS] for row in rows])) + "\n"
    print(text, end="", flush=True)
    (args.output / "capacity.md").write_text(text, encoding="utf-8")
    (args.output / "capacity.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["reason"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
