"""scripts/setup on machines that do not exist: a PATH of stand-ins decides what is installed.

Each test makes a copy of the script in a small tree and a folder of programs that is the whole PATH.
The stand-in for apt-get writes down how it was called and "installs" by adding stand-ins.
"""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What the script itself is written with, and every Debian has.
BASE_TOOLS = ("bash", "env", "uname", "mkdir", "sha256sum", "cut", "dirname", "sort", "head", "tail",
              "awk", "sed", "tr", "cat", "chmod", "printf")

GXX = """#!/usr/bin/env bash
case "$1" in
  -dumpfullversion) echo {version} ;;
  -E) sed -n 's/^MISSING //p' | grep -vxF -f "$HERE/headers" | sed 's/^/MISSING /' ;;
esac
"""
PACKAGES = ("nlohmann-json3-dev", "libcli11-dev", "libfmt-dev", "libgtest-dev", "libbenchmark-dev",
            "libxxhash-dev")
WANTED = "liburing-dev"


class Machine:
    """A tree with scripts/setup, and a PATH with nothing but stand-ins."""

    def __init__(self, test):
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.path = self.root / "bin"
        (self.root / "scripts").mkdir()
        self.path.mkdir()
        shutil.copy(ROOT / "scripts/setup", self.root / "scripts/setup")
        for tool in BASE_TOOLS + ("grep",):
            found = shutil.which(tool)
            if found:
                (self.path / tool).symlink_to(found)
        (self.root / "headers").write_text("")
        self.environment = {"PATH": str(self.path), "HERE": str(self.root)}

    def add(self, name, text):
        file = self.path / name
        file.write_text(text)
        file.chmod(0o755)

    def add_tools(self, gxx="13.3.0", cmake="3.28.1"):
        self.add("g++", GXX.format(version=gxx))
        self.add("cmake", f"#!/usr/bin/env bash\necho cmake version {cmake}\n")
        self.add("ninja", "#!/usr/bin/env bash\n")
        self.add("git", "#!/usr/bin/env bash\n")

    def add_headers(self, wanted=True):
        found = PACKAGES + ((WANTED,) if wanted else ())
        (self.root / "headers").write_text("\n".join(found) + "\n")

    def add_torch(self, version="2.12.0"):
        """A python3 that finds a torch of this version; None: one without torch."""
        site = self.root / "site"
        if version:
            (site / "torch/share/cmake/Torch").mkdir(parents=True)
            (site / "torch/share/cmake/Torch/TorchConfig.cmake").write_text("")
            (site / "torch/__init__.py").write_text("raise ImportError('looked at, never imported')")
            (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")
        # -I -S: nothing of the machine that runs this test shows through.
        self.add("python3", "#!/usr/bin/env bash\n"
                 f'exec {shutil.which("python3")} -I -S -c "import sys; '
                 f"sys.path.insert(0, '{site}'); src = sys.stdin.read() if sys.argv[1] == '-' "
                 "else sys.argv[2]; sys.argv = sys.argv[1:]; exec(src)\" \"$@\"\n")

    def add_apt(self, installs=""):
        self.add("apt-get", '#!/usr/bin/env bash\necho "$@" >>"$HERE/apt-calls"\n'
                 f'case "$*" in *" install "*) {installs or ":"} ;; esac\n')

    def apt_calls(self):
        file = self.root / "apt-calls"
        return file.read_text() if file.exists() else ""

    def setup(self, *arguments, user=None, **environment):
        return subprocess.run([str(self.path / "bash"), str(self.root / "scripts/setup"), *arguments],
                              env={**self.environment, **environment}, text=True, user=user,
                              capture_output=True, check=False)


class Setup(unittest.TestCase):
    def setUp(self):
        self.machine = Machine(self)

    def test_a_machine_that_has_everything_is_left_alone(self):
        self.machine.add_tools()
        self.machine.add_headers()
        self.machine.add_torch()
        self.machine.add_apt()
        result = self.machine.setup()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.machine.apt_calls(), "")
        self.assertIn("notice: no ccache", result.stdout)
        torch_dir = (self.machine.root / "build/setup/torch_dir").read_text().strip()
        self.assertEqual(torch_dir, str(self.machine.root / "site/torch"))

    def test_the_second_run_says_nothing_and_does_nothing(self):
        self.test_a_machine_that_has_everything_is_left_alone()
        result = self.machine.setup()
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))

    def test_a_tool_that_has_gone_since_the_first_run_is_noticed(self):
        self.test_a_machine_that_has_everything_is_left_alone()
        (self.machine.path / "ninja").unlink()
        self.machine.setup()
        self.assertIn("install --no-install-recommends ninja-build", self.machine.apt_calls())

    def test_only_what_is_missing_is_installed(self):
        self.machine.add_tools()
        (self.machine.root / "headers").write_text("\n".join((*PACKAGES[:-2], WANTED)) + "\n")
        self.machine.add_torch()
        every = "\\n".join((*PACKAGES, WANTED))
        self.machine.add_apt(installs=f"printf '{every}\\n' >\"$HERE/headers\"")
        result = self.as_root()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("install --no-install-recommends libbenchmark-dev libxxhash-dev ccache\n",
                      self.machine.apt_calls())

    def as_root(self, **environment):
        """Runs setup; where this test is not root, a stand-in for sudo takes its place."""
        self.machine.add("sudo", '#!/usr/bin/env bash\n[[ "$1" != -n ]] || shift\nexec "$@"\n')
        return self.machine.setup(**environment)

    def test_a_package_that_is_still_missing_after_installing_is_an_error(self):
        self.machine.add_tools(cmake="3.22.1")
        self.machine.add_headers()
        self.machine.add_torch()
        self.machine.add_apt()
        result = self.as_root()
        self.assertEqual(result.returncode, 1)
        self.assertIn("still missing or too old after installing: cmake", result.stderr)

    def test_an_apt_that_fails_shows_the_end_of_its_log_and_the_remedy(self):
        self.machine.add_headers()
        self.machine.add_torch()
        self.machine.add("apt-get", "#!/usr/bin/env bash\necho no route to host; exit 100\n")
        result = self.as_root()
        self.assertEqual(result.returncode, 1)
        self.assertIn("no route to host", result.stderr)
        self.assertIn("install by hand: apt-get install g++", result.stderr)

    def test_neither_root_nor_sudo_is_an_error_that_names_the_packages(self):
        self.machine.add_apt()
        self.machine.root.chmod(0o777)
        result = self.machine.setup(user=65534 if os.geteuid() == 0 else None)
        self.assertEqual(result.returncode, 1)
        self.assertIn("as root: apt-get install g++ nlohmann-json3-dev", result.stderr)
        self.assertEqual(self.machine.apt_calls(), "")

    def test_no_apt_is_an_error_that_names_the_packages(self):
        self.machine.add_headers()
        self.machine.add_torch()
        result = self.machine.setup()
        self.assertEqual(result.returncode, 1)
        self.assertIn("there is no apt-get to install them with: g++", result.stderr)

    def test_liburing_is_installed_where_it_is_missing(self):
        self.machine.add_tools()
        self.machine.add_headers(wanted=False)
        self.machine.add_torch()
        self.machine.add_apt()
        result = self.as_root()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn(f"install --no-install-recommends {WANTED}\n", self.machine.apt_calls())
        self.assertNotIn("io_uring", result.stdout)

    def test_without_liburing_a_machine_is_ready_all_the_same(self):
        self.machine.add_tools()
        self.machine.add_headers(wanted=False)
        self.machine.add_torch()
        for name, apt in (("none", None), ("failing", "#!/usr/bin/env bash\nexit 100\n")):
            with self.subTest(apt=name):
                if apt:
                    self.machine.add("apt-get", apt)
                shutil.rmtree(self.machine.root / "build", ignore_errors=True)
                result = self.as_root()
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                self.assertIn("notice: not installed: liburing-dev; files are read and written by "
                              "threads", result.stdout)
                self.assertIn("setup: ready", result.stdout)

    def test_with_a_liburing_of_ones_own_none_is_installed(self):
        self.machine.add_tools()
        self.machine.add_headers(wanted=False)
        self.machine.add_torch()
        self.machine.add_apt()
        result = self.as_root(LIBURING_DIR="somewhere")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.machine.apt_calls(), "")
        self.assertNotIn("io_uring", result.stdout)

    def test_with_an_xxhash_of_ones_own_none_is_installed(self):
        self.machine.add_tools()
        (self.machine.root / "headers").write_text("\n".join((*PACKAGES[:-1], WANTED)) + "\n")
        self.machine.add_torch()
        self.machine.add_apt()
        result = self.as_root(XXHASH_DIR="somewhere")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.machine.apt_calls(), "")
        # Without it the next run is another one, and installs the package.
        self.as_root()
        self.assertIn("install --no-install-recommends libxxhash-dev", self.machine.apt_calls())

    def test_the_newest_torch_that_is_known_is_used(self):
        self.machine.add_tools()
        self.machine.add_headers()
        self.machine.add_torch("2.15.0")
        result = self.machine.setup()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_torch_of_another_version_is_not_used(self):
        self.machine.add_tools()
        self.machine.add_headers()
        self.machine.add_torch("2.9.1")
        (self.machine.root / ".venv/bin").mkdir(parents=True)
        pip = self.machine.root / ".venv/bin/pip"
        pip.write_text('#!/usr/bin/env bash\necho "pip $*"; exit 1\n')
        pip.chmod(0o755)
        result = self.machine.setup()
        self.assertEqual(result.returncode, 1)
        self.assertIn("pip install --disable-pip-version-check torch==2.13.0", result.stderr)
        self.assertIn("set TORCH_DIR", result.stderr)

    def test_torch_dir_wins_and_is_checked(self):
        self.machine.add_tools()
        self.machine.add_headers()
        self.machine.add_torch("2.9.1")
        good = self.machine.root / "mine"
        (good / "share/cmake/Torch").mkdir(parents=True)
        (good / "share/cmake/Torch/TorchConfig.cmake").write_text("")
        result = self.machine.setup(TORCH_DIR=str(good))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual((self.machine.root / "build/setup/torch_dir").read_text().strip(), str(good))
        result = self.machine.setup(TORCH_DIR=str(self.machine.root))
        self.assertEqual(result.returncode, 1)
        self.assertIn("holds no share/cmake/Torch/TorchConfig.cmake", result.stderr)

    def test_an_unknown_argument_is_an_error(self):
        self.assertEqual(self.machine.setup("--fast").returncode, 1)


if __name__ == "__main__":
    unittest.main()
