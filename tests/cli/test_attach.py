"""The import hook: armed until torch really ran, silent otherwise, and nothing is different for the script."""

from __future__ import annotations

import os
import subprocess
import sys
import venv

import pytest

from osler.cli import supervisor


def attached(bench) -> bool:
    return (bench.run / ".torch").is_dir()


@pytest.mark.parametrize("text", [
    "import torch\n",
    "from torch.nn.functional import cross_entropy\n",
    "import importlib.util\nimportlib.util.find_spec('torch')\nimport torch\n",
    "import importlib\nimportlib.import_module('torch')\n",
    "import threading\nt = threading.Thread(target=__import__, args=('torch',))\nt.start()\nt.join()\n",
    "import importlib.util as u, sys\nspec = u.find_spec('torch')\nlazy = u.LazyLoader(spec.loader)\nspec.loader = lazy\n"
    "m = u.module_from_spec(spec)\nsys.modules['torch'] = m\nlazy.exec_module(m)\nimport json\nprint(type(m))\nprint(m.LOADED)\n",
    "import sys\nfrom importlib.machinery import PathFinder\nclass F:\n    def find_spec(self, n, p=None, t=None):\n"
    "        return PathFinder.find_spec(n, p) if n == 'torch' else None\nsys.meta_path.insert(0, F())\nimport torch\nimport wave\n",
])
def test_every_way_in(bench, text):
    bench.script(text + "import torch\nprint(torch.__loader__.__dict__, type(torch.__loader__), torch.__spec__.origin, torch.nn)\n")
    bench.same("train.py")
    assert attached(bench)


def test_not_attached_by_mere_asking(bench):
    bench.script("import importlib.util\nprint(importlib.util.find_spec('torch').name)\n")
    bench.same("train.py")
    assert not attached(bench)


def test_lazy_torch_is_not_woken(bench):
    bench.script("import importlib.util as u, sys\nspec = u.find_spec('torch')\nlazy = u.LazyLoader(spec.loader)\nspec.loader = lazy\n"
                 "m = u.module_from_spec(spec)\nsys.modules['torch'] = m\nlazy.exec_module(m)\nimport wave\nprint(type(m).__name__)\n")
    assert bench.same("train.py").stdout == b"_LazyModule\n"
    assert not attached(bench)


@pytest.mark.parametrize("words", [("-m", "pkg.mod"), ("train.py",), ("--", sys.executable, "train.py"),
                                   ("--", "sh", "-c", f"{sys.executable} train.py"), ("--", sys.executable, "-P", "train.py")])
def test_every_launcher(bench, words):
    bench.script("import torch\nprint('done')\n")
    bench.script("import torch\nprint('done')\n", "pkg/mod.py")
    if "-P" in words and sys.version_info < (3, 11):
        pytest.skip("no -P")
    assert bench.osler("run", *words).stdout == b"done\n"
    assert attached(bench)


def test_shadowed_sitecustomize_runs_in_place(bench):
    bench.script("import builtins\nbuiltins.HELLO = 'hello'\nSELF = __file__\n", "own/sitecustomize.py")
    bench.script("import sys, sitecustomize\nprint(HELLO, sitecustomize.SELF, sitecustomize.__spec__.origin, type(sitecustomize.__loader__), sys.path)\nimport torch\n")
    bench.env["PYTHONPATH"] = os.pathsep.join([str(bench.folder / "own"), bench.env["PYTHONPATH"]])
    bench.same("train.py")
    assert attached(bench)


def test_broken_sitecustomize_breaks_as_ever(bench, stranger):
    bench.script("raise ValueError('mine')\n", "own/sitecustomize.py")
    bench.script("import sys\nprint('sitecustomize' in sys.modules)\nimport torch\n")
    bench.env["PYTHONPATH"] = os.pathsep.join([str(bench.folder / "own"), bench.env["PYTHONPATH"]])
    plain, watched = bench.python("train.py"), watched_by_hand(bench, stranger, "", "train.py")
    assert (plain.stdout, plain.stderr) == (watched.stdout, watched.stderr) and b"mine" in plain.stderr
    assert (bench.folder / "run" / ".torch").is_dir()


def test_no_sitecustomize_stays_none(bench):
    bench.script("import sys\ntry:\n    import sitecustomize\nexcept ImportError as e:\n    print(e)\n"
                 "print('sitecustomize' in sys.modules, sys.path, sorted(sys.modules))\n")
    plain = bench.python("train.py").stdout
    if b"No module" not in plain:
        pytest.skip("this Python has a sitecustomize")
    bench.same("train.py")


@pytest.mark.parametrize("text", [
    "import torch.missing\n",
    "from torch import nowhere\n",
    "import warnings\nwarnings.warn('careful', stacklevel=2)\nimport torch\n1 / 0\n",
    "def f(n):\n    return f(n)\nf(0)\n",
    "class Batch:\n    pass\nimport pickle\nprint(type(pickle.loads(pickle.dumps(Batch()))), __name__, __file__)\n",
    "import sys\nprint(sys.argv, sys.path, sys.flags, __builtins__, __spec__, sys.stdin.read(), sorted(sys.modules))\n",
    "import torch, traceback\ntry:\n    __import__('torch.gone')\nexcept ImportError:\n    traceback.print_exc()\n",
])
def test_script_sees_no_difference(bench, text):
    bench.script(text)
    bench.same("train.py", "--flag", "x y", input=b"from stdin")


def test_broken_torch_has_the_same_traceback(bench):
    bench.script("import warnings\ndef f():\n    raise RuntimeError('broken')\nwarnings.warn('soon', stacklevel=2)\nf()\n", "torch/__init__.py")
    bench.script("def load():\n    import torch\nload()\n")
    assert b"broken" in bench.same("train.py").stderr


def test_binary_stdout_and_open_files_pass_through(bench):
    bench.script("import os, sys\nsys.stdout.buffer.write(bytes(range(256)) * 300)\nsys.stdout.buffer.write(open(sys.argv[1], 'rb').read())\n")
    line = "run train.py <(echo via a pipe)"
    done = bench.call(["bash", "-c", f"{sys.executable} -m osler {line}"])
    assert done.stdout == bytes(range(256)) * 300 + b"via a pipe\n"


CHILDREN = """
import multiprocessing, os, sys
class Row:
    pass
def work(row):
    import torch
    return isinstance(row, Row), torch.LOADED, any(hasattr(f, "attach_late") for f in sys.meta_path)
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(work, [Row()])[0][:2])
        if "OSLER_RUN" in os.environ:
            assert pool.map(work, [Row()])[0][2], "the child is not watched"
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(bench, method):
    bench.script(CHILDREN)
    assert bench.same("train.py", method).returncode == 0
    assert attached(bench)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A Python without osler."""
    folder = tmp_path_factory.mktemp("stranger")
    venv.create(folder, with_pip=False, symlinks=True)
    return str(folder / "bin" / "python")


def watched_by_hand(bench, python, home, *words):
    env = {**bench.env, "OSLER_RUN": str(bench.folder / "run"), "OSLER_HOME": str(home),
           "PYTHONPATH": os.pathsep.join([str(supervisor.SITE), bench.env["PYTHONPATH"]])}
    (bench.folder / "run").mkdir(exist_ok=True)
    return subprocess.run([python, *words], cwd=bench.folder, env=env, capture_output=True, timeout=60)


FAKE = {"__init__.py": "", "watch/__init__.py": "", "watch/attach.py": "def attach():\n    print('attached')\n"}


@pytest.mark.parametrize("namesake", [False, True])
def test_python_without_osler_gets_the_supervisors(bench, stranger, namesake):
    for name, text in FAKE.items():
        bench.script(text, f"home/osler/{name}")
    bench.script("SECRET = 1\n", "home/numpy_of_another_environment.py")
    if namesake:
        (bench.folder / "osler").mkdir()  # a mere folder of that name, like a clone of the repository
    bench.script("import sys\ntry:\n    import numpy_of_another_environment\nexcept ImportError:\n    print('not visible')\n"
                 "import torch\nprint([p for p in sys.path if 'home' in p])\n")
    done = watched_by_hand(bench, stranger, bench.folder / "home", "train.py")
    assert done.stdout == b"not visible\nattached\n[]\n"
    assert done.stderr == b""


def test_osler_of_the_script_wins(bench, stranger):
    for name, text in FAKE.items():
        bench.script(text, f"home/osler/{name}")
        bench.script(text.replace("attached", "attached by its own"), f"osler/{name}")
    bench.script("import torch\n")
    assert watched_by_hand(bench, stranger, bench.folder / "home", "train.py").stdout == b"attached by its own\n"


@pytest.mark.parametrize("bad", ["raise SystemExit(9)", "raise RuntimeError('no luck')", "syntax error here"])
def test_failure_to_attach_is_one_line_in_a_log(bench, stranger, bad):
    for name, text in {**FAKE, "watch/attach.py": f"{bad}\n"}.items():
        bench.script(text, f"home/osler/{name}")
    bench.script("import torch\nprint('trains on')\n")
    done = watched_by_hand(bench, stranger, bench.folder / "home", "train.py")
    assert (done.stdout, done.stderr, done.returncode) == (b"trains on\n", b"", 0)
    assert (bench.folder / "run" / "attach.log").read_text().count("\n") == 1


def test_silent_without_a_run(bench, stranger):
    bench.script("import torch, sys\nprint([type(f).__name__ for f in sys.meta_path if type(f).__name__ == 'Hook'])\n")
    env = {**bench.env, "PYTHONPATH": os.pathsep.join([str(supervisor.SITE), bench.env["PYTHONPATH"]])}
    assert subprocess.run([stranger, "train.py"], cwd=bench.folder, env=env, capture_output=True, timeout=60).stdout == b"[]\n"


def test_torch_from_a_pth_file(bench, stranger):
    """Such files run before sitecustomize, so torch is there already."""
    for name, text in FAKE.items():
        bench.script(text, f"home/osler/{name}")
    asked = [stranger, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.strip()
    path = os.path.join(site, "early.pth")
    with open(path, "w") as file:
        file.write("import torch\n")
    try:
        bench.script("print('script')\n")
        assert watched_by_hand(bench, stranger, bench.folder / "home", "train.py").stdout == b"attached\nscript\n"
    finally:
        os.remove(path)


@pytest.mark.slow
def test_real_torch(bench):
    del bench.env["PYTHONPATH"]
    bench.script("import importlib.util\nimportlib.util.find_spec('torch')\nfrom torch.nn.functional import cross_entropy\n"
                 "import torch\nprint(cross_entropy(torch.zeros(2, 2), torch.zeros(2).long()))\n")
    bench.same("train.py")
    assert attached(bench)
