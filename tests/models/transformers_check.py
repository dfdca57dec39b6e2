#!/usr/bin/env python3
"""The other side of tessera export and train --init: a GPT-2 of transformers.

    transformers_check.py available
    transformers_check.py compare EXPORT EXPECTED BOUND
    transformers_check.py make CONFIG FOLDER EXPECTED

compare: whether it computes the logits that our GPT computed. EXPECTED is a safetensors file with
"ids" [rows, length], as numbers of any type, and "logits". Prints the largest difference; ends with 1
if it is above BOUND, or if the files and the model do not have the same parameters.
make: a model of the shape in CONFIG (JSON) with random weights in FOLDER, and what it computes.
"""
import importlib.util
import json
import os
import sys

# Nothing is looked for on the network.
os.environ["HF_HUB_OFFLINE"] = "1"


def compare(folder, expected_file, bound):
    import torch
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel

    model, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    wrong = {kind: found for kind, found in report.items() if found}
    if wrong:
        print(f"{folder}: {wrong}")
        return 1
    expected = load_file(expected_file)
    with torch.no_grad():
        found = model.eval().float()(expected["ids"].long()).logits
    difference = (found - expected["logits"]).abs().max().item()
    print(f"largest difference of {found.numel()} logits: {difference:.3g}, "
          f"of logits up to {found.abs().max().item():.3g}")
    return 0 if difference <= float(bound) else 1


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
        needed = ["torch", "safetensors", "transformers"]
        return 0 if all(map(importlib.util.find_spec, needed)) else 1
    return {"compare": compare, "make": make}[command](*rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
