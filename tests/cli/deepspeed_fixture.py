#!/usr/bin/env python3
"""Makes what the tests of `tessera import` read: a checkpoint that DeepSpeed itself has written.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 \
        tests/cli/deepspeed_fixture.py tests/cli/data/deepspeed

in a Python with torch and DeepSpeed (`bench/peer_python.py --install` makes one). The model is
the one of bench/peers.py. No shape of it divides by two: every parameter is padded, and sub-groups
are small enough to be several. Written are

    latest, global_step3/      DeepSpeed's, behind three steps on two ranks
    expected.safetensors       every parameter, whole, and its two moments, as DeepSpeed's own
                               functions give them
    next.json                  shape and options, tokens of the next steps, and their losses

The flags give other checkpoints than the one of the tests, to compare by hand.
"""
import argparse
import json
import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402  (after the variable: the import chooses the accelerator)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from peers import Gpt  # noqa: E402

SHAPE = {"width": 15, "layers": 2, "heads": 3, "vocabulary": 37, "sequence": 11}
STEPS, NEXT_STEPS, BATCH = 3, 4, 6
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--adam", default="AdamW", choices=["AdamW", "Adam"])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--sub-group", type=int, default=2000)
    parser.add_argument("--offload", action="store_true", help="the optimizer, to the CPU")
    parser.add_argument("--tie", action="store_true", help="the head to the tokens")
    parser.add_argument("--freeze", action="store_true", help="the first block")
    parser.add_argument("--groups", action="store_true", help="vectors without decay")
    parser.add_argument("--buffer", action="store_true", help="give the model a buffer")
    return parser.parse_args()


def make_model(args):
    torch.manual_seed(0)
    model = Gpt(tuple(SHAPE.values()), recompute=False)
    if args.tie:
        model.head.weight = model.tokens.weight
    if args.freeze:
        model.blocks[0].requires_grad_(False)
    if args.buffer:
        model.register_buffer("counts", torch.arange(5))
    return model


def param_groups(args, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    if not args.groups:
        return trained
    return [{"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]


def config(args):
    zero = {"stage": args.stage, "sub_group_size": args.sub_group,
            "stage3_param_persistence_threshold": 100}
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {"train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "gradient_clipping": 1.0,
            "bf16": {"enabled": args.precision == "bf16"},
            "fp16": {"enabled": args.precision == "fp16", "initial_scale_power": 8},
            "zero_optimization": zero,
            "optimizer": {"type": args.adam, "params": dict(OPTIMIZER)}}


def all_tokens():
    size = (STEPS + NEXT_STEPS, BATCH, SHAPE["sequence"] + 1)
    return torch.randint(0, SHAPE["vocabulary"], size, generator=torch.Generator().manual_seed(7))


def one_step(engine, tokens):
    """The loss of all ranks' sequences."""
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    loss = engine(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
    engine.backward(loss)
    engine.step()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def expected(model):
    tensors = {}
    for name, param in model.named_parameters():
        tensors[name] = safe_get_full_fp32_param(param)
        if param.requires_grad:
            for state in ("exp_avg", "exp_avg_sq"):
                tensors[f"{state}:{name}"] = safe_get_full_optimizer_state(param, state)
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()
            if tensor is not None}


def main():
    args = parse_arguments()
    deepspeed.init_distributed("gloo")
    if dist.get_rank() == 0 and args.out.exists():
        shutil.rmtree(args.out)
    dist.barrier()
    model = make_model(args)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=param_groups(args, model),
                                      config=config(args))
    tokens = all_tokens()
    for step in range(STEPS):
        one_step(engine, tokens[step])
    engine.save_checkpoint(str(args.out))
    tensors = expected(model) if args.stage == 3 else {}
    losses = [one_step(engine, tokens[STEPS + step]) for step in range(NEXT_STEPS)]
    if dist.get_rank() == 0:
        # DeepSpeed's own converter, which nothing here needs.
        for script in args.out.glob("*.py"):
            script.unlink()
        save_file(tensors, args.out / "expected.safetensors")
        (args.out / "next.json").write_text(json.dumps(
            {"shape": SHAPE, "step": STEPS, "optimizer": OPTIMIZER, "clip": 1.0,
             "tokens": tokens[STEPS:].tolist(), "losses": losses}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
