#!/usr/bin/env python3
"""One training step of the same GPT under the systems a user would pick instead of Tessera.

    python peers.py --system plain --preset small --device cpu --batch 2
    torchrun --nproc-per-node 2 peers.py --system fsdp2 --preset small --device cpu --batch 2
    python peers.py --system deepspeed-cpu --preset gpt-1b4 --device cuda --batch 8

Prints one line for each of --batch (several with commas: one after the other in one process, since
making a large model takes longer than its steps), RESULT and a JSON object:

    step_s        median step time of the steps after the second; forward_s, backward_s and
                  optimizer_s are the parts of that step
    free_step_s   time per step of as many more steps with no synchronisation inside: the fair
                  figure for systems that overlap
    losses        rank 0's, of the first steps; grad_norms: theirs before clipping (plain only)
    *_gib         peaks of device memory at this batch, of host memory since the start

--batch counts the sequences of all ranks together. A sequence depends on (step, its index in the
batch) alone, so every number of ranks trains on the same data. --init FILE starts from a
safetensors file with the parameter names of this model; `tessera train --save-init` writes one.
--save FILE (plain only) writes the fp32 parameters after the --steps steps of the first batch, as
`tessera train --save` does.

The model is the one of Tessera's presets of the same name (learned positions, pre-norm, fused qkv
with bias, exact GELU, untied head without bias, loss in fp32), so a figure here and one of
`tessera train` describe the same arithmetic.

Systems: plain; ddp; fsdp2; fsdp2-cpu (CPUOffloadPolicy); deepspeed (ZeRO-3); deepspeed-cpu
(parameters and optimizer in host memory); deepspeed-cpuopt (optimizer only); deepspeed-nvmeopt
(optimizer on --nvme); deepspeed-nvme (both; DeepSpeed 0.19.8 fails in it). DeepSpeed builds its
kernels at its first run: it needs ninja, a compiler and Python's headers, for NVMe those of libaio,
and on a GPU TORCH_CUDA_ARCH_LIST (9.0 for an H200).
"""
import argparse
import json
import os
import resource
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpt_presets import PRESETS

WARM_UP_STEPS = 2
LEARNING_RATE = 1e-4
DATA_SEED = 1000


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, shape, recompute):
        super().__init__()
        width, layers, heads, vocabulary, sequence = shape
        self.recompute = recompute
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Bench:
    """What is the same for all systems: model, data, the loop that is timed, the line printed."""

    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.cuda = args.device == "cuda"
        self.shape = PRESETS[args.preset]
        self.batch_size = args.batch[0]
        self.num_params = 0
        default_threads = os.cpu_count() if self.cuda else 1
        self.threads = args.threads or int(os.environ.get("OMP_NUM_THREADS", default_threads))
        torch.manual_seed(0)
        torch.set_num_threads(self.threads)

    def model(self):
        model = Gpt(self.shape, self.args.recompute)
        self.num_params = sum(p.numel() for p in model.parameters())
        if self.args.init:
            from safetensors.torch import load_file
            model.load_state_dict(load_file(self.args.init))
        return model

    def batch(self, step):
        *_, vocabulary, sequence = self.shape
        per_rank = self.batch_size // self.world
        first = DATA_SEED + step * self.batch_size + self.rank * per_rank
        ids = torch.stack([
            torch.randint(0, vocabulary, (sequence + 1,),
                          generator=torch.Generator().manual_seed(first + i))
            for i in range(per_rank)]).to(self.args.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def now(self):
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed_steps(self, forward, backward, step):
        """The (total, forward, backward, optimizer) seconds of each step, its loss and norm."""
        times, losses, norms = [], [], []
        for k in range(self.args.steps):
            ids, targets = self.batch(k)
            begin = self.now()
            loss = forward(ids, targets)
            after_forward = self.now()
            backward(loss)
            after_backward = self.now()
            norm = step()
            end = self.now()
            times.append((end - begin, after_forward - begin, after_backward - after_forward,
                          end - after_backward))
            losses.append(round(loss.item(), 6))
            if norm is not None:
                norms.append(round(norm.item(), 6))
        return times, losses, norms

    def free_step_s(self, forward, backward, step):
        batches = [self.batch(self.args.steps + k) for k in range(self.args.steps)]
        begin = self.now()
        for ids, targets in batches:
            backward(forward(ids, targets))
            step()
        return (self.now() - begin) / len(batches)

    def run(self, forward, backward, step, save=None):
        """Times the steps at each batch; save() is called after the timed steps of the first."""
        for number, self.batch_size in enumerate(self.args.batch):
            if self.cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            self.run_batch(forward, backward, step, save if number == 0 else None)

    def run_batch(self, forward, backward, step, save):
        times, losses, norms = self.timed_steps(forward, backward, step)
        if save is not None:
            save()
        times = sorted(times[WARM_UP_STEPS:])
        total_s, forward_s, backward_s, optimizer_s = times[len(times) // 2]
        free_s = self.free_step_s(forward, backward, step)
        if self.rank != 0:
            return
        device_bytes = torch.cuda.max_memory_allocated() if self.cuda else 0
        host_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print("RESULT " + json.dumps({
            "system": self.args.system, "preset": self.args.preset, "world": self.world,
            "params": self.num_params, "batch": self.batch_size,
            "tokens": self.batch_size * self.shape[4],
            "threads": self.threads, "step_s": round(total_s, 4),
            "free_step_s": round(free_s, 4), "forward_s": round(forward_s, 4),
            "backward_s": round(backward_s, 4), "optimizer_s": round(optimizer_s, 4),
            "losses": losses, "grad_norms": norms,
            "device_peak_gib": round(device_bytes / 2**30, 2),
            "rss_gib": round(host_kib / 2**20, 2)}), flush=True)


def run_plain(bench):
    """Everything resident. On CUDA: bf16 parameters and gradients, fp32 master weights."""
    model = bench.model().to(bench.args.device)
    params = list(model.parameters())
    master = [p.detach().clone() for p in params] if bench.cuda else params
    if bench.cuda:
        model.bfloat16()
    optimizer = torch.optim.AdamW(master, lr=LEARNING_RATE, fused=True)

    def step():
        if bench.cuda:
            for w, p in zip(master, params):
                w.grad, p.grad = p.grad.float(), None
        norm = nn.utils.clip_grad_norm_(master, bench.args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if bench.cuda:
            torch._foreach_copy_([p.data for p in params], master)
        return norm

    def save():
        from safetensors.torch import save_file
        names = [name for name, _ in model.named_parameters()]
        save_file({name: w.detach().cpu() for name, w in zip(names, master)}, bench.args.save)

    bench.run(model, lambda loss: loss.backward(), step, save if bench.args.save else None)


def shard_by_fsdp2(bench, model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    options = {"mesh": init_device_mesh(bench.args.device, (bench.world,))}
    if bench.cuda:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                    reduce_dtype=torch.bfloat16)
    if bench.args.system == "fsdp2-cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    else:
        model = model.to(bench.args.device)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def run_torch(bench):
    dist.init_process_group("cuda:nccl,cpu:gloo" if bench.cuda else "gloo")
    model = bench.model()
    if bench.args.system == "ddp":
        model = nn.parallel.DistributedDataParallel(model.to(bench.args.device))
    else:
        model = shard_by_fsdp2(bench, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step():
        nn.utils.clip_grad_norm_(model.parameters(), bench.args.clip)
        optimizer.step()
        optimizer.zero_grad()

    bench.run(model, lambda loss: loss.backward(), step)


def deepspeed_config(bench):
    """ZeRO-3 as its documentation tunes it, not its defaults."""
    args, system = bench.args, bench.args.system
    zero = {"stage": 3, "overlap_comm": bench.cuda, "contiguous_gradients": True,
            "reduce_bucket_size": int(5e7), "stage3_prefetch_bucket_size": int(1e8),
            "stage3_param_persistence_threshold": int(1e5),
            "stage3_max_live_parameters": int(1e9), "stage3_max_reuse_distance": int(1e9),
            "sub_group_size": int(args.sub_group)}
    on_cpu = {"device": "cpu", "pin_memory": bench.cuda}
    on_nvme = {"device": "nvme", "nvme_path": args.nvme, "pin_memory": bench.cuda}
    if system in ("deepspeed-cpu", "deepspeed-cpuopt"):
        zero["offload_optimizer"] = on_cpu
    if system == "deepspeed-cpu":
        zero["offload_param"] = on_cpu
    if system in ("deepspeed-nvme", "deepspeed-nvmeopt"):
        os.makedirs(args.nvme, exist_ok=True)
        zero["offload_optimizer"] = {**on_nvme, "pipeline_read": True, "pipeline_write": True,
                                     "buffer_count": 12}
    if system == "deepspeed-nvme":
        zero["offload_param"] = {**on_nvme, "buffer_count": 48, "buffer_size": int(1.1e8)}
    return {
        "train_micro_batch_size_per_gpu": args.batch[0] // bench.world,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": bench.cuda},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 1e-2}},
        "aio": {"block_size": 1 << 20, "queue_depth": 64, "thread_count": 4,
                "single_submit": False, "overlap_events": True},
    }


def run_deepspeed(bench):
    os.environ.setdefault("DS_ACCELERATOR", bench.args.device)
    import deepspeed  # after the variable: the import chooses the accelerator
    deepspeed.init_distributed("nccl" if bench.cuda else "gloo")
    model = bench.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                      config=deepspeed_config(bench))
    bench.run(engine, engine.backward, engine.step)


SYSTEMS = {
    "plain": run_plain,
    "ddp": run_torch,
    "fsdp2": run_torch,
    "fsdp2-cpu": run_torch,
    "deepspeed": run_deepspeed,
    "deepspeed-cpu": run_deepspeed,
    "deepspeed-cpuopt": run_deepspeed,
    "deepspeed-nvmeopt": run_deepspeed,
    "deepspeed-nvme": run_deepspeed,
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", required=True, choices=SYSTEMS)
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", default="2", help="sequences per step; several with commas")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int,
                        help="default: OMP_NUM_THREADS, else one on cpu and all cores on cuda")
    parser.add_argument("--init", help="safetensors file of initial parameters")
    parser.add_argument("--save", help="safetensors file for the parameters after --steps")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--nvme", default="/tmp/peers-nvme")
    parser.add_argument("--sub-group", type=float, default=1e8)
    args = parser.parse_args()
    try:
        args.batch = [int(word) for word in args.batch.split(",")]
    except ValueError:
        parser.error(f"--batch {args.batch} is not a number, or several with commas")
    if args.save and args.system != "plain":
        parser.error(f"--save is for --system plain, not {args.system}")
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {args.steps} leaves none to time after {WARM_UP_STEPS} to warm up")
    return args


def main():
    args = parse_arguments()
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1",
             "LOCAL_RANK": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    bench = Bench(args)
    for batch in args.batch:
        if batch < 1 or batch % bench.world:
            raise SystemExit(f"--batch {batch} does not divide over {bench.world} ranks")
    SYSTEMS[args.system](bench)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
