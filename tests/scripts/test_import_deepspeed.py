"""The reader of `tessera import`, on checkpoints that these tests lay out as DeepSpeed ZeRO-3 does.

tests/cli has one that DeepSpeed itself has written.
"""
import argparse
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "cli/import/deepspeed.py"
spec = importlib.util.spec_from_file_location("deepspeed_reader", SCRIPT)
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)

try:
    import torch
except ImportError:
    torch = None


class DynamicLossScaler:
    """Pickled under the name of DeepSpeed's."""

    def __init__(self, **state):
        self.__dict__.update(state)


DynamicLossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"


class RunsACommand:
    def __reduce__(self):
        return os.system, ("touch run",)


def module_of(name):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    return sys.modules[name]


class Layout:
    """A model of some parameters, laid out over ranks. Sub-groups are lists of names."""

    def __init__(self, ranks, sub_groups, dtype=None, frozen=(), tied=None, prefix=""):
        self.ranks, self.dtype, self.tied, self.prefix = ranks, dtype or torch.float32, tied or {}, prefix
        self.generator = torch.Generator().manual_seed(ranks)
        self.sub_groups = [[prefix + name for name in names] for names in sub_groups]
        self.frozen = {prefix + name: self.random((4, 3)).to(self.dtype) for name in frozen}
        names = [name for names in self.sub_groups for name in names]
        self.shapes = {name: ((7, 3), (5,), (1,), (2, 2, 2), (0,))[i % 5]
                       for i, name in enumerate(names)}
        self.full = {state: {name: self.random(shape) for name, shape in self.shapes.items()}
                     for state in ("value",) + reader.MOMENTS}
        self.groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01,
                        "params": list(range(len(sub_groups)))}]
        self.scaler, self.extra, self.ds_config = None, {}, {}
        self.step = 5
        self.change_state = lambda state: None

    def random(self, shape):
        return torch.rand(shape, generator=self.generator)

    def part(self, tensor, rank):
        flat = tensor.reshape(-1)
        part = -(-flat.numel() // self.ranks)
        padded = torch.cat([flat, torch.full((part * self.ranks - flat.numel(),), 9.0).to(flat)])
        return padded[rank * part:(rank + 1) * part].clone()

    def flat(self, state, names, rank):
        return torch.cat([self.part(self.full[state][name], rank) for name in names])

    def optim_state(self, rank):
        states = {i: {"step": self.step, **{key: self.flat(key, names, rank)
                                            for key in reader.MOMENTS}}
                  for i, names in enumerate(self.sub_groups)}
        self.change_state(states)
        return {"optimizer_state_dict": {
            "zero_stage": 3, "loss_scaler": self.scaler, "partition_count": self.ranks,
            "optimizer_state_dict": {"state": states, "param_groups": self.groups},
            "fp32_flat_groups": [self.flat("value", names, rank) for names in self.sub_groups]}}

    def model_state(self, rank):
        module = {name: torch.empty(0, dtype=self.dtype)
                  for name in [*self.shapes, *self.frozen, *self.tied]}
        module[self.prefix + "seen"] = torch.tensor([True, False, True])
        return {"module": module, "buffer_names": [self.prefix + "seen"],
                "param_shapes": [{name: torch.Size(self.shapes[name]) for name in names}
                                 for names in self.sub_groups],
                "frozen_param_shapes": {name: value.shape for name, value in self.frozen.items()},
                "frozen_param_fragments": {name: self.part(value, rank)
                                           for name, value in self.frozen.items()},
                "shared_params": self.tied, "global_steps": 6, "skipped_steps": 1,
                "ds_config": self.ds_config, "ds_version": "0.19.8", "mp_world_size": 1,
                **self.extra}

    def write(self, folder):
        (folder / "tag").mkdir()
        (folder / "latest").write_text("tag")
        for rank in range(self.ranks):
            for kind, state in (("optim", self.optim_state(rank)), ("model", self.model_state(rank))):
                torch.save(state, folder / f"tag/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")


class ReaderTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def refusal(self, tag=""):
        with self.assertRaises(reader.Refused) as raised:
            reader.run(io.BytesIO(), str(self.folder), tag)
        return str(raised.exception)

    def touch(self, *names):
        for name in names:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")


@unittest.skipIf(torch is None, "this Python has no torch")
class ReadTensors(ReaderTest):
    def read(self, layout=None):
        """(header, tensors by name and kind)"""
        if layout is not None:
            layout.write(self.folder)
        out = io.BytesIO()
        reader.run(out, str(self.folder), "")
        data = out.getvalue()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        dtypes = {name: dtype for dtype, name in reader.dtype_names().items()}
        tensors, begin = {}, 8 + length
        for param in header["params"]:
            for kind, dtype in param["tensors"]:
                numel = torch.Size(param["shape"]).numel()
                end = begin + numel * dtypes[dtype].itemsize
                tensors[param["name"], kind] = torch.frombuffer(
                    bytearray(data[begin:end] or b"\0" * 8), dtype=dtypes[dtype])[:numel].view(
                        param["shape"])
                begin = end
        for buffer in header["buffers"]:
            tensors[buffer["name"], "buffer"] = data[begin:begin + buffer["bytes"]]
            begin += buffer["bytes"]
        self.assertEqual(begin, len(data))
        return header, tensors

    def expect_tensors(self, layout):
        header, tensors = self.read(layout)
        for name, value in layout.full["value"].items():
            kind = "value" if layout.dtype == torch.float32 else "master"
            self.assertTrue(torch.equal(tensors[name, kind], value), name)
            self.assertTrue(torch.equal(tensors[name, "value"], value.to(layout.dtype)), name)
            for key in reader.MOMENTS:
                self.assertTrue(torch.equal(tensors[name, key], layout.full[key][name]), name)
        for name, value in layout.frozen.items():
            self.assertTrue(torch.equal(tensors[name, "value"], value), name)
            self.assertNotIn((name, "exp_avg"), tensors)
        return header, tensors

    def test_any_number_of_ranks_with_parameters_that_none_divides(self):
        for ranks in (1, 2, 3, 4):
            with self.subTest(ranks=ranks), tempfile.TemporaryDirectory() as folder:
                self.folder = pathlib.Path(folder)
                self.expect_tensors(Layout(ranks, [["a", "b"], ["c", "d", "e"]]))

    def test_low_precision_has_a_master_and_a_rounded_value(self):
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype), tempfile.TemporaryDirectory() as folder:
                self.folder = pathlib.Path(folder)
                header, _ = self.expect_tensors(Layout(3, [["a", "b"]], dtype, frozen=["f"]))
                self.assertEqual(header["precision"], reader.dtype_names()[dtype])

    def test_frozen_tied_and_buffers(self):
        header, tensors = self.expect_tensors(
            Layout(2, [["a"], ["b"]], frozen=["f", "g"], tied={"head": "a"}))
        params = {param["name"]: param for param in header["params"]}
        self.assertEqual(params["a"]["tied"], ["head"])
        self.assertEqual([params[name]["trainable"] for name in "abfg"], [True, True, False, False])
        self.assertEqual(params["b"]["updates"], 5)
        self.assertEqual((header["step"], header["num_updates"]), (6, 5))
        self.assertEqual(header["buffers"], [{"name": "seen", "shape": [3], "dtype": "uint8",
                                              "type": "Bool", "bytes": 3}])
        self.assertEqual(tensors["seen", "buffer"], b"\1\0\1")

    def test_a_prefix_that_all_names_have_goes(self):
        header, _ = self.read(Layout(2, [["a"]], tied={"module.head": "module.a"}, prefix="module."))
        self.assertEqual([(param["name"], param["tied"]) for param in header["params"]],
                         [("a", ["head"])])
        self.assertEqual(header["buffers"][0]["name"], "seen")

    def test_groups_that_differ_are_said(self):
        layout = Layout(2, [["a"], ["b"]])
        layout.groups = [dict(layout.groups[0], params=[0]),
                         dict(layout.groups[0], params=[1], weight_decay=0.5)]
        header, _ = self.read(layout)
        self.assertEqual([group["weight_decay"] for group in header["optimizer"]["groups"]],
                         [0.01, 0.5])
        self.assertIn("differ in weight_decay", header["notes"][0])

    def test_moments_before_the_first_update_are_zero(self):
        layout = Layout(2, [["a"]])
        layout.change_state = lambda states: states.clear()
        layout.extra = {"global_steps": 1, "skipped_steps": 1}
        header, tensors = self.read(layout)
        self.assertFalse(tensors["a", "exp_avg"].any())
        self.assertEqual(header["params"][0]["updates"], 0)

    def test_kind_is_how_weight_decay_is_meant(self):
        for ds_config, group, kind in (
                ({"optimizer": {"type": "Adam"}}, {}, "adamw"),
                ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {}, "adam"),
                ({}, {"decoupled_weight_decay": False}, "adam"),
                ({}, {"decoupled_weight_decay": True}, "adamw")):
            with self.subTest(ds_config=ds_config), tempfile.TemporaryDirectory() as folder:
                self.folder = pathlib.Path(folder)
                layout = Layout(1, [["a"]])
                layout.ds_config = ds_config
                layout.groups[0].update(group)
                self.assertEqual(self.read(layout)[0]["optimizer"]["kind"], kind)

    def test_a_dynamic_loss_scale_grows_when_it_would_have(self):
        module_of(DynamicLossScaler.__module__).DynamicLossScaler = DynamicLossScaler
        # Overflow in step 4, doubled behind step 4 + 1 + 10; the next step is number 9.
        layout = Layout(1, [["a"]], torch.float16)
        layout.scaler = DynamicLossScaler(cur_scale=2.0**14, cur_iter=9, last_overflow_iter=4,
                                          scale_window=10, cur_hysteresis=2)
        self.assertEqual(self.read(layout)[0]["loss_scale"],
                         {"value": 2.0**14, "good_steps": 3, "hysteresis_left": 2})

    def test_plain_client_state_is_kept_and_the_rest_is_named(self):
        layout = Layout(1, [["a"]])
        layout.extra = {"epoch": 3, "lr_scheduler": {"last_batch_iteration": 7}}
        header, _ = self.read(layout)
        self.assertEqual(json.loads(header["client_state"]), {"epoch": 3})
        self.assertEqual(json.loads(header["lr_scheduler"]), {"last_batch_iteration": 7})
        with tempfile.TemporaryDirectory() as folder:
            self.folder = pathlib.Path(folder)
            layout.extra = {"args": argparse.Namespace(a=1)}
            header, _ = self.read(layout)
        self.assertIn("client_state is left out", " ".join(header["notes"]))

    def test_a_pickle_that_runs_something_is_refused_by_name_and_does_not(self):
        before = os.getcwd()
        os.chdir(self.folder)
        self.addCleanup(os.chdir, before)
        for legacy in (False, True):
            layout = Layout(1, [["a"]])
            if not legacy:
                layout.write(self.folder)
            torch.save({"x": RunsACommand()},
                       self.folder / "tag/zero_pp_rank_0_mp_rank_00_optim_states.pt",
                       _use_new_zipfile_serialization=not legacy)
            self.assertIn("system, which is not among the classes", self.refusal())
            self.assertFalse((self.folder / "run").exists())

    def test_files_that_are_not_of_one_save_are_refused(self):
        layout = Layout(2, [["a"]])
        layout.write(self.folder)
        other = Layout(2, [["a", "b"]])
        path = self.folder / "tag/zero_pp_rank_1_mp_rank_00_optim_states.pt"
        torch.save(other.optim_state(1), path)
        self.assertIn("not of one save", self.refusal())
        layout.step = 4
        torch.save(layout.optim_state(1), path)
        self.assertIn("ranks have made [4, 5] updates", self.refusal())
        torch.save(Layout(3, [["a"]]).optim_state(1), path)
        self.assertIn("is of 3 ranks, and there are files of 2", self.refusal())
        path.write_bytes(path.read_bytes()[:500])
        self.assertIn("zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be read", self.refusal())

    def test_what_is_not_adam_or_not_there_is_refused_with_a_remedy(self):
        cases = (
            (lambda states: [state.update(max_exp_avg_sq=torch.zeros(3)) for state in
                             states.values()], "has the state max_exp_avg_sq"),
            (lambda states: states.clear(), "has no states of an optimizer behind 5 updates"),
            (lambda states: states[0].pop("exp_avg"), "exp_avg is missing"))
        for change, words in cases:
            with self.subTest(words=words), tempfile.TemporaryDirectory() as folder:
                self.folder = pathlib.Path(folder)
                layout = Layout(1, [["a"]])
                layout.change_state = change
                layout.write(self.folder)
                self.assertIn(words, self.refusal())

    def test_weights_that_are_on_nvme_are_refused(self):
        layout = Layout(1, [["a"]])
        layout.write(self.folder)
        state = layout.optim_state(0)
        state["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0)]
        torch.save(state, self.folder / "tag/zero_pp_rank_0_mp_rank_00_optim_states.pt")
        self.assertIn("offloaded to NVMe", self.refusal())


class Folders(ReaderTest):
    """What is refused by its file names alone, without torch."""

    def test_other_layouts_are_named_with_a_remedy(self):
        zero3 = ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
        cases = (
            (["mp_rank_00_model_states.pt", zero3[0]], "of stage 1 or 2"),
            (["zero", "mp_rank_00_model_states.pt"], "universal checkpoint"),
            (["layer_00-model_states.pt", *zero3], "pipeline"),
            (["layer_0_expert_0_mp_rank_00_model_states.pt", *zero3], "has experts"),
            ([*zero3, "zero_pp_rank_0_mp_rank_01_model_states.pt"], "tensor parallel"),
            ([*zero3, "bf16_" + zero3[0]], "beside files of one that was not"),
            ([zero3[1]], "has no *_optim_states.pt"),
            ([zero3[0]], "has no *_model_states.pt"),
            ([*zero3, "zero_pp_rank_2_mp_rank_00_optim_states.pt"],
             "lacks zero_pp_rank_1_mp_rank_00_optim_states.pt"),
            ([*zero3, "zero_pp_rank_99999999999_mp_rank_00_optim_states.pt"], "a file of rank"))
        for names, words in cases:
            with self.subTest(words=words), tempfile.TemporaryDirectory() as folder:
                self.folder = pathlib.Path(folder)
                self.touch("latest", *("tag/" + name for name in names))
                (self.folder / "latest").write_text("tag\n")
                self.assertIn(words, self.refusal())

    def test_tags_are_folders_of_the_directory(self):
        self.touch("one/x", "two/x")
        self.assertIn("one of: one, two", self.refusal())
        self.assertIn("has no folder 'three'", self.refusal("three"))
        for tag in ("/etc", "..", "one/../.."):
            self.assertIn("leads out of", self.refusal(tag))

    def test_the_folder_in_which_it_was_started_is_not_searched_for_modules(self):
        self.touch("one/x")
        for name in ("json", "torch", "ctypes"):
            (self.folder / f"{name}.py").write_text("print('taken')\n")
        done = subprocess.run([sys.executable, "-", str(self.folder), ""], cwd=self.folder, text=True,
                              input=SCRIPT.read_text(encoding="utf-8"), capture_output=True,
                              check=False)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("has no file `latest`", done.stderr)


if __name__ == "__main__":
    unittest.main()
