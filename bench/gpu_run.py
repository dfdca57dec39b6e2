"""One run of one system: its command, its limits, and the figures that it gave.

A run that fails raises RunError, whose text is what the table shows. Nothing here knows of modes,
bounds or tables.
"""
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess

WARM_UP_STEPS = 2  # the first records, the second has no update behind it; peers.py as many
GIB = 2.0**30
# Of a launcher that this process may itself be under: one rank is all that runs here.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE",
                      "MASTER_ADDR", "MASTER_PORT")
REASON_CHARACTERS = 160
# Said while a process ends, after what made it end.
AFTERMATH = re.compile(r"destroy_process_group|resource_tracker|warnings?\.warn|Warning")


class RunError(Exception):
    """A run gave no figure; the text says why, in one line."""


@dataclasses.dataclass
class Figures:
    """Of one run at one batch. Seconds and bytes are per step, peaks of the process; None: not
    known."""
    step_s: float
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    exposed_wait_s: float | None = None
    device_peak_bytes: float | None = None
    host_peak_bytes: float | None = None
    h2d_bytes: float | None = None
    d2h_bytes: float | None = None
    nvme_read_bytes: float | None = None
    nvme_written_bytes: float | None = None
    disk_mixed: float | None = None  # bytes per second, of the disk just before and after the run
    losses: tuple = ()
    grad_norms: tuple = ()


def middle_of(runs):
    """Each figure's median over the rounds; losses and norms are the first round's."""
    middle = dataclasses.replace(runs[0])
    for field in dataclasses.fields(Figures):
        values = [getattr(run, field.name) for run in runs]
        if field.name not in ("losses", "grad_norms"):
            known = [value for value in values if value is not None]
            setattr(middle, field.name, statistics.median(known) if known else None)
    return middle


# --- what a run printed or wrote --------------------------------------------------------------


def peer_figures(output):
    """{batch: Figures} from the RESULT lines of peers.py."""
    figures = {}
    for line in output.splitlines():
        if not line.startswith("RESULT "):
            continue
        result = json.loads(line.removeprefix("RESULT "))
        figures[result["batch"]] = Figures(
            step_s=min(result["step_s"], result["free_step_s"]),
            forward_s=result["forward_s"], backward_s=result["backward_s"],
            update_s=result["optimizer_s"],
            device_peak_bytes=result["device_peak_gib"] * GIB or None,
            host_peak_bytes=result["rss_gib"] * GIB,
            losses=tuple(result["losses"]), grad_norms=tuple(result["grad_norms"]))
    return figures


def metrics_figures(text, num_steps):
    """Figures from a file of --metrics."""
    steps = [json.loads(line) for line in text.splitlines() if line.strip()]
    if len(steps) != num_steps or num_steps <= WARM_UP_STEPS:
        raise RunError(f"the metrics file has {len(steps)} steps; expected {num_steps}, more than "
                       f"{WARM_UP_STEPS}")

    def middle(name):
        values = [step.get(name) for step in steps[WARM_UP_STEPS:]]
        return None if None in values else statistics.median(values)

    def peak(name):
        values = [step.get(name) for step in steps]
        return None if None in values else max(values)

    return Figures(
        step_s=middle("step_s"), forward_s=middle("forward_s"), backward_s=middle("backward_s"),
        update_s=middle("update_s"), exposed_wait_s=middle("exposed_wait_s"),
        device_peak_bytes=peak("device_peak_bytes"), host_peak_bytes=peak("rss_peak_bytes"),
        h2d_bytes=middle("h2d_bytes"), d2h_bytes=middle("d2h_bytes"),
        nvme_read_bytes=middle("nvme_read_bytes"),
        nvme_written_bytes=middle("nvme_written_bytes"),
        losses=tuple(step.get("loss") for step in steps),
        grad_norms=tuple(step.get("grad_norm") for step in steps))


# --- processes --------------------------------------------------------------------------------


def reason_in(text, returncode):
    """The line that says why a process failed: the last that tells of an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not AFTERMATH.search(line)
               and re.search(r"error|exception|cannot|no such|not found|killed", line, re.I)]
    line = (telling or lines or ["it printed nothing"])[-1]
    if len(line) > REASON_CHARACTERS:
        line = line[:REASON_CHARACTERS - 3] + "..."
    ended = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    return f"{ended}: {line}"


def environment(variables):
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**own, **{name: str(value) for name, value in variables.items()}}


def run_process(words, limit_s, log=None, variables=None):
    """Runs one command in a session of its own; returns what it printed on standard output.

    At limit_s it is killed with everything that it started. What it printed is kept in `log`.
    """
    words = [str(word) for word in words]
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   stdin=subprocess.DEVNULL, text=True, errors="replace",
                                   env=environment(variables or {}), start_new_session=True)
    except OSError as error:
        raise RunError(f"cannot start: {error}") from error
    out, err, is_late = "", "", False
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        if process.poll() is None:  # late, or this process was interrupted
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        if log is not None:
            pathlib.Path(log).write_text(f"{' '.join(words)}\n{out}\n{err}\n", encoding="utf-8")
    if is_late:
        raise RunError(f"not done after {limit_s:.0f} s")
    if process.returncode != 0:
        raise RunError(reason_in(err.strip() or out, process.returncode))
    return out


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def remove_stale_locks(kernels):
    """Of a run that was killed while it built a kernel: the next would wait for it forever.

    Only for a folder that no process uses.
    """
    for lock in pathlib.Path(kernels).glob("*/lock"):
        lock.unlink()


def run_peer(words, limit_s, log, variables):
    """{batch: Figures} of one run of peers.py; RunError if it gave none."""
    # As torchrun and DeepSpeed's launcher set them for a world of one.
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 1,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    output = run_process(words, limit_s, log, {**alone, **variables})
    try:
        figures = peer_figures(output)
    except (ValueError, KeyError) as error:
        raise RunError(f"cannot use its RESULT line: {error!r}") from error
    if not figures:
        raise RunError("it printed no RESULT line")
    return figures


def run_tessera(words, num_steps, limit_s, log, metrics):
    """Figures of one run of `tessera train`; `words` lack --steps and --metrics."""
    pathlib.Path(metrics).unlink(missing_ok=True)
    run_process([*words, "--steps", num_steps, "--metrics", metrics], limit_s, log)
    try:
        return metrics_figures(pathlib.Path(metrics).read_text(), num_steps)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"cannot use the metrics file: {error!r}") from error
