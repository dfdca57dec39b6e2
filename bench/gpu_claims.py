"""What Tessera is asked to reach on one H200 with gpt-1b4, held against what was measured.

A claim that needs a figure which is missing is not known, rather than reached or missed. So is one
against the best peer when it holds against those that ran and another did not run.
"""
import dataclasses

import gpt_presets
import gpu_report
from gpu_modes import DEEPSPEED, FSDP2, PLAIN, TESSERA

PRESET = "gpt-1b4"
BATCHES = (8, 32)
RESIDENT_OF_PLAIN = 1.02
HOST_STEP_S = {8: 0.37, 32: 0.66}
HOST_OF_BEST_PEER = {8: 3.0, 32: 1.75}
HOST_RETAINED = {32: 0.85}
DISK_SHARE = 0.9
DISK_BYTES_PER_PARAM = 24
NVME_OF_NVME_OPTIMIZER = 1.15
HALF_OF_NVME_OPTIMIZER = 0.6
HALF_NVME_BYTES_PER_PARAM = 12
HALF_TOLERANCE = 0.05
HOST_BYTES_PER_PARAM = 16
HOST_PEERS = (FSDP2, DEEPSPEED)


@dataclasses.dataclass(frozen=True)
class Claim:
    figure: str
    asked: str
    measured: str
    is_reached: bool | None  # None: not known


def at_most(figure, limit, value, form=".3f", unit=""):
    if value is None:
        return Claim(figure, f"<= {limit:g}{unit}", "-", None)
    return Claim(figure, f"<= {limit:g}{unit}", f"{value:{form}}{unit}", value <= limit)


def at_least(figure, limit, value, form=".3f", unit=""):
    if value is None:
        return Claim(figure, f">= {limit:g}{unit}", "-", None)
    return Claim(figure, f">= {limit:g}{unit}", f"{value:{form}}{unit}", value >= limit)


class Measured:
    """Look-ups in {(mode, system, batch): Figures}; None for what is missing."""

    def __init__(self, figures, preset, rates, bits):
        self.figures = figures
        self.bits = bits  # the same, of runs with deterministic operators
        self.num_params = gpt_presets.num_params(preset)
        self.rates = rates

    def of(self, name, mode, batch, system=TESSERA):
        found = self.figures.get((mode, system, batch))
        return getattr(found, name) if found else None

    def steps_ratio(self, above, below):
        """Of two (mode, batch, system)."""
        return gpu_report.ratio(*(self.of("step_s", *key) for key in (above, below)))


def peer_claim(measured, batch):
    limit = HOST_OF_BEST_PEER[batch]
    name, seconds = gpu_report.best_peer(measured.figures, "host", batch)
    claim = at_least(f"host, batch {batch}: x best peer", limit,
                     gpu_report.ratio(seconds, measured.of("step_s", "host", batch)), ".2f")
    missing = [peer for peer in HOST_PEERS if ("host", peer, batch) not in measured.figures]
    if claim.is_reached is None:
        return claim
    text = f"{claim.measured} ({name}" + (f"; without {', '.join(missing)})" if missing else ")")
    # A peer that did not run might have been faster.
    is_reached = None if claim.is_reached and missing else claim.is_reached
    return dataclasses.replace(claim, measured=text, is_reached=is_reached)


def memory_claims(measured, batch):
    host = measured.of("host_peak_bytes", "host", batch)
    base = measured.of("host_peak_bytes", "resident", batch)
    held = None if None in (host, base) else (host - base) / measured.num_params
    ours = measured.of("device_peak_bytes", "host", batch)
    return [
        at_most(f"host, batch {batch}: host bytes per parameter above resident",
                HOST_BYTES_PER_PARAM, held, ".1f"),
        *(at_most(f"host, batch {batch}: GPU peak / {peer}'s", 1.0,
                  gpu_report.ratio(ours, measured.of("device_peak_bytes", "host", batch, peer)))
          for peer in HOST_PEERS),
    ]


def half_claim(measured, batch):
    """That half of the states were on NVMe, and not fewer: 6 bytes read and 6 written."""
    figure = f"half, batch {batch}: NVMe bytes per parameter"
    least, most = (HALF_NVME_BYTES_PER_PARAM * (1 + sign * HALF_TOLERANCE) for sign in (-1, 1))
    asked = f"{least:.1f} to {most:.1f}"
    moved = [measured.of(name, "half", batch) for name in ("nvme_read_bytes", "nvme_written_bytes")]
    if None in moved:
        return Claim(figure, asked, "-", None)
    per_param = sum(moved) / measured.num_params
    return Claim(figure, asked, f"{per_param:.2f}", least <= per_param <= most)


def same_bits_claim(bits, mode, batch):
    """Losses and norms of a mode against those of tessera resident, as far as both go; of runs with
    deterministic operators: a GPU's others give other bits each time."""
    figure, asked = f"{mode}, batch {batch}: losses and norms of resident", "every bit"
    ours, resident = (bits.get((m, TESSERA, batch)) for m in (mode, "resident"))
    if ours is None or resident is None:
        return Claim(figure, asked, "-", None)
    pairs = list(zip(zip(ours.losses, ours.grad_norms),
                     zip(resident.losses, resident.grad_norms)))
    if not pairs:
        return Claim(figure, asked, "-", None)
    differ = [step for step, (a, b) in enumerate(pairs) if a != b]
    if differ:
        return Claim(figure, asked, f"step {differ[0]} differs", False)
    return Claim(figure, asked, f"{len(pairs)} steps equal", True)


def batch_claims(measured, batch):
    resident, host, disk = ("resident", batch), ("host", batch), ("nvme-optimizer", batch)
    disk_step_s = measured.of("step_s", *disk)
    mixed = measured.rates.with_disk(measured.of("disk_mixed", *disk)).disk_mixed
    share = None
    if disk_step_s and mixed:
        share = DISK_BYTES_PER_PARAM * measured.num_params / disk_step_s / mixed
    claims = [
        at_most(f"resident, batch {batch}: / plain PyTorch", RESIDENT_OF_PLAIN,
                measured.steps_ratio(resident, (*resident, PLAIN))),
        at_most(f"host, batch {batch}: step", HOST_STEP_S[batch], measured.of("step_s", *host),
                unit=" s"),
        peer_claim(measured, batch),
    ]
    if batch in HOST_RETAINED:
        claims += [at_least(f"host, batch {batch}: share of {whose} resident's speed",
                            HOST_RETAINED[batch], measured.steps_ratio((*resident, system), host))
                   for whose, system in (("plain PyTorch", PLAIN), ("Tessera", TESSERA))]
    claims += [
        at_least(f"nvme-optimizer, batch {batch}: of the disk's mixed rate, at "
                 f"{DISK_BYTES_PER_PARAM} B/param", DISK_SHARE, share),
        at_most(f"nvme, batch {batch}: / nvme-optimizer", NVME_OF_NVME_OPTIMIZER,
                measured.steps_ratio(("nvme", batch), disk)),
        at_most(f"half, batch {batch}: / nvme-optimizer", HALF_OF_NVME_OPTIMIZER,
                measured.steps_ratio(("half", batch), disk)),
        half_claim(measured, batch),
        *memory_claims(measured, batch),
    ]
    return claims + [same_bits_claim(measured.bits, mode, batch)
                     for mode in ("host", "nvme-optimizer", "nvme", "half")]


def claims_of(figures, preset, batches, rates, bits=None):
    """Nothing for another preset: the limits are this one's."""
    if preset != PRESET:
        return []
    measured = Measured(figures, preset, rates, bits or {})
    return [claim for batch in BATCHES if batch in batches
            for claim in batch_claims(measured, batch)]
