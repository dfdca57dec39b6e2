#!/usr/bin/env python3
"""Ways to send less between two hosts beside plain ZeRO-3, in one run: shard groups (MiCS), gathers
in two phases, secondary shards (hpZ), and gathers (qwZ) and reductions (qgZ) of blocks of integers.

    bench/two_hosts.py [--rate 1gbit] [--rounds 3] [--steps 8] [--only TITLE...] [--json FILE]

The hosts are two network namespaces of this machine with two ranks each. A veth pair connects them,
and a token bucket (tc tbf) at both ends limits it to --rate. Each host has a boot id of its own, so
that the program finds two hosts as it would on two machines; all addresses are private and exist
inside the namespaces alone. Needs root and iproute2; where namespaces are not permitted it says so
and exits with 0.

Every round runs every case once, and the next round in the opposite order. The figure of a run is
the median `step_s` after the warm-up, that of a case the median of its rounds, and a ratio is one
of two such medians. Bytes are those a host sends to the other one per step, as `tessera inspect`
predicts them and as rank 0 counts its own (times two). The last column compares what the
interfaces count in the whole run, headers and start included, with what rank 0 counts in it.

Full parameters are limited to --live-limit, less than the model, so that backward gathers again, as
with models that several hosts are there for: without that there is nothing for hpZ to bring.
Sequences are short, so that a machine whose few cores are shared by all ranks waits for the link as
ranks with a device each would. docs/benchmarks.md has results.
"""
import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from compare_peers import (BUSY_SHARE, WARM_UP_STEPS, RunError, busy_note,  # noqa: E402
                           cpu_seconds, metrics_step_s)

NUM_HOSTS, RANKS_PER_HOST = 2, 2
NUM_RANKS = NUM_HOSTS * RANKS_PER_HOST
DEVICE = "eth0"
STORE_PORT = 29500  # of a namespace that no other run has
RUN_LIMIT_S = 300
POLL_S = 0.05
# As a container has it: its own value for the file that names a boot of the kernel.
BOOT_ID = "/proc/sys/kernel/random/boot_id"
WITH_BOOT_ID = f'mount --bind "$0" {BOOT_ID} && exec "$@"'


@dataclasses.dataclass(frozen=True)
class Case:
    shard_size: int = NUM_RANKS
    hierarchical: bool = False
    accumulate: int = 1
    secondary_size: int = 1
    weight_bits: int = 0
    gradient_bits: int = 0

    @property
    def flags(self):
        return ([] if self.shard_size == NUM_RANKS else ["--shard-size", self.shard_size]) + \
            ["--hierarchical"] * self.hierarchical + \
            ([] if self.secondary_size == 1 else ["--hpz-size", self.secondary_size]) + \
            ["--quantize-weights"] * (self.weight_bits > 0) + \
            [f"--quantize-gradients={self.gradient_bits}"] * (self.gradient_bits > 0)

    @property
    def title(self):
        parts = [f"MiCS {self.shard_size}"] * (self.shard_size < NUM_RANKS) + \
            ["hierarchical"] * self.hierarchical + \
            [f"hpZ {self.secondary_size}"] * (self.secondary_size > 1) + \
            ["qwZ"] * (self.weight_bits > 0) + \
            [f"qgZ int{self.gradient_bits}"] * (self.gradient_bits > 0)
        return " + ".join(parts) or "plain ZeRO-3"

    @property
    def is_exact(self):
        return self.weight_bits == 0 and self.gradient_bits == 0

    @property
    def plain(self):
        return Case(accumulate=self.accumulate)


def cases_of(accumulate):
    exact = (Case(), Case(hierarchical=True), Case(shard_size=2),
             Case(secondary_size=RANKS_PER_HOST))
    encoded = (Case(weight_bits=8), Case(gradient_bits=8), Case(gradient_bits=4),
               Case(secondary_size=RANKS_PER_HOST, weight_bits=8, gradient_bits=8),
               Case(secondary_size=RANKS_PER_HOST, weight_bits=8, gradient_bits=4))
    return tuple(dataclasses.replace(case, accumulate=accumulate) for case in exact + encoded)


CASES = cases_of(1) + cases_of(4)


class NotPermitted(Exception):
    """Two hosts cannot be made here; the text says why."""


# --- figures ----------------------------------------------------------------------------------


def parse_rate(text):
    """Bytes per second of a rate as tc writes it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.lower())
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 1gbit or 500mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def sent_of_device(text, device=DEVICE):
    """The bytes sent so far, of one interface in the text of /proc/net/dev."""
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device and numbers:
            return int(numbers.split()[8])
    raise RunError(f"no interface {device} among the counters")


def plan(num_rounds, cases=CASES):
    """Yields (round, case) in the order in which they run."""
    for number in range(num_rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            yield number, case


def prediction(inspected, case):
    """(seconds, bytes a host sends) of a step, from what `tessera inspect --json` says."""
    wanted = {"shard_size": case.shard_size, "hierarchical": case.hierarchical,
              "secondary_size": case.secondary_size, "weight_bits": case.weight_bits,
              "gradient_bits_inside": case.gradient_bits,
              "gradient_bits_across": case.gradient_bits}
    for choice in inspected["mesh"]["choices"]:
        if all(choice[key] == value for key, value in wanted.items()):
            return choice["time_s"], choice["host_across_bytes"]
    raise RunError(f"inspect has no prediction for {case.title}")


def figures_of_metrics(text, num_steps):
    """Medians over the steps after the warm-up, and what a host sends in all steps together."""
    step_s = metrics_step_s(text, num_steps)  # checks the number of steps
    steps = [json.loads(line) for line in text.splitlines()]
    sent = [RANKS_PER_HOST * step["sent_across_bytes"] for step in steps]
    return {"step_s": step_s,
            "exposed_wait_s": statistics.median(step["exposed_wait_s"]
                                                for step in steps[WARM_UP_STEPS:]),
            "counted_bytes": statistics.median(sent[WARM_UP_STEPS:]),
            "run_counted_bytes": sum(sent)}


def summary(runs, predicted):
    """One dictionary per case that ran; ratio is None where plain ZeRO-3 did not."""
    step_s = {case: [run["step_s"] for run in runs if run["case"] == case] for case in CASES}
    rows = []
    for case, times in step_s.items():
        if not times:
            continue
        seconds, host_bytes = predicted[case]
        own = [run for run in runs if run["case"] == case]
        plain = step_s[case.plain]
        rows.append({
            "case": case, "step_s": statistics.median(times), "least_s": min(times),
            "greatest_s": max(times),
            "ratio": statistics.median(times) / statistics.median(plain) if plain else None,
            "exposed_wait_s": statistics.median(run["exposed_wait_s"] for run in own),
            "predicted_s": seconds, "predicted_ratio": seconds / predicted[case.plain][0],
            "predicted_bytes": host_bytes,
            "predicted_bytes_ratio": host_bytes / predicted[case.plain][1],
            "counted_bytes": statistics.median(run["counted_bytes"] for run in own),
            "interface_ratio": statistics.median(run["run_interface_bytes"] /
                                                 run["run_counted_bytes"] for run in own)})
    return rows


def table(rows):
    yield (f"{'micro-batches':>13}  {'mode':<22} {'exact':<5} {'step':>8}"
           f"  {'least .. greatest':>17}  {'/ plain':>7}  {'wait':>8}  {'predicted':>9}"
           f"  {'/ plain':>7}  {'predicted':>9}  {'/ plain':>7} {'counted':>9}"
           f"  {'interface / counted':>19}")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        ms = {key: 1e3 * row[key] for key in
              ("step_s", "least_s", "greatest_s", "exposed_wait_s", "predicted_s")}
        megabytes = [row[key] / 1e6 for key in ("predicted_bytes", "counted_bytes")]
        exact = "yes" if row["case"].is_exact else "no"
        yield (f"{row['case'].accumulate:>13}  {row['case'].title:<22} {exact:<5}"
               f" {ms['step_s']:>5.0f} ms"
               f"  {ms['least_s']:>6.0f} .. {ms['greatest_s']:>4.0f} ms  {ratio:>7}"
               f"  {ms['exposed_wait_s']:>5.0f} ms  {ms['predicted_s']:>6.0f} ms"
               f"  {row['predicted_ratio']:>7.2f}"
               f"  {megabytes[0]:>6.1f} MB  {row['predicted_bytes_ratio']:>7.2f}"
               f" {megabytes[1]:>6.1f} MB"
               f"  {row['interface_ratio']:>19.3f}")


# --- hosts ------------------------------------------------------------------------------------


def skip_reason(program):
    """Why there can be no run here, as far as it can be known without trying; else None."""
    if not program.is_file() or not os.access(program, os.X_OK):
        return f"no program at {program.name}: make build"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool}: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    shown = subprocess.run([str(program), "train", "--help"], capture_output=True, text=True,
                           check=False).stdout
    for flag in ("--shard-size", "--hpz-size", "--quantize-weights", "--quantize-gradients"):
        if flag not in shown:
            return f"{program.name} does not know {flag}: build it again"
    return None


class Hosts:
    """Two hosts with a link between them, while the context lasts; `rate` None: without a limit."""

    def __init__(self, folder, rate=None):
        self.folder = pathlib.Path(folder)
        self.rate = rate
        run = uuid.uuid4().hex[:8]
        self.names = [f"tessera-{run}-{host}" for host in range(NUM_HOSTS)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(NUM_HOSTS)]
        self.secret = uuid.uuid4().hex

    def __enter__(self):
        try:
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """With a namespace its interfaces go, and with one end of the pair the other."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def make(self):
        for name in self.names:
            self.tool("ip", "netns", "add", name)
        # Made where they belong, they never appear among this machine's own interfaces.
        self.tool("ip", "link", "add", DEVICE, "netns", self.names[0], "type", "veth",
                  "peer", "name", DEVICE, "netns", self.names[1])
        for host, name in enumerate(self.names):
            self.tool("ip", "-n", name, "address", "add", f"{self.addresses[host]}/24",
                      "dev", DEVICE)
            for device in ("lo", DEVICE):
                self.tool("ip", "-n", name, "link", "set", device, "up")
            if self.rate is not None:
                # Two milliseconds at once: a timer tick of the kernel, and several large segments.
                burst = max(128 * 1024, int(0.002 * parse_rate(self.rate)))
                self.tool("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf",
                          "rate", self.rate, "burst", str(burst), "latency", "50ms")
            (self.folder / f"boot_id.{host}").write_text(f"{uuid.uuid4()}\n")

    @staticmethod
    def tool(*words):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotPermitted(f"{' '.join(words[:4])}: {done.stderr.strip()}")

    def words(self, host, command):
        """`command` as it runs on the host."""
        return ["ip", "netns", "exec", self.names[host], "sh", "-c", WITH_BOOT_ID,
                str(self.folder / f"boot_id.{host}"), *(str(word) for word in command)]

    def sent_bytes(self):
        """What each host has sent to the other so far, with all headers."""
        readers = [subprocess.Popen(["ip", "netns", "exec", name, "cat", "/proc/net/dev"],
                                    stdout=subprocess.PIPE, text=True) for name in self.names]
        return [sent_of_device(reader.communicate()[0]) for reader in readers]

    def variables(self, rank):
        """As torchrun sets them."""
        return {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS),
                "LOCAL_RANK": str(rank % RANKS_PER_HOST), "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
                "MASTER_ADDR": self.addresses[0], "MASTER_PORT": str(STORE_PORT),
                "TESSERA_RUN_SECRET": self.secret, "OMP_NUM_THREADS": "1"}

    @contextlib.contextmanager
    def started(self, command, folder):
        """Yields the ranks' processes, and ends those that are left; output.RANK has their text."""
        processes = []
        try:
            for rank in range(NUM_RANKS):
                with (folder / f"output.{rank}").open("wb") as out:
                    processes.append(subprocess.Popen(
                        self.words(rank // RANKS_PER_HOST, command), stdout=out,
                        stderr=subprocess.STDOUT, env={**os.environ, **self.variables(rank)},
                        cwd=folder, start_new_session=True))
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


# --- runs -------------------------------------------------------------------------------------


def model_flags(args):
    return ["--preset", args.preset, "--seq", args.seq,
            "--set", f"live.limit_bytes={args.live_limit}"]


def train_command(program, model, case, num_steps, metrics):
    return [program, "train", *model, *case.flags, "--accumulate", case.accumulate,
            "--batch", NUM_RANKS * case.accumulate, "--steps", num_steps, "--data", "random",
            "--threads", 1, "--metrics", metrics]


def inspect(program, model, accumulate, *links):
    words = [program, "inspect", *model, "--ranks", NUM_RANKS, "--ranks-per-host", RANKS_PER_HOST,
             "--batch", NUM_RANKS * accumulate, "--accumulate", accumulate, *links, "--json"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        raise RunError(f"tessera inspect: {done.stderr.strip()}")
    return json.loads(done.stdout)


def check_hosts(output):
    """Ranks that take the namespaces for one host would measure something else."""
    if f"on {NUM_HOSTS} hosts of {RANKS_PER_HOST}" not in output:
        raise RunError(f"the ranks do not see {NUM_HOSTS} hosts of {RANKS_PER_HOST}:\n{output}")
    if "(gloo" not in output:
        raise RunError(f"the ranks of two hosts are not connected by gloo:\n{output}")


def train(hosts, command, folder):
    """Runs all ranks to the end; returns what each host has sent to the other."""
    before = hosts.sent_bytes()
    end = time.monotonic() + RUN_LIMIT_S
    with hosts.started(command, folder) as processes:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > end:
                raise RunError(f"not done after {RUN_LIMIT_S} s")
            time.sleep(POLL_S)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
    if failed:
        text = (folder / f"output.{failed[0]}").read_text(errors="replace")
        tail = "\n".join("    " + line for line in text.splitlines()[-12:])
        raise RunError(f"rank {failed[0]} ended with exit code "
                       f"{processes[failed[0]].returncode}:\n{tail}")
    check_hosts((folder / "output.0").read_text(errors="replace"))
    return [after - each for after, each in zip(hosts.sent_bytes(), before)]


def one_run(hosts, args, case):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        metrics = folder / "metrics.jsonl"
        command = train_command(args.program, model_flags(args), case, args.steps, metrics)
        begin, (machine, ours) = time.monotonic(), cpu_seconds()
        sent = train(hosts, command, folder)
        machine_now, ours_now = cpu_seconds()
        others = (machine_now - machine) - (ours_now - ours)
        return {"case": case, "run_interface_bytes": statistics.mean(sent),
                **figures_of_metrics(metrics.read_text(), args.steps),
                "others_share":
                    max(0.0, others / (os.cpu_count() * (time.monotonic() - begin)))}


def measure(hosts, args):
    runs = []
    for number, case in plan(args.rounds, args.cases):
        run = {"round": number, **one_run(hosts, args, case)}
        runs.append(run)
        print(f"round {number + 1}/{args.rounds}  {case.accumulate} x {case.title:<22} "
              f"{1e3 * run['step_s']:>6.0f} ms" + busy_note(run["others_share"]),
              file=sys.stderr, flush=True)
    return runs


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/tessera")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sequence (default 32)")
    parser.add_argument("--live-limit", default="4MiB",
                        help="of full parameters held at once (default 4MiB)")
    parser.add_argument("--rate", default="1gbit", help="of the link, each way (1gbit, 500mbit)")
    parser.add_argument("--link-inside", default="1GB",
                        help="bytes per second inside a host, for the prediction (default 1GB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--only", nargs="+", metavar="TITLE",
                        help="these modes beside plain ZeRO-3: " +
                             ", ".join(f"'{case.title}'" for case in cases_of(1)[1:]))
    parser.add_argument("--json", type=pathlib.Path, help="write all runs and ratios to this file")
    args = parser.parse_args(arguments)
    try:
        args.bytes_per_s = parse_rate(args.rate)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--rate {error}")
    if args.rounds < 1 or args.steps <= WARM_UP_STEPS:
        parser.error(f"--rounds {args.rounds}, --steps {args.steps}: at least one round, and more "
                     f"than {WARM_UP_STEPS} steps")
    known = {case.title for case in CASES}
    unknown = [title for title in args.only or [] if title not in known]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: there are {', '.join(sorted(known))}")
    args.cases = tuple(case for case in CASES
                       if args.only is None or case.title in args.only or case == case.plain)
    return args


def plain_json(each):
    return {**each, "case": dataclasses.asdict(each["case"])}


def report(args, runs, rows):
    print(*table(rows), sep="\n")
    busy = sum(run["others_share"] > BUSY_SHARE for run in runs)
    if busy:
        print(f"notice: during {busy} of {len(runs)} runs others used more than {BUSY_SHARE:.0%} "
              "of the cores; repeat this on an idle machine")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({
            "preset": args.preset, "seq": args.seq, "rate": args.rate,
            "live_limit": args.live_limit,
            "link_inside": args.link_inside, "rounds": args.rounds, "steps": args.steps,
            "cores": os.cpu_count(), "machine": platform.machine(),
            "runs": [plain_json(run) for run in runs],
            "rows": [plain_json(row) for row in rows]}, indent=1) + "\n")


def main(arguments):
    args = parse_arguments(arguments)
    args.program = args.program.resolve()
    # So that namespaces and ranks are removed then, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reason = skip_reason(args.program)
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    try:
        links = ("--link-inside", args.link_inside, "--link-across", f"{args.bytes_per_s:.0f}B")
        inspected = {k: inspect(args.program, model_flags(args), k, *links)
                     for k in {case.accumulate for case in args.cases}}
        predicted = {case: prediction(inspected[case.accumulate], case) for case in args.cases}
        print(f"{args.preset}, {NUM_HOSTS} hosts of {RANKS_PER_HOST} ranks, one sequence of "
              f"{args.seq} tokens per rank and micro-batch, {args.rate} between the hosts; "
              f"one thread per rank, {os.cpu_count()} cores for all, {platform.machine()}; "
              f"rounds: {args.rounds}",
              flush=True)
        with tempfile.TemporaryDirectory() as name, Hosts(name, args.rate) as hosts:
            runs = measure(hosts, args)
    except NotPermitted as error:
        print(f"skipped: {error}")
        return 0
    except RunError as error:
        print(f"two_hosts: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report(args, runs, summary(runs, predicted))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
