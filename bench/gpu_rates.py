#!/usr/bin/env python3
"""What the links, the processor and the disk of this machine can do, in bytes per second.

    python gpu_rates.py --seconds 1     in an interpreter with torch: prints RATES and a JSON object

As a module (nothing but the standard library) it also measures the disk by `tessera bench-io` and
the processor's AdamW by update_bench. Whatever cannot be measured is left out, with the reason.
"""
import argparse
import json
import os
import pathlib
import re
import sys
import time

import gpu_run

COPY_BYTES = 256 << 20
ADAMW_NUMEL = 1 << 26  # 1 GiB of parameters, gradients and moments: no cache holds that
ADAMW_BYTES = 28       # fp32: four tensors read, three written
DISK_FILE_BYTES = "4GiB"
START_LIMIT_S = 90     # of an interpreter that imports torch and finds a GPU


# --- in an interpreter with torch -------------------------------------------------------------


def per_second(torch, num_bytes, start, seconds):
    """Bytes per second of start(), repeated without a wait in between for about `seconds`."""
    def timed(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            start()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    timed(2)
    times = max(3, round(seconds * 3 / timed(3)))
    return times * num_bytes / timed(times)


def link_rates(torch, seconds):
    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def up():
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)

    def down():
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    def both():
        up()
        down()

    at_once = per_second(torch, COPY_BYTES, both, seconds)
    return {"h2d": per_second(torch, COPY_BYTES, up, seconds),
            "d2h": per_second(torch, COPY_BYTES, down, seconds),
            "h2d_of_both": at_once, "d2h_of_both": at_once}


def device_rate(torch, seconds):
    source = torch.empty(8 * COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return per_second(torch, 2 * source.numel(), lambda: target.copy_(source), seconds)


def torch_adamw_rate(torch, seconds):
    """Of torch's fused AdamW on all cores: fp32 gradients in, no other parameter out."""
    weight = torch.nn.Parameter(torch.full((ADAMW_NUMEL,), 0.02))
    weight.grad = torch.full((ADAMW_NUMEL,), 1e-3)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    optimizer.step()
    best_s, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        optimizer.step()
        best_s = min(best_s, time.perf_counter() - begin)
    return ADAMW_BYTES * ADAMW_NUMEL / best_s


def measure_with_torch(seconds):
    import torch
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    known = {"torch": torch.__version__, "reasons": {}}
    if torch.cuda.is_available():
        known["gpu"] = torch.cuda.get_device_name()
        known["capability"] = ".".join(str(part) for part in torch.cuda.get_device_capability())
        known.update(link_rates(torch, seconds))
        known["device"] = device_rate(torch, seconds)
    else:
        known["reasons"]["links"] = "torch finds no GPU"
    known["adamw"] = torch_adamw_rate(torch, seconds)
    known["adamw_by"] = f"torch's fused AdamW, {torch.get_num_threads()} threads"
    return known


# --- with the standard library ----------------------------------------------------------------


def torch_rates(python, seconds, log):
    words = [python, pathlib.Path(__file__).resolve(), "--seconds", seconds]
    output = gpu_run.run_process(words, START_LIMIT_S + 10 * seconds, log)
    found = re.search(r"^RATES (.*)$", output, re.M)
    if found is None:
        raise gpu_run.RunError("it printed no RATES line")
    return json.loads(found[1])


def disk_rates(program, directory, seconds, log):
    """By our own engine: the disk's rate as a step could use it."""
    # Without a path it finds no fio, beside which it would measure for as long again.
    output = gpu_run.run_process(
        [program, "bench-io", directory, "--seconds", seconds, "--bytes", DISK_FILE_BYTES,
         "--json"], 60 + 30 * seconds, log, {"PATH": ""})
    try:
        rows = {row["load"]: row["tessera"] for row in json.loads(output)["rows"]}
        mixed = rows["mixed"]
        return {"disk_read": rows["read"]["read_bytes_per_s"],
                "disk_write": rows["write"]["write_bytes_per_s"],
                "disk_mixed": mixed["read_bytes_per_s"] + mixed["write_bytes_per_s"]}
    except (ValueError, KeyError, TypeError) as error:
        raise gpu_run.RunError(f"cannot use what bench-io printed: {error!r}") from error


def bench_adamw_rate(bench, seconds, log):
    """(rate, name) of Tessera's own update, at the best number of threads of update_bench."""
    output = gpu_run.run_process(
        [bench, "--benchmark_filter=adamw_bf16", f"--benchmark_min_time={seconds}",
         f"--update_elements={ADAMW_NUMEL}", "--benchmark_format=json"], 60 + 20 * seconds, log)
    try:
        return max((run["bytes_per_second"], run["name"])
                   for run in json.loads(output)["benchmarks"] if "bytes_per_second" in run)
    except (ValueError, KeyError, TypeError) as error:
        raise gpu_run.RunError(f"cannot use what update_bench printed: {error!r}") from error


def find_update_bench(program):
    """update_bench of the build that `program` is of, or None."""
    built = pathlib.Path(program).resolve().parents[1] / "bench/update_bench"
    return built if built.exists() else None


def measure(python, program, directory, seconds, log_folder):
    """All rates, with "reasons" for those that are missing."""
    known = {"reasons": {}}

    def attempt(what, work):
        try:
            return work()
        except gpu_run.RunError as error:
            known["reasons"][what] = str(error)
            return {}

    for name, value in attempt("torch", lambda: torch_rates(
            python, seconds, log_folder / "rates-torch.log")).items():
        known[name] = {**known["reasons"], **value} if name == "reasons" else value
    known.update(attempt("disk", lambda: disk_rates(program, directory, seconds,
                                                    log_folder / "rates-disk.log")))
    bench = find_update_bench(program)
    if bench is not None:
        ours = attempt("update_bench", lambda: dict(zip(("adamw", "adamw_by"), bench_adamw_rate(
            bench, seconds, log_folder / "rates-update.log"))))
        if ours and ours["adamw"] > known.get("adamw", 0):
            known.update(ours)
    return known


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each rate")
    args = parser.parse_args(arguments)
    print("RATES " + json.dumps(measure_with_torch(args.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
