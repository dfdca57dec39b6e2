"""Where things are in each mode, who can run it, and with which command."""
import dataclasses
import pathlib
import shutil

import gpt_presets

MODES = {
    "resident": "everything on the GPU",
    "host": "everything in host memory",
    "nvme-optimizer": "optimizer on NVMe",
    "nvme": "parameters and optimizer on NVMe",
    "half": "half of the states in host memory, half on NVMe",
    "accumulate": "everything in host memory, the batch in 4 micro-batches",
    "ranks": "everything in host memory, the batch over 2 ranks on the GPU, over ipc with MPS",
    "budget": "everything in host memory, recomputing, in 3 GiB of the GPU",
}
NVME_MODES = ("nvme-optimizer", "nvme", "half")
# Equal to the bit: the others add in another order, or recompute.
SAME_BITS_MODES = ("resident", "host", *NVME_MODES)
TESSERA, PLAIN, FSDP2, DEEPSPEED, DEEPSPEED_NVME = (
    "tessera", "plain", "fsdp2", "deepspeed", "deepspeed-nvme")
# As tessera, whose loss is made in chunks, but with the logits of all tokens at once, as the peers.
TESSERA_WHOLE = "tessera-whole-loss"
OURS = (TESSERA, TESSERA_WHOLE)
# What peers.py calls them. deepspeed-nvme is a system of its own, since it takes minutes.
PEERS = {
    ("resident", PLAIN): "plain",
    ("resident", FSDP2): "fsdp2",
    ("resident", DEEPSPEED): "deepspeed",
    ("host", FSDP2): "fsdp2-cpu",
    ("host", DEEPSPEED): "deepspeed-cpu",
    ("nvme-optimizer", DEEPSPEED_NVME): "deepspeed-nvmeopt",
}
SYSTEMS = (PLAIN, FSDP2, DEEPSPEED, DEEPSPEED_NVME, *OURS)
DEFAULT_SYSTEMS = (PLAIN, FSDP2, DEEPSPEED, *OURS)
# Seconds that a run takes at one batch until one like it has been timed: a model of a billion
# parameters is made, pinned, written.
GUESS_S = {"resident": 15, "host": 25, "nvme-optimizer": 65, "nvme": 70, "half": 45,
           "accumulate": 25, "ranks": 40, "budget": 25}
PEER_GUESS_S = {"resident": 40, "host": 60, "nvme-optimizer": 110}
WITH_MPS = pathlib.Path(__file__).resolve().parents[1] / "scripts/with-mps"
LEARNING_RATE = "1e-4"  # peers.py's
CLIP_NORM = "1.0"


@dataclasses.dataclass(frozen=True)
class Task:
    """One process: a peer at all batches, since its model is made once, or tessera at one."""
    mode: str
    system: str
    batches: tuple

    @property
    def name(self):
        """As the table has it."""
        return PEERS.get((self.mode, self.system), self.system)

    def guess_s(self, preset):
        scale = gpt_presets.num_params(preset) / gpt_presets.num_params("gpt-1b4")
        guesses = GUESS_S if self.system in OURS else PEER_GUESS_S
        return max(5.0, guesses[self.mode] * scale * (1 + 0.5 * (len(self.batches) - 1)))


def tasks_of(modes, systems, batches):
    """In the order of an even round: peers before tessera within each mode."""
    tasks = []
    for mode in modes:
        for system in SYSTEMS:
            if system not in systems:
                continue
            if system in OURS:
                tasks += [Task(mode, system, (batch,)) for batch in batches]
            elif (mode, system) in PEERS:
                tasks.append(Task(mode, system, tuple(batches)))
    return tasks


def rounds_of(tasks, num_rounds):
    """Yields (round, task): every other round backwards, so that drift of the machine is shared."""
    for number in range(num_rounds):
        for task in tasks if number % 2 == 0 else reversed(tasks):
            yield number, task


def mode_flags(mode, directory, half_budget):
    nvme = ["--nvme", directory]
    host = ["--parameters", "host", "--optimizer", "host"]
    return {
        "resident": [],
        "host": host,
        "nvme-optimizer": ["--optimizer", "nvme", *nvme],
        "nvme": ["--parameters", "nvme", "--optimizer", "nvme", *nvme],
        # None of the states on the GPU: what the budget does not hold goes to NVMe. The share is
        # given, so that the plan can be known before (gpu_half.py); the disk takes far longer.
        "half": ["--optimizer", "host", "--host-budget", half_budget, "--cpu-share", "1", *nvme],
        "accumulate": [*host, "--accumulate", 4],
        "ranks": [*host, "--ranks", 2, "--set", "comm.backend=ipc"],
        "budget": [*host, "--recompute", "--device-budget", "3GiB"],
    }[mode]


def launcher(mode):
    """What the program is started by; its figures are rank 0's."""
    return [WITH_MPS] if mode == "ranks" else []


def mode_reason(mode):
    """Why this machine cannot run tessera in a mode, or None."""
    if mode == "ranks" and shutil.which("nvidia-cuda-mps-control") is None:
        return "skipped: there is no nvidia-cuda-mps-control"
    return None


# Of a step's tokens, what the loss of a timed run is made of at a time.
LOSS_CHUNKS = 16


def timed_flags(system, num_tokens, extra=()):
    """The same in every mode, so that modes compare. A loss in chunks is exact, but not to the bit:
    where runs are compared bit for bit it is left out. What the user says of it holds."""
    if system != TESSERA or loss_chunk(extra) is not None:
        return []
    return ["--loss-chunk", max(1, num_tokens // LOSS_CHUNKS)]


def loss_chunk(flags):
    """Tokens whose logits exist at a time, by the flags of a run; None: all of them, which are the
    largest activation of all."""
    words = [word for flag in flags for word in str(flag).split("=")]
    return int(words[words.index("--loss-chunk") + 1]) if "--loss-chunk" in words else None


def precision_of(device):
    return "bf16" if device == "cuda" else "fp32"  # as peers.py computes there


def tessera_words(program, preset, device, batch, flags):
    """Without --steps and --metrics."""
    threads = [] if device == "cuda" else ["--threads", 1]  # as peers.py
    return [program, "train", "--preset", preset, "--device", device, "--precision",
            precision_of(device), "--batch", batch, "--data", "random", "--lr", LEARNING_RATE,
            "--clip", CLIP_NORM, *threads, *flags]


def peer_words(python, peers, name, preset, device, batches, num_steps, directory):
    return [python, peers, "--system", name, "--preset", preset, "--device", device, "--batch",
            ",".join(str(batch) for batch in batches), "--steps", num_steps, "--clip", CLIP_NORM,
            "--nvme", directory]
