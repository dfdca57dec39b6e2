#!/usr/bin/env python3
"""tidy_units.py COMPILE_COMMANDS [FILE...]: the units of a build to look at, one per line.

All of them if no file is named; else each named source that is a unit, and for each named header the
source of its name, or else the first unit that includes it.
"""
import json
import os
import pathlib
import sys


def units_of(commands, root):
    """Sources of the project, each once, with torch's, which take longest, first."""
    paths = {os.path.relpath(unit["file"], root): unit["command"] for unit in commands}
    ours = [path for path in paths if path.endswith(".cpp") and not path.startswith(("..", "build"))]
    return sorted(ours, key=lambda path: ("torch/csrc/api/include" not in paths[path], path))


def choose(units, wanted, read_text):
    if not wanted:
        return units
    chosen = set()
    for path in wanted:
        if path in units:
            chosen.add(path)
        elif path.endswith(".h"):
            source = path[:-2] + ".cpp"
            include = f'#include "{path}"'
            users = [source] if source in units else [
                unit for unit in units if include in read_text(unit)][:1]
            chosen.update(users)
    return [unit for unit in units if unit in chosen]


def main(arguments):
    root = pathlib.Path.cwd()
    commands = json.loads(pathlib.Path(arguments[0]).read_text(encoding="utf-8"))
    for unit in choose(units_of(commands, root), arguments[1:],
                       lambda path: (root / path).read_text(encoding="utf-8")):
        print(unit)


if __name__ == "__main__":
    main(sys.argv[1:])
