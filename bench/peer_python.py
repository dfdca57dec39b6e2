#!/usr/bin/env python3
"""The Python in which the peers run: found where there is one, made on request.

    bench/peer_python.py --install    makes build/peers-venv, or does nothing if it is complete

The peers use the very torch that Tessera is built with: a path file in the virtual environment
leads to it, so that nothing is downloaded twice and no figure compares two versions of torch.
"""
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
VENV = ROOT / "build/peers-venv"
# DeepSpeed is pinned because limits refer to it. It builds its kernels with ninja and setuptools.
PACKAGES = ("deepspeed==0.19.8", "safetensors", "numpy", "ninja", "setuptools")
INSTALL_REMEDY = ("make bench PEERS=1 does: build/peers-venv/bin/pip install " + " ".join(PACKAGES))

PROBE = """
import importlib.metadata, importlib.util, json, os, sysconfig
def version(name):
    return importlib.metadata.version(name) if importlib.util.find_spec(name) else None
print(json.dumps({"torch": version("torch"), "deepspeed": version("deepspeed"),
                  "headers": os.path.exists(sysconfig.get_path("include") + "/Python.h")}))
"""


class InstallError(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class PeerPython:
    program: pathlib.Path | str
    torch: str | None  # versions; None if it is not installed
    deepspeed: str | None
    headers: bool  # Python.h

    def skip_reasons(self):
        """Why a peer cannot run here, and what to do about it; nothing for one that can."""
        if self.torch is None:
            no_torch = f"{self.program} has no torch; {INSTALL_REMEDY}"
            return {"ddp": no_torch, "fsdp2": no_torch, "deepspeed": no_torch}
        if self.deepspeed is None:
            return {"deepspeed": f"not installed; {INSTALL_REMEDY}"}
        if not self.headers:
            return {"deepspeed": "it compiles its kernels and Python.h is missing; "
                                 "apt-get install python3-dev"}
        return {}


def build_torch_dir(root=ROOT):
    """The folder of the torch of the build as scripts/setup noted it, or None."""
    note = root / "build/setup/torch_dir"
    return pathlib.Path(note.read_text().strip()) if note.exists() else None


def python_of(torch_dir):
    """The interpreter for which the package torch in this folder was installed."""
    # <prefix>/lib/python3.N/site-packages/torch
    if torch_dir is not None and len(torch_dir.parents) > 3:
        own = torch_dir.parents[3] / "bin/python3"
        if own.exists():
            return own
    return "python3"


def probe(program):
    """What this interpreter has, without importing it: that takes seconds."""
    try:
        done = subprocess.run([str(program), "-c", PROBE], text=True, capture_output=True,
                              check=True)
    except (OSError, subprocess.CalledProcessError):
        return PeerPython(program, None, None, False)
    return PeerPython(program, **json.loads(done.stdout))


def find():
    own = VENV / "bin/python3"
    return probe(own if own.exists() else python_of(build_torch_dir()))


def packages_beside(torch_dir):
    """(folder for the path file or None, packages to install), so that peers use this torch."""
    if torch_dir is None:
        return None, PACKAGES
    if (torch_dir / "__init__.py").exists():
        return torch_dir.parent, PACKAGES
    # A LibTorch has no Python part: the package of the same version stands in.
    version = re.match(r"[\d.]+", (torch_dir / "build-version").read_text())[0]
    return None, (f"torch=={version}",) + PACKAGES


def install():
    torch_dir = build_torch_dir()
    folder, packages = packages_beside(torch_dir)
    log = VENV / "install.log"
    VENV.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        if not (VENV / "bin/pip").exists():
            run_logged(out, [python_of(torch_dir), "-m", "venv", VENV])
        if folder is not None:
            site = next((VENV / "lib").glob("python3*/site-packages"))
            (site / "torch_of_the_build.pth").write_text(f"{folder}\n")
        print(f"bench: {' '.join(packages)} into build/peers-venv, unless there", flush=True)
        run_logged(out, [VENV / "bin/pip", "install", "--disable-pip-version-check", *packages])


def run_logged(log, command):
    command = [str(word) for word in command]
    try:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(
            f"failed: {' '.join(command)}: {error}; its output is in {log.name}. Is the network "
            "up? The benchmarks run without peers too: make bench") from error


def main(arguments):
    if arguments != ["--install"]:
        print("usage: peer_python.py --install", file=sys.stderr)
        return 2
    try:
        install()
    except InstallError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
