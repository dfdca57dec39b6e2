"""Reads a DeepSpeed ZeRO-3 checkpoint for `tessera import`, which runs this as `python3 - SRC TAG`.

On stdout come 8 bytes, the length of what follows, little endian; a JSON header; and the bytes of
the tensors that it lists, in its order. What is refused is one line on stderr, and exit code 2.

A checkpoint is pickles, and a pickle may name any function. torch's restricted unpickler takes
tensors and plain values; classes that DeepSpeed and its users put beside them become stubs, which
keep what they are given and do nothing. DeepSpeed is not imported, and every other name is refused.

How ZeRO-3 stores: a parameter of N elements is padded to W * ceil(N / W), and rank r has the r-th
part. The parts of the parameters that one optimizer step takes together, a sub-group, lie behind
each other in one flat tensor per rank, for weights and moments alike. So a parameter is one slice of
each rank's tensor. Files are mapped, and what is read at a time is a piece of a slice.
"""
import sys

# The directory in which this was started is first in the path, and may be a stranger's.
sys.path[:] = [folder for folder in sys.path if folder]

import bisect  # noqa: E402
import ctypes  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import re  # noqa: E402
import warnings  # noqa: E402

WEIGHTS_ONLY = ("`python zero_to_fp32.py --safe_serialization`, which DeepSpeed puts beside its "
                "checkpoints, makes weights of it, without moments, for `tessera train --init`")
OPTIM_FILE = re.compile(
    r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
MAX_RANKS = 1 << 20
MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE_NUMEL = 1 << 20
# Of the file of a rank's model; whatever else is there is client_state.
MODEL_KEYS = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers",
    "universal_checkpoint_info", "sparse_tensor_module_names", "csr_tensor_module_names"))
MAX_PLAIN_CHARS = 1 << 16  # of client_state that is kept

STUBS = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler", "LossScaleConfig",
                                           "LossScaleProfile"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    # What users keep in client_state.
    "argparse": ("Namespace",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
}


class Refused(Exception):
    """What is wrong, and what to do about it."""


def refuse_unless(condition, *parts):
    if not condition:
        raise Refused("".join(str(part) for part in parts))


class Stub:
    """In the place of an object: its arguments and its state."""

    def __new__(cls, *args, **_):
        made = object.__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        self.state = state if isinstance(state, dict) else {}


def import_torch():
    # It would turn the restricted unpickler off.
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    warnings.simplefilter("ignore")
    try:
        import torch as found
    except ImportError as error:
        raise Refused(f"{sys.executable} has no torch ({error}); install it there, or name another "
                      "Python with --python") from error
    refuse_unless(hasattr(found.serialization, "add_safe_globals"), "torch ", found.__version__,
                  " of ", sys.executable, " is too old to read a checkpoint safely; 2.4 or later can")
    for module, names in STUBS.items():
        found.serialization.add_safe_globals(
            [type(name, (Stub,), {"__module__": module}) for name in names])
    found.set_num_threads(1)
    return found


# --- Files ----------------------------------------------------------------------------------------


def list_folder(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise Refused(f"{folder}: {error.strerror}") from error


def read_tag(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error


def find_folder(source, tag):
    """The folder of one tag, which holds the files of its ranks."""
    if not tag:
        names = list_folder(source)
        if any(OPTIM_FILE.fullmatch(name) or name.endswith("_model_states.pt") for name in names):
            return source
        refuse_unless(
            "latest" in names, source, " has no file `latest`, which DeepSpeed writes; give a tag "
            "with --tag, one of: ",
            ", ".join(name for name in names if os.path.isdir(os.path.join(source, name))) or "none")
        tag = read_tag(os.path.join(source, "latest"))
    refuse_unless(tag and not os.path.isabs(tag) and ".." not in tag.split("/"), "tag ", repr(tag),
                  " leads out of ", source, "; give one of its folders with --tag")
    folder = os.path.join(source, tag)
    refuse_unless(os.path.isdir(folder), source, " has no folder ", repr(tag),
                  "; --tag names another one")
    return folder


def rank_files(folder):
    """The files of all ranks, in their order: [(optimizer, model)]."""
    names = list_folder(folder)
    refuse_unless(
        not ("zero" in names and not any(OPTIM_FILE.fullmatch(name) for name in names)), folder,
        " is a universal checkpoint; import reads the one that ds_to_universal.py was given")
    refuse_unless(not any("expert_" in name or name.startswith("expp_rank_") for name in names),
                  folder, " has experts in files of their own, which are not read. ", WEIGHTS_ONLY)
    refuse_unless(not any(name.startswith("layer_") and name.endswith("model_states.pt")
                          for name in names), folder,
                  " is of a pipeline; only ZeRO-3 without one is read. ", WEIGHTS_ONLY)
    optims = [match for match in map(OPTIM_FILE.fullmatch, names) if match]
    models = [match for match in map(MODEL_FILE.fullmatch, names) if match]
    refuse_unless(models or not any(name.endswith("_model_states.pt") for name in names), folder,
                  " is not of ZeRO stage 3, but of stage 1 or 2, or of none: its model is in one "
                  "file. ", WEIGHTS_ONLY)
    refuse_unless(optims and models, folder, " has no ", "*_model_states.pt" if optims else
                  "*_optim_states.pt", ": name the directory that save_checkpoint() was given")
    refuse_unless(len({match["bf16"] for match in optims}) == 1, folder, " has files of a run in "
                  "bf16 beside files of one that was not; save again into an empty folder")
    refuse_unless(all(int(match["mp"]) == 0 for match in optims + models), folder,
                  " is of tensor parallel ranks (mp_rank_01); only mp_rank_00 can be read. ",
                  WEIGHTS_ONLY)
    num_ranks = 1 + max(int(match["rank"]) for match in optims + models)
    refuse_unless(num_ranks <= MAX_RANKS, folder, " has a file of rank ", num_ranks - 1)
    wanted = [(f"{optims[0]['bf16'] or ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
               f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt") for rank in range(num_ranks)]
    there = set(names)
    missing = [name for pair in wanted for name in pair if name not in there]
    refuse_unless(not missing, folder, " lacks ", ", ".join(missing[:4]),
                  " and more" if len(missing) > 4 else "", "; every rank has written two files, on "
                  "its own host where use_node_local_storage was set: bring them together")
    return wanted


def load(folder, name):
    path = os.path.join(folder, name)
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        refuse_unless(
            not found, name, " holds ", found and found[1], ", which is not among the classes that "
            "a checkpoint of DeepSpeed needs; nothing of it was run. If it is in client_state, save "
            "again without it")
        raise Refused(f"{name} is no checkpoint: {first_line(error)}") from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError,
            IndexError, AssertionError) as error:
        raise Refused(f"{name} cannot be read: {first_line(error)}; is it complete?") from error
    return Record(loaded, name)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class Record:
    """A dictionary of a file, whose values are taken with their types checked."""

    def __init__(self, values, name):
        refuse_unless(isinstance(values, dict), name, " is a ", type(values).__name__,
                      ", not a dictionary; is it of DeepSpeed?")
        self.values, self.name = values, name

    def get(self, key, types, default=None):
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        good = isinstance(value, types) and not (isinstance(value, bool) and types is int)
        refuse_unless(good, self.name, ": ", key, " is ",
                      "missing" if value is None else "a " + type(value).__name__,
                      "; is it of DeepSpeed, and complete?")
        return value

    def record(self, key, default=None):
        return Record(self.get(key, dict, default), f"{self.name}: {key}")

    def count(self, key, default=None):
        value = self.get(key, int, default)
        refuse_unless(0 <= value < 1 << 62, self.name, ": ", key, " is ", value)
        return value


def number(value, what):
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    refuse_unless(good and math.isfinite(value), what, " is ", repr(value)[:80], ", not a number")
    return value


# --- Tensors --------------------------------------------------------------------------------------


def dtype_names():
    """As Tessera calls those that it has."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
            torch.float64: "fp64", torch.int64: "int64", torch.int32: "int32", torch.uint8: "uint8"}


def other_dtype_names():
    """As torch's C++ calls those that only buffers have; they are sent as bytes."""
    return {torch.bool: "Bool", torch.int16: "Short", torch.int8: "Char",
            torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble"}


def flat_tensor(value, what):
    refuse_unless(isinstance(value, torch.Tensor) and value.layout == torch.strided
                  and value.dim() == 1 and value.is_contiguous() and value.device.type == "cpu"
                  and value.dtype in (torch.float32, torch.bfloat16, torch.float16),
                  what, " is not a flat tensor of floating-point numbers")
    return value.detach()


def shape_of(value, what):
    refuse_unless(isinstance(value, tuple) and all(isinstance(dim, int) and dim >= 0
                                                   for dim in value),
                  what, " has the shape ", repr(value)[:80])
    return list(value)


class Sharded:
    """A tensor of which every rank has a part: pieces of flat tensors, and padding at the end."""

    def __init__(self, numel, parts):
        self.numel, self.parts = numel, parts  # parts[rank]: flat tensors, in order

    def pieces(self):
        left = self.numel
        for part in self.parts:
            for flat in part:
                taken = min(left, flat.numel())
                for begin in range(0, taken, PIECE_NUMEL):
                    yield flat[begin:min(begin + PIECE_NUMEL, taken)]
                left -= taken


class Whole:
    """A tensor that every rank has."""

    def __init__(self, tensor):
        self.tensor = tensor.detach().contiguous().reshape(-1)
        self.numel = self.tensor.numel()

    def pieces(self):
        for begin in range(0, self.numel, PIECE_NUMEL):
            yield self.tensor[begin:begin + PIECE_NUMEL]


class Zeros:
    """Moments before the first update."""

    def __init__(self, numel):
        self.numel = numel

    def pieces(self):
        for begin in range(0, self.numel, PIECE_NUMEL):
            yield torch.zeros(min(PIECE_NUMEL, self.numel - begin))


class FlatSpace:
    """The flat tensors of all sub-groups of all ranks, of one state, in one row."""

    def __init__(self, ranks, what):
        self.ranks = [[flat_tensor(flat, what) for flat in flats] for flats in ranks]
        self.sizes = [flat.numel() for flat in self.ranks[0]]
        refuse_unless(all([flat.numel() for flat in flats] == self.sizes for flats in self.ranks),
                      what, " of ranks differ in size; the files are not of one save")
        self.starts = [0, *itertools.accumulate(self.sizes)]

    def overlaps(self, begin, numel):
        """(sub-group, its elements) for elements [begin, begin + numel) of the row."""
        index = bisect.bisect_right(self.starts, begin) - 1
        while index < len(self.sizes) and self.starts[index] < begin + numel:
            first = self.starts[index]
            low, high = max(begin, first), min(begin + numel, first + self.sizes[index])
            if low < high:
                yield index, slice(low - first, high - first)
            index += 1

    def part(self, begin, numel):
        """These elements of each rank."""
        found = list(self.overlaps(begin, numel))
        return [[flats[index][elements] for index, elements in found] for flats in self.ranks]

    def groups_of(self, begin, numel):
        return [index for index, _ in self.overlaps(begin, numel)]


# --- What the files say ---------------------------------------------------------------------------


class Optimizer:
    """The base optimizer of all ranks: one state per sub-group."""

    def __init__(self, records, weights, num_updates):
        self.states = []
        for record in records:
            states = record.record("state").values
            self.states.append([Record(states.get(i, {}), f"{record.name}: state {i}")
                                for i in range(len(weights.sizes))])
            self.refuse_others(states, record)
        self.has_states = bool(self.states[0][0].values) if weights.sizes else False
        refuse_unless(self.has_states or num_updates == 0 or not weights.sizes, records[0].name,
                      " has no states of an optimizer behind ", num_updates, " updates. ",
                      WEIGHTS_ONLY)
        self.groups = records[0].get("param_groups", list)
        self.check_order(records[0], len(weights.sizes))
        self.moments = {}
        if self.has_states:
            for key in MOMENTS:
                self.moments[key] = FlatSpace(
                    [[state.get(key, torch.Tensor) for state in states] for states in self.states],
                    key)
                refuse_unless(self.moments[key].sizes == weights.sizes, records[0].name, ": ", key,
                              " has other sizes than the weights; the files are not of one save")

    @staticmethod
    def refuse_others(states, record):
        for state in states.values():
            others = [key for key, value in state.items() if key not in MOMENTS and key != "step"
                      and isinstance(value, torch.Tensor)] if isinstance(state, dict) else []
            refuse_unless(not others, record.name, " has the state ", ", ".join(map(str, others)),
                          ": only Adam's two moments are read. ", WEIGHTS_ONLY)

    def check_order(self, record, num_sub_groups):
        """States are numbered group by group, sub-groups in the order of the flat tensors."""
        order = [index for group in self.groups if isinstance(group, dict)
                 for index in group.get("params", ())]
        refuse_unless(order == list(range(num_sub_groups)), record.name,
                      ": param_groups name other sub-groups than there are")

    def updates(self, sub_groups):
        """How often the optimizer has updated parameters of these sub-groups."""
        counts = set()
        for states in self.states:
            for index in sub_groups:
                step = states[index].values.get("step")
                if step is None:
                    step = self.group_of(index).get("step")
                counts.add(int(number(step, f"{states[index].name}: step")))
        refuse_unless(len(counts) <= 1, "ranks have made ", sorted(counts),
                      " updates; the files are not of one save")
        return counts.pop() if counts else 0

    def group_of(self, sub_group):
        return next(group for group in self.groups if sub_group in group["params"])

    def hyperparameters(self):
        """One entry per group that has parameters."""
        entries = []
        for group in self.groups:
            if not group["params"]:
                continue
            refuse_unless(not group.get("amsgrad") and not group.get("maximize")
                          and group.get("bias_correction", True), "the optimizer has amsgrad, "
                          "maximize, or no bias correction, which Tessera has not. ", WEIGHTS_ONLY)
            betas = group.get("betas")
            refuse_unless(isinstance(betas, (list, tuple)) and len(betas) == 2,
                          "the optimizer has no betas: only Adam and AdamW are read. ", WEIGHTS_ONLY)
            entry = {"lr": group.get("lr"), "beta1": betas[0], "beta2": betas[1],
                     "eps": group.get("eps"), "weight_decay": group.get("weight_decay")}
            entries.append({key: float(number(value, key)) for key, value in entry.items()})
        return entries

    def kind(self, ds_config, notes):
        """`adamw` or `adam`: how weight decay is meant."""
        configured = ds_config.get("optimizer")
        if isinstance(configured, dict) and isinstance(configured.get("type"), str):
            params = configured.get("params")
            l2_wanted = isinstance(params, dict) and params.get("adam_w_mode") is False
            return "adam" if configured["type"].lower() == "adam" and l2_wanted else "adamw"
        decoupled = {group.get("decoupled_weight_decay") for group in self.groups}
        if decoupled == {False}:
            return "adam"
        if decoupled != {True} and any(group.get("weight_decay") for group in self.groups):
            notes.append("the checkpoint does not say whether its optimizer is Adam or AdamW: AdamW "
                         "is assumed; optim.kind=adam if it is the other")
        return "adamw"


def loss_scale(scaler):
    """Tessera's counters of a dynamic scale, such that the scale grows at the same step."""
    state = scaler.state if isinstance(scaler, Stub) else {}
    value = float(number(state.get("cur_scale", 1.0), "loss_scaler.cur_scale"))
    if "cur_hysteresis" not in state:
        return {"value": value, "good_steps": 0, "hysteresis_left": 2}
    window = max(1, int(number(state.get("scale_window"), "loss_scaler.scale_window")))
    # DeepSpeed doubles the scale in a step whose distance to the last overflow is a multiple of the
    # window, Tessera in the last step of a window.
    distance = int(number(state.get("cur_iter"), "loss_scaler.cur_iter")
                   - number(state.get("last_overflow_iter"), "loss_scaler.last_overflow_iter")) - 1
    next_growth = max(1, -(-distance // window)) * window
    return {"value": value, "good_steps": max(0, window - (next_growth - distance + 1)),
            "hysteresis_left": max(1, int(number(state["cur_hysteresis"], "loss_scaler.hysteresis")))}


def plain(value):
    """JSON's values of the same content; anything else is a TypeError."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError


def plain_text(value, what, notes):
    try:
        text = json.dumps(plain(value))
        if len(text) <= MAX_PLAIN_CHARS:
            return text
    except (TypeError, RecursionError):
        pass
    notes.append(f"{what} is left out: it is not plain numbers and texts, or more than 64 KiB")
    return ""


class Checkpoint:
    """All ranks' files of one tag."""

    def __init__(self, folder, files):
        self.num_ranks = len(files)
        self.notes = []
        self.models = [load(folder, model) for _, model in files]
        self.optims = [load(folder, optim).record("optimizer_state_dict") for optim, _ in files]
        self.model = self.models[0]
        for optim in self.optims:
            self.check_stage(optim)
        for model in self.models:
            refuse_unless(model.count("global_steps") == self.model.count("global_steps"),
                          model.name, " is of another step than ", self.model.name,
                          "; the files are not of one save")
            refuse_unless(model.count("mp_world_size", 1) == 1, model.name, " is of ",
                          model.values.get("mp_world_size"), " tensor parallel ranks. ", WEIGHTS_ONLY)
            refuse_unless(not model.values.get("ds_autoep_layers"), model.name,
                          " has experts that are placed apart, which are not read. ", WEIGHTS_ONLY)
        ds_config = self.model.values.get("ds_config")
        self.ds_config = ds_config if isinstance(ds_config, dict) else {}
        self.num_updates = max(0, self.model.count("global_steps")
                               - self.model.count("skipped_steps", 0))
        self.weights = FlatSpace([optim.get("fp32_flat_groups", list) for optim in self.optims],
                                 "fp32_flat_groups")
        self.trained = self.read_shapes()
        self.check_sizes()
        self.optimizer = Optimizer([optim.record("optimizer_state_dict") for optim in self.optims],
                                   self.weights, self.num_updates)
        self.frozen = self.read_frozen()
        self.module = self.model.record("module")

    def check_stage(self, optim):
        stage = optim.values.get("zero_stage")
        if isinstance(stage, Stub):
            stage = stage.args[0] if stage.args else None
        refuse_unless(stage == 3, optim.name, " is of ZeRO stage ", stage,
                      "; only stage 3 is read. ", WEIGHTS_ONLY)
        refuse_unless(optim.values.get("ds_zero_partition_groups") is None, optim.name,
                      " shards experts apart from the rest, which is not read. ", WEIGHTS_ONLY)
        count = optim.count("partition_count")
        refuse_unless(count == self.num_ranks, optim.name, " is of ", count, " ranks, and there are "
                      "files of ", self.num_ranks, "; files of another save lie among them, or some "
                      "are missing")

    def read_shapes(self):
        shapes = {}
        groups = self.model.values.get("param_shapes")
        for group in groups if isinstance(groups, list) else [groups]:
            for name, shape in Record(group, f"{self.model.name}: param_shapes").values.items():
                refuse_unless(isinstance(name, str) and name not in shapes, self.model.name,
                              ": param_shapes names ", repr(name)[:80], " twice")
                shapes[name] = shape_of(shape, name)
        return shapes

    def check_sizes(self):
        wanted = sum(self.part_numel(shape) for shape in self.trained.values())
        available = sum(self.weights.sizes)
        refuse_unless(
            not wanted or available, self.optims[0].name, " holds no weights: the optimizer was "
            "offloaded to NVMe, and its files are not read. Load the checkpoint in DeepSpeed with "
            "offload_optimizer to the CPU, or none, and save it again")
        refuse_unless(wanted == available, "a rank has ", available, " elements of weights, and the "
                      "shapes of parameters give ", wanted, "; the files are not of one save")

    def part_numel(self, shape):
        return -(-math.prod(shape) // self.num_ranks)

    def read_frozen(self):
        frozen = {}
        shapes = self.model.record("frozen_param_shapes", {})
        for name, shape in shapes.values.items():
            refuse_unless(isinstance(name, str), self.model.name, " has a frozen ", repr(name)[:80])
            shape = shape_of(shape, name)
            numel = self.part_numel(shape)
            parts = []
            for model in self.models:
                fragment = model.record("frozen_param_fragments", {}).values.get(name)
                flat = flat_tensor(fragment.reshape(-1) if isinstance(fragment, torch.Tensor)
                                   else fragment, f"{model.name}: the frozen {name}")
                refuse_unless(flat.numel() == numel and flat.dtype == (parts or [[flat]])[0][0].dtype,
                              model.name, ": the frozen ", name, " has ", flat.numel(),
                              " elements here, not ", numel)
                parts.append([flat])
            frozen[name] = (shape, parts)
        return frozen

    # Of both kinds of parameters: name, header entry, tensors.

    def value_dtype(self, name):
        """What the model computes with: placeholders have kept their type."""
        placeholder = self.module.values.get(name)
        dtype = placeholder.dtype if isinstance(placeholder, torch.Tensor) else torch.float32
        refuse_unless(dtype in (torch.float32, torch.bfloat16, torch.float16), name, " is of type ",
                      dtype, ", which is not read")
        return dtype

    def trained_params(self):
        offset = 0
        for name, shape in self.trained.items():
            numel, part = math.prod(shape), self.part_numel(shape)
            weights = Sharded(numel, self.weights.part(offset, part))
            dtype = self.value_dtype(name)
            tensors = [("value", dtype, weights)]
            if dtype != torch.float32:
                tensors.append(("master", torch.float32, weights))
            for key in MOMENTS:
                moments = (Sharded(numel, self.optimizer.moments[key].part(offset, part))
                           if self.optimizer.has_states else Zeros(numel))
                tensors.append((key, torch.float32, moments))
            updates = (self.optimizer.updates(self.weights.groups_of(offset, part))
                       if self.optimizer.has_states else 0)
            yield name, {"shape": shape, "trainable": True, "updates": updates}, tensors
            offset += part

    def frozen_params(self):
        for name, (shape, parts) in self.frozen.items():
            refuse_unless(name not in self.trained, name, " is trained and frozen")
            tensors = [("value", parts[0][0].dtype, Sharded(math.prod(shape), parts))]
            yield name, {"shape": shape, "trainable": False, "updates": 0}, tensors

    def params(self):
        """In the order of the model, each with its names."""
        found = {name: (entry, tensors) for source in (self.trained_params(), self.frozen_params())
                 for name, entry, tensors in source}
        order = [name for name in self.module.values if name in found]
        order += [name for name in found if name not in set(order)]
        tied = {}
        for name, source in self.model.record("shared_params", {}).values.items():
            refuse_unless(isinstance(name, str) and source in found and name not in found, name,
                          " is tied to ", source, ", which is no parameter")
            tied.setdefault(source, []).append(name)
        return [(dict(entry, name=name, tied=tied.get(name, [])), tensors)
                for name in order for entry, tensors in [found[name]]]

    def buffers(self):
        for name in self.model.get("buffer_names", list, []):
            tensor = self.module.values.get(name)
            refuse_unless(isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
                          and not tensor.is_quantized, "the buffer ", name,
                          " is not in the file, or is no plain tensor")
            refuse_unless(tensor.dtype in dtype_names() or tensor.dtype in other_dtype_names(),
                          "the buffer ", name, " is of type ", tensor.dtype, ", which is not read")
            if tensor.numel() > 0:
                yield {"name": name, "shape": list(tensor.shape),
                       "dtype": dtype_names().get(tensor.dtype, "uint8"),
                       "type": other_dtype_names().get(tensor.dtype, ""),
                       "bytes": tensor.numel() * tensor.element_size()}, tensor

    def header(self, params, buffers):
        dtypes = {tensors[0][1] for entry, tensors in params if entry["trainable"]}
        client = {key: value for key, value in self.model.values.items() if key not in MODEL_KEYS}
        scheduler = self.model.values.get("lr_scheduler")
        groups = self.optimizer.hyperparameters()
        if any(group != groups[0] for group in groups):
            differing = sorted(key for key in groups[0]
                               if len({group[key] for group in groups}) > 1)
            self.notes.append("the optimizer's groups differ in " + ", ".join(differing) + ", and the "
                              "save does not keep which parameter has which; `tessera train` has one "
                              "value for all, code can scale weight decay (UnitOptions)")
        return {
            "version": 1, "deepspeed": str(self.model.values.get("ds_version")),
            "num_ranks": self.num_ranks, "step": self.model.count("global_steps"),
            "num_updates": self.num_updates,
            "precision": dtype_names()[dtypes.pop()] if len(dtypes) == 1 else "fp32",
            "optimizer": {"kind": self.optimizer.kind(self.ds_config, self.notes), "groups": groups},
            "loss_scale": loss_scale(self.optims[0].values.get("loss_scaler")),
            "lr_scheduler": plain_text(scheduler, "the state of the schedule", self.notes)
                            if scheduler else "",
            "client_state": plain_text(client, "client_state", self.notes) if client else "",
            "params": [dict(entry, tensors=[[kind, dtype_names()[dtype]]
                                            for kind, dtype, _ in tensors])
                       for entry, tensors in params],
            "buffers": [entry for entry, _ in buffers], "notes": self.notes}


def strip_prefix(entries):
    """`module.` is what a wrapper around the model has added, if all names have it."""
    names = [name for entry in entries for name in [entry["name"], *entry.get("tied", ())]]
    if names and all(name.startswith("module.") for name in names):
        for entry in entries:
            entry["name"] = entry["name"].removeprefix("module.")
            entry["tied"] = [name.removeprefix("module.") for name in entry.get("tied", ())]


def send(out, content, dtype):
    for piece in content.pieces():
        piece = piece.to(dtype).contiguous()
        view = (ctypes.c_char * (piece.numel() * piece.element_size())).from_address(piece.data_ptr())
        out.write(memoryview(view))


def run(out, source, tag):
    folder = find_folder(source, tag)
    files = rank_files(folder)
    global torch  # late: what has the wrong files needs none
    torch = import_torch()
    checkpoint = Checkpoint(folder, files)
    params = checkpoint.params()
    buffers = list(checkpoint.buffers())
    strip_prefix([entry for entry, _ in params] + [entry for entry, _ in buffers])
    header = json.dumps(checkpoint.header(params, buffers), allow_nan=False).encode()
    out.write(len(header).to_bytes(8, "little"))
    out.write(header)
    for _, tensors in params:
        for _, dtype, content in tensors:
            send(out, content, dtype)
    for _, tensor in buffers:
        send(out, Whole(tensor), tensor.dtype)
    out.flush()


def main(arguments):
    # Whatever prints, now goes to stderr: stdout is for the header and the tensors.
    with os.fdopen(os.dup(1), "wb", buffering=1 << 16) as out:
        os.dup2(2, 1)
        try:
            run(out, *arguments)
            return 0
        except Refused as refusal:
            problem = refusal
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            problem = (f"{arguments[0]} has another form than DeepSpeed gives its checkpoints: "
                       f"{type(error).__name__}: {first_line(error)}")
        print("\n" + " ".join(str(problem).split()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
