#!/usr/bin/env python3
"""Tessera beside plain PyTorch from the same initial parameters, on the same data.

    python gpu_parity.py INIT OURS THEIRS   in an interpreter with torch and safetensors: prints
                                            PARAMETERS and the distances of two final states

Losses and norms are compared step by step, parameters after the last step; all within the rounding
of the precision that both compute in. Of parameters that is the distance of all of them together
(2-norm): one whose gradient is rounding noise gets a step of AdamW's full size for it in either
system.
"""
import dataclasses
import json
import pathlib
import re
import sys

import gpu_modes
import gpu_run
from gpu_claims import at_most

ROUNDING = {"bf16": 2.0**-8, "fp32": 2.0**-16}
COMPARE_LIMIT_S = 120


@dataclasses.dataclass(frozen=True)
class Parity:
    preset: str
    num_steps: int
    bound: float
    loss: float  # the largest relative difference of a step
    norm: float
    parameters: float | None  # |ours - theirs| / |theirs|; None: not compared
    moved: float | None       # |ours - theirs| / |theirs - initial|

    def claims(self):
        what = f"{self.preset}, {self.num_steps} steps, against plain PyTorch: "
        return [at_most(what + name, self.bound, value, ".2e")
                for name, value in (("losses", self.loss), ("norms", self.norm),
                                    ("final parameters", self.parameters))]


def largest_difference(ours, theirs, num_steps):
    """Relative, over all steps."""
    if len(ours) != num_steps or len(theirs) != num_steps or None in ours:
        raise gpu_run.RunError(f"expected {num_steps} losses and norms of each, found {len(ours)} "
                               f"and {len(theirs)}")
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))


def compare_parameters(python, initial, ours, theirs, log):
    output = gpu_run.run_process([python, pathlib.Path(__file__).resolve(), initial, ours, theirs],
                                 COMPARE_LIMIT_S, log)
    found = re.search(r"^PARAMETERS (.*)$", output, re.M)
    if found is None:
        raise gpu_run.RunError("it printed no PARAMETERS line")
    return json.loads(found[1])


def measure(args, python, variables, folder, limit_s):
    """Parity, or RunError. Files of parameters are removed; logs stay in `folder`."""
    initial, ours, theirs = (folder / f"parity-{name}.safetensors"
                             for name in ("initial", "ours", "theirs"))
    try:
        words = gpu_modes.tessera_words(
            args.program, args.parity_preset, args.device, args.parity_batch,
            ["--save-init", initial, "--save", ours])
        tessera = gpu_run.run_tessera(words, args.parity_steps, limit_s,
                                      folder / "parity-tessera.log", folder / "parity.jsonl")
        words = gpu_modes.peer_words(python, args.peers, "plain", args.parity_preset, args.device,
                                     (args.parity_batch,), args.parity_steps, folder)
        plain = gpu_run.run_peer([*words, "--init", initial, "--save", theirs], limit_s,
                                 folder / "parity-plain.log", variables)[args.parity_batch]
        final = compare_parameters(python, initial, ours, theirs, folder / "parity-compare.log")
    finally:
        for file in (initial, ours, theirs):
            file.unlink(missing_ok=True)
    return Parity(args.parity_preset, args.parity_steps,
                  ROUNDING[gpu_modes.precision_of(args.device)],
                  largest_difference(tessera.losses, plain.losses, args.parity_steps),
                  largest_difference(tessera.grad_norms, plain.grad_norms, args.parity_steps),
                  final["parameters"], final["moved"])


def main(arguments):
    from safetensors.torch import load_file
    initial, ours, theirs = (load_file(name) for name in arguments)
    if ours.keys() != theirs.keys():
        print(f"error: other parameters: {sorted(ours.keys() ^ theirs.keys())}", file=sys.stderr)
        return 1

    def norm(tensors):
        return sum(t.double().pow(2).sum().item() for t in tensors) ** 0.5
    apart = norm(ours[name].double() - theirs[name].double() for name in theirs)
    moved = norm(theirs[name].double() - initial[name].double() for name in theirs)
    print("PARAMETERS " + json.dumps({"parameters": apart / norm(theirs.values()),
                                      "moved": apart / moved if moved else 0.0}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
