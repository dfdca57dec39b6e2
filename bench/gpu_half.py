"""The host budget with which half of the states stay in host memory.

Besides states the plan has gradients, new parameters and buffers in host memory, so the budget is
asked of the plan itself: `tessera inspect` says what would be where, and allocates nothing.
"""
import json

import gpt_presets
import gpu_modes
import gpu_run

LIMIT_S = 120.0
MOST_TRIES = 12
# Whole tensors stay or go: of gpt-1b4's states, a matrix has 1.2 %.
ENOUGH = 0.01
ACCEPTED = 0.05


def states_of(plan):
    """(bytes in host memory, on NVMe) of optimizer states, from a plan as JSON."""
    held = {"host": 0, "nvme": 0}
    for line in plan["tiers"]["bytes"]:
        tier = "host" if line["tier"] == "pinned" else line["tier"]
        if line["role"] == "optimizer" and tier in held:
            held[tier] += line["bytes"]
    return held["host"], held["nvme"]


def planned_states(program, preset, device, directory, budget_bytes, log=None):
    words = [program, "inspect", "--json", "--preset", preset, "--device", device, "--precision",
             gpu_modes.precision_of(device),
             *gpu_modes.mode_flags("half", directory, f"{budget_bytes}B")]
    output = gpu_run.run_process(words, LIMIT_S, log)
    try:
        return states_of(json.loads(output))
    except (ValueError, KeyError, TypeError) as error:
        raise gpu_run.RunError(f"cannot use what inspect printed: {error!r}") from error


def find_budget(plan, first_bytes):
    """Bytes; plan(bytes) gives (host, NVMe). RunError if no budget comes near one half."""
    budget, best = first_bytes, (float("inf"), 0, 0.0)
    for _ in range(MOST_TRIES):
        host, nvme = plan(budget)
        if host + nvme == 0:
            raise gpu_run.RunError("no states leave the device in the plan of mode half")
        share = host / (host + nvme)
        best = min(best, (abs(share - 0.5), budget, share))
        if best[0] <= ENOUGH:
            break
        # What else is in host memory depends little on how many states are.
        budget += (host + nvme) // 2 - host
    distance, budget, share = best
    if distance > ACCEPTED:
        raise gpu_run.RunError(f"no budget was found that keeps half of the states in host memory; "
                               f"{budget} B keep {share:.0%}")
    return budget


def budget_bytes(program, preset, device, directory, log=None):
    def plan(budget):
        return planned_states(program, preset, device, directory, budget, log)
    # Half of the states (6 B/param), gradients (2) and new parameters (2).
    return find_budget(plan, 10 * gpt_presets.num_params(preset))
