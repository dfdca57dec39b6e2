#!/usr/bin/env python3
"""The other side of tessera export and train --init: a GPT-2 of transformers.

    transformers_check.py available [MODULE...]
    transformers_check.py compare EXPORT EXPECTED BOUND
    transformers_check.py adapt BASE ADAPTERS EXPECTED BOUND
    transformers_check.py make CONFIG FOLDER EXPECTED

compare: whether it computes the logits that our GPT computed. EXPECTED is a safetensors file with
"ids" [rows, length], as numbers of any type, and "logits". Prints the largest difference; ends with 1
if it is above BOUND, or if the files and the model do not have the same parameters.
adapt: the same of PEFT with the adapters beside BASE, and once more with them merged into it.
make: a model of the shape in CONFIG (JSON) with random weights in FOLDER, and what it computes.
"""
import importlib.util
import json
import os
import sys

# Nothing is looked for on the network.
os.environ["HF_HUB_OFFLINE"] = "1"


def load_model(folder):
    """None, and says why, where files and model differ in their parameters."""
    from transformers import GPT2LMHeadModel

    model, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    wrong = {kind: found for kind, found in report.items() if found}
    if wrong:
        print(f"{folder}: {wrong}")
        return None
    return model.eval().float()


def difference(model, expected):
    import torch

    with torch.no_grad():
        found = model(expected["ids"].long()).logits
    largest = (found - expected["logits"]).abs().max().item()
    print(f"largest difference of {found.numel()} logits: {largest:.3g}, "
          f"of logits up to {found.abs().max().item():.3g}")
    return largest


def compare(folder, expected_file, bound):
    from safetensors.torch import load_file

    model = load_model(folder)
    if model is None:
        return 1
    return 0 if difference(model, load_file(expected_file)) <= float(bound) else 1


def adapt(base, adapters, expected_file, bound):
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    model = load_model(base)
    if model is None:
        return 1
    expected = load_file(expected_file)
    if difference(model, expected) <= float(bound):
        print(f"{base}: computes the same without the adapters")
        return 1
    model = PeftModel.from_pretrained(model, adapters).eval()
    # It only warns of what is missing or too much, so: every tensor is there, and has its bits.
    stored = load_file(os.path.join(adapters, "adapter_model.safetensors"))
    loaded = get_peft_model_state_dict(model)
    if set(stored) != set(loaded):
        print(f"{adapters}: in one of files and model: {sorted(set(stored) ^ set(loaded))}")
        return 1
    different = [name for name in stored if not stored[name].equal(loaded[name])]
    if different:
        print(f"{adapters}: loaded otherwise: {different}")
        return 1
    apart = [difference(model, expected), difference(model.merge_and_unload(), expected)]
    return 0 if max(apart) <= float(bound) else 1


def make(config, folder, expected_file):
    import torch
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**json.loads(config))).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are not random at first
            parameter += 0.1 * torch.randn_like(parameter)
        ids = torch.arange(2 * model.config.n_positions) % model.config.vocab_size
        ids = ids.view(2, model.config.n_positions)
        save_file({"ids": ids.float(), "logits": model(ids).logits}, expected_file)
    model.save_pretrained(folder)
    return 0


def main(arguments):
    command, *rest = arguments
    if command == "available":
        needed = ["torch", "safetensors", "transformers", *rest]
        return 0 if all(map(importlib.util.find_spec, needed)) else 1
    return {"compare": compare, "adapt": adapt, "make": make}[command](*rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
