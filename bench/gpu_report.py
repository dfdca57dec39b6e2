"""From figures to rows of the table, and the table as text.

A row is a dictionary, as it is in the JSON file; None is a cell without a figure.
"""
import dataclasses

import gpt_presets
import gpu_bounds
import gpu_modes
from gpu_modes import PLAIN, TESSERA

GIB = 2.0**30


def computed_s(figures, batch):
    """(forward, backward) of plain PyTorch resident, else tessera's, else (None, None)."""
    for system in (PLAIN, TESSERA):
        found = figures.get(("resident", system, batch))
        if found is not None and None not in (found.forward_s, found.backward_s):
            return found.forward_s, found.backward_s
    return None, None


def best_peer(figures, mode, batch):
    """(system, seconds) of the fastest peer in this mode; plain PyTorch shards nothing and is the
    reference of `retained` instead. (None, None): none was measured."""
    times = {system: figures[mode, system, batch].step_s
             for of_mode, system in gpu_modes.PEERS
             if of_mode == mode and system != PLAIN and (mode, system, batch) in figures}
    if not times:
        return None, None
    system = min(times, key=times.get)
    return system, times[system]


def ratio(above, below):
    return above / below if above is not None and below else None


def make_row(preset, task, batch, figures, reasons, rates, extra):
    key = (task.mode, task.system, batch)
    tokens = batch * gpt_presets.sequence_tokens(preset)
    row = {"mode": task.mode, "system": task.system, "name": task.name, "batch": batch,
           "tokens": tokens, "loss_chunk": gpu_modes.loss_chunk(
               [*gpu_modes.timed_flags(task.system, tokens, extra), *extra]
               if task.system in gpu_modes.OURS else [])}
    found = figures.get(key)
    bound = gpu_bounds.bound_s(task.mode, gpt_presets.num_params(preset),
                               *computed_s(figures, batch),
                               rates.with_disk(found.disk_mixed if found else None))
    plain = figures.get(("resident", PLAIN, batch))
    step_s = found.step_s if found else None
    known = dataclasses.asdict(found) if found else {}
    known.pop("losses", None), known.pop("grad_norms", None)
    return {**row, **known, "step_s": step_s,
            "tokens_per_s": ratio(tokens, step_s),
            "retained": ratio(plain.step_s, step_s) if plain else None,
            "peer_ratio": ratio(best_peer(figures, task.mode, batch)[1], step_s),
            "bound_s": bound, "of_bound": ratio(bound, step_s), "reason": reasons.get(key)}


def make_rows(preset, tasks, figures, reasons, rates, extra=()):
    """By batch, then in the order of the modes. `extra`: flags of each run of ours."""
    batches = sorted({batch for task in tasks for batch in task.batches})
    return [make_row(preset, task, batch, figures, reasons, rates, extra)
            for batch in batches for task in tasks if batch in task.batches]


# --- text -------------------------------------------------------------------------------------


def cell(value, form, unit=1.0):
    return "-" if value is None else format(value / unit, form)


def parts_cell(row):
    parts = [row.get(name) for name in ("forward_s", "backward_s", "update_s")]
    return "-" if parts == [None] * 3 else " / ".join(cell(part, ".3f") for part in parts)


def seconds_cell(value):
    return cell(value, ".4f" if value is not None and value < 1 else ".3f")


COLUMNS = (
    ("mode", lambda row: row["mode"]),
    ("system", lambda row: row["name"]),
    ("tokens", lambda row: str(row["tokens"])),
    ("of the loss at a time", lambda row: str(row["loss_chunk"] or "all")),
    ("step s", lambda row: seconds_cell(row["step_s"])),
    ("forward / backward / update s", parts_cell),
    ("tokens/s", lambda row: cell(row["tokens_per_s"], ".0f")),
    ("retained", lambda row: cell(row["retained"], ".1%")),
    ("x best peer", lambda row: cell(row["peer_ratio"], ".2f")),
    ("bound s", lambda row: seconds_cell(row["bound_s"])),
    ("of bound", lambda row: cell(row["of_bound"], ".2f")),
    ("GPU GiB", lambda row: cell(row.get("device_peak_bytes"), ".1f", GIB)),
    ("host GiB", lambda row: cell(row.get("host_peak_bytes"), ".1f", GIB)),
    ("H2D GB", lambda row: cell(row.get("h2d_bytes"), ".2f", 1e9)),
    ("D2H GB", lambda row: cell(row.get("d2h_bytes"), ".2f", 1e9)),
    ("NVMe read GB", lambda row: cell(row.get("nvme_read_bytes"), ".2f", 1e9)),
    ("NVMe written GB", lambda row: cell(row.get("nvme_written_bytes"), ".2f", 1e9)),
    ("disk GB/s", lambda row: cell(row.get("disk_mixed"), ".2f", 1e9)),
    ("", lambda row: (row["reason"] or "").replace("|", "/")),
)


def markdown(titles, lines):
    """A table that reads well both as text and as markdown."""
    widths = [max(len(line[k]) for line in [titles, *lines]) for k in range(len(titles))]

    def text(cells, fill=" "):
        return "| " + " | ".join(c.ljust(w, fill) for c, w in zip(cells, widths)) + " |"
    return [text(titles), text(["-" * min(3, w) for w in widths], "-"),
            *(text(line) for line in lines)]


def table(rows):
    return markdown([title for title, _ in COLUMNS],
                    [[of(row) for _, of in COLUMNS] for row in rows])


# --- for docs/benchmarks.md and README.md ------------------------------------------------------

NAMES = {"plain": "plain PyTorch", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed",
         "deepspeed-nvme": "DeepSpeed", "tessera": "Tessera", "tessera-whole-loss": "Tessera"}


def pair_cell(row, first, second):
    parts = [cell(row.get(name), ".1f", 1e9) for name in (first, second)]
    return "" if parts in (["-", "-"], ["0.0", "0.0"]) else " GB, ".join(parts) + " GB"


def with_unit(value, form, unit, scale=1.0):
    return "" if value is None else format(value / scale, form) + unit


DOC_COLUMNS = (
    ("mode", lambda row: row["mode"]),
    ("system", lambda row: NAMES[row["system"]]),
    ("tokens", lambda row: f"{row['tokens']:,}"),
    ("loss", lambda row: f"by {row['loss_chunk']:,}" if row["loss_chunk"] else "whole"),
    ("step", lambda row: with_unit(row["step_s"], ".3f", " s") or (row["reason"] or "-")),
    ("retained", lambda row: with_unit(row["retained"], ".0%", "").replace("%", " %")),
    ("of bound", lambda row: with_unit(row["of_bound"], ".2f", "")),
    ("GPU peak", lambda row: with_unit(row.get("device_peak_bytes"), ".1f", " GiB", GIB)),
    ("host peak", lambda row: with_unit(row.get("host_peak_bytes"), ".1f", " GiB", GIB)),
    ("H2D, D2H per step", lambda row: pair_cell(row, "h2d_bytes", "d2h_bytes")),
    ("NVMe read, written", lambda row: pair_cell(row, "nvme_read_bytes", "nvme_written_bytes")),
)


def narrow(titles, lines):
    """A table without padding: one that is edited changes no line but its own."""
    return ["|" + "|".join(f" {title} " for title in titles) + "|", "|" + "---|" * len(titles),
            *("|" + "|".join(f" {word} " if word else " " for word in line) + "|"
              for line in lines)]


def doc_table(rows):
    """As docs/benchmarks.md has it."""
    return narrow([title for title, _ in DOC_COLUMNS],
                  [[of(row) for _, of in DOC_COLUMNS] for row in rows])


README_COLUMNS = (
    ("plain PyTorch, all on the GPU", ("resident", PLAIN)),
    ("Tessera, all on the GPU", ("resident", TESSERA)),
    ("FSDP2, all in host memory", ("host", gpu_modes.FSDP2)),
    ("DeepSpeed, all in host memory", ("host", gpu_modes.DEEPSPEED)),
    ("Tessera, all in host memory", ("host", TESSERA)),
)


def readme_table(rows):
    """As README.md has it; a system that was not measured has a dash."""
    found = {(row["mode"], row["system"], row["tokens"]): row["step_s"] for row in rows}
    tokens = sorted({row["tokens"] for row in rows})
    return narrow(["step at tokens", *(title for title, _ in README_COLUMNS)],
                  [[f"{count:,}", *(with_unit(found.get((*key, count)), ".3f", " s") or "-"
                                    for _, key in README_COLUMNS)] for count in tokens])


RATES = (
    ("h2d", "H2D"), ("d2h", "D2H"), ("h2d_of_both", "H2D, both at once"),
    ("d2h_of_both", "D2H, both at once"), ("device", "GPU memory, read and written"),
    ("adamw", "AdamW of the processor"), ("disk_read", "disk, read"), ("disk_write", "disk, write"),
    ("disk_mixed", "disk, both at once"),
)


def rates_table(known):
    lines = [[title, cell(known.get(name), ".1f", 1e9)] for name, title in RATES]
    notes = [f"without {what}: {reason}" for what, reason in known.get("reasons", {}).items()]
    if "adamw_by" in known:
        notes.append(f"AdamW of the processor: {known['adamw_by']}")
    return markdown(["rate", "GB/s"], lines) + ["", *notes]


def claims_table(claims):
    answer = {True: "yes", False: "NO", None: "not known"}
    return markdown(["figure", "asked", "measured", "reached"],
                    [[claim.figure, claim.asked, claim.measured, answer[claim.is_reached]]
                     for claim in claims])
