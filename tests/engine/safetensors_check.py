#!/usr/bin/env python3
"""Reads a checkpoint of Tessera with the stock package safetensors, which knows nothing of it.

    safetensors_check.py available
    safetensors_check.py check SAVE

check: every fragment that the manifest lists is one tensor of its file, as the package reads it: the
same name as docs/formats.md gives it, the same type, and the bytes at the fragment's offset. Prints
how many tensors there were; ends with 1 and says what differs.
"""
import json
import os
import sys

TYPES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1}


def fragments_of(manifest):
    """(name in the file, type, fragment) of all that the manifest lists."""
    for param in manifest["params"]:
        for kind, tensor in param["tensors"].items():
            name = param["name"] if kind == "value" else param["name"] + "#" + kind
            for fragment in tensor["fragments"]:
                yield name, tensor["dtype"], fragment
    for what in ("buffers", "generators"):
        for tensor in manifest[what]:
            for fragment in tensor["ranks"]:
                yield what[:-1] + "#" + tensor["name"], tensor["dtype"], fragment


def check(save):
    import safetensors

    with open(os.path.join(save, "manifest.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    contents = []
    for file in manifest["files"]:
        with open(os.path.join(save, file["name"]), "rb") as stream:
            data = stream.read()
        contents.append((data, dict(safetensors.deserialize(data))))
    num_tensors = 0
    for name, dtype, fragment in fragments_of(manifest):
        data, tensors = contents[fragment["file"]]
        where = "%s in file %d" % (name, fragment["file"])
        if name not in tensors:
            sys.exit(where + " is not there: " + ", ".join(tensors))
        tensor = tensors[name]
        begin = fragment["offset"]
        size = fragment["numel"] * TYPES[dtype]
        if tensor["dtype"] != dtype or bytes(tensor["data"]) != data[begin:begin + size]:
            sys.exit(where + " has other bytes, or is " + tensor["dtype"])
        num_tensors += 1
    print("%d tensors" % num_tensors)


def main(arguments):
    if arguments == ["available"]:
        try:
            import safetensors
        except ImportError as error:
            sys.exit("the package safetensors is not installed: %s" % error)
        print("safetensors", safetensors.__version__)
    elif len(arguments) == 2 and arguments[0] == "check":
        check(arguments[1])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
