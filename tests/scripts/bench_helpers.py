"""What the tests of the benchmarks share: a folder, stand-ins for programs, quiet runs, rates.

Imported before the modules of bench/, which it puts on the path.
"""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import gpu_bounds  # noqa: E402

PARAMS = 1416744960  # of gpt-1b4
H200 = gpu_bounds.Rates(h2d=55.3e9, d2h=55.3e9, h2d_of_both=48.8e9, d2h_of_both=48.8e9,
                        device=4.3e12, adamw=72.4e9, disk_read=3.0e9, disk_write=1.9e9,
                        disk_mixed=2.7e9)


def metrics(*steps):
    """A file of --metrics: a step is its fields, or its seconds alone."""
    fields = (step if isinstance(step, dict) else {"step_s": step} for step in steps)
    return "".join(json.dumps({"step": k, **each}) + "\n" for k, each in enumerate(fields))


@contextlib.contextmanager
def quiet():
    """Yields what is printed on standard output; standard error is dropped."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        yield out


class FolderTest(unittest.TestCase):
    """Each test has an empty folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write_program(self, name, text):
        """A program in the folder that can be started; without a first line of its own: Python."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if text.startswith("#!") else f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
        return path

    def assert_refused(self, parse, arguments):
        """By an argument parser, with its exit code."""
        with self.assertRaises(SystemExit) as caught, quiet():
            parse(arguments)
        self.assertEqual(caught.exception.code, 2, arguments)
