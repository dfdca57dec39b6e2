"""A step with plain PyTorch's forward and backward and perfect overlap, from what was measured in
the same run.

P parameters, bf16 with fp32 master weights, AdamW, clipping, one rank, one micro-batch per step.
Forward and backward are plain PyTorch's, everything resident and the loss of all tokens at once; a
step with faster ones can take less. With clipping no update begins before backward has ended, and
updates run under the next forward. Bytes per parameter and step:

    update                 28: gradient 2, master and moments 12 in and 12 out, parameter 2
    everything in host     a share x is updated by the processor, the rest by the GPU
        H2D   2 for backward, 2 x for forward, 12 (1 - x) of states
        D2H   2 x of gradients, 14 (1 - x) of states and parameters
        states of the GPU's share depend on no gradient, and come and go at any time of the step
    optimizer on NVMe      12 read and 12 written
    all on NVMe            12 and 14: new parameters are written, and forward has them from the update
    half of the states     6 and 6

Links and processor are taken at what each can do by itself (both directions at once, where both are
in use for the whole step).
"""
import dataclasses

UPDATE_BYTES = 28
STATE_BYTES = 12
PARAMETER_BYTES = 2
NVME_BYTES = {"nvme-optimizer": 24, "nvme": 26, "half": 12}
SHARES = [number / 200 for number in range(201)]


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second; None: not measured."""
    h2d: float | None = None
    d2h: float | None = None
    h2d_of_both: float | None = None
    d2h_of_both: float | None = None
    device: float | None = None  # of the GPU's memory, read and written
    adamw: float | None = None   # of the processor's update
    disk_read: float | None = None
    disk_write: float | None = None
    disk_mixed: float | None = None  # read and written together

    @classmethod
    def of(cls, known):
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: known[name] for name in names if known.get(name)})

    def with_disk(self, mixed):
        """At a rate of its own that a run has; None: it has none."""
        return dataclasses.replace(self, disk_mixed=mixed or self.disk_mixed)


def resident_s(num_params, forward_s, backward_s, rates):
    return forward_s + backward_s + UPDATE_BYTES * num_params / rates.device


def host_split(num_params, forward_s, backward_s, rates):
    """(seconds, share of the processor) at the best split of the update."""
    backward_s = max(backward_s, PARAMETER_BYTES * num_params / rates.h2d)

    def at_share(x):
        on_gpu = 1 - x
        under_forward_s = max(forward_s + UPDATE_BYTES * on_gpu * num_params / rates.device,
                              UPDATE_BYTES * x * num_params / rates.adamw)
        up = (STATE_BYTES * on_gpu + PARAMETER_BYTES * (1 + x)) * num_params
        down = ((STATE_BYTES + PARAMETER_BYTES) * on_gpu + PARAMETER_BYTES * x) * num_params
        return max(backward_s + under_forward_s, up / rates.h2d_of_both, down / rates.d2h_of_both)

    return min((at_share(x), x) for x in SHARES)


def nvme_s(mode, num_params, forward_s, backward_s, rates):
    computed_s = backward_s + max(forward_s, UPDATE_BYTES * num_params / rates.adamw)
    return max(computed_s, NVME_BYTES[mode] * num_params / rates.disk_mixed)


def bound_s(mode, num_params, forward_s, backward_s, rates):
    """None where a rate or a time that the mode needs was not measured, or the mode has no bound."""
    if mode not in ("resident", "host", *NVME_BYTES):
        return None
    try:
        if mode == "resident":
            return resident_s(num_params, forward_s, backward_s, rates)
        if mode == "host":
            return host_split(num_params, forward_s, backward_s, rates)[0]
        return nvme_s(mode, num_params, forward_s, backward_s, rates)
    except TypeError:  # of None
        return None
