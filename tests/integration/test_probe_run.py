"""`python -m seedance.run`: a program without torch runs as Python alone would run it, from the built wheel.

The oracle is Python itself: the same program run both ways must leave the same output, traceback and exit status.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from tests.programs import Runs, environment


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("env"))


@pytest.fixture
def runs(python: Path, tmp_path: Path) -> Runs:
    return Runs(python, tmp_path)


# --- a program without torch ----------------------------------------------------------------------------------------

WHERE = """
    import os, sys
    import beside
    import __main__
    spec = None if __spec__ is None else __spec__.name
    print(__name__, __file__, __package__, spec, type(__loader__).__name__, __doc__, __cached__, beside.WORD)
    print(sys.argv, sys.path, sys.flags)
    print(__main__ is sys.modules["__main__"], __main__.__dict__ is globals(), sys.excepthook is sys.__excepthook__)
    print(sorted(globals()), __builtins__.__name__, sorted(vars(__main__)))
    print(sys.getrecursionlimit(), os.getcwd(), eval("1 / 2"), compile("0", "", "eval").co_flags)
    def annotated(x: int): ...
    print(annotated.__annotations__)
"""


def test_a_script_sees_what_python_shows_it(runs: Runs) -> None:
    runs.write("train.py", WHERE)
    runs.write("deep/train.py", WHERE)
    runs.write("beside.py", "WORD = 'outer'")
    runs.write("deep/beside.py", "WORD = 'inner'")
    assert "outer" in runs.same("train.py", "--lr", "1", "-m", "--drop", "x", "")
    assert "inner" in runs.same("deep/train.py", "a b")
    assert "inner" in runs.same("deep/../deep/train.py")
    assert "inner" in runs.same("./deep/./train.py")
    assert "inner" in runs.same(str(runs.folder / "deep/train.py"))
    (runs.folder / "link.py").symlink_to("deep/train.py")
    assert "inner" in runs.same("link.py")


def test_a_module_sees_what_python_shows_it(runs: Runs) -> None:
    runs.write("beside.py", "WORD = 'outer'")
    runs.write("package/__init__.py", "import sys; print('package', sys.argv)")
    runs.write("package/tool.py", WHERE)
    runs.write("package/__main__.py", WHERE)
    assert "package.tool" in runs.same("-m", "package.tool", "--epochs", "3")
    assert "package.__main__" in runs.same("-m", "package", "x")
    assert "No module named nowhere" in runs.same("-m", "nowhere", status=1)
    assert "No module named package.nowhere" in runs.same("-m", "package.nowhere", status=1)


def test_a_folder_and_an_archive_run(runs: Runs) -> None:
    runs.write("app/__main__.py", WHERE)
    runs.write("app/beside.py", "WORD = 'in the app'")
    assert "in the app" in runs.same("app", "1")
    with zipfile.ZipFile(runs.folder / "app.zip", "w") as archive:
        for name in ("__main__.py", "beside.py"):
            archive.write(runs.folder / "app" / name, name)
    assert "in the app" in runs.same("app.zip", "1")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('no data')", 1),
        ("raise SystemExit(258)", 2),
        ("os._exit(7)", 7),
        ("raise ValueError('bad batch')", 1),
        ("f()", 1),
        ("import broken", 1),
        ("os.abort()", -signal.SIGABRT),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("1 / 0 if True else 2", 1),
        ("raise ExceptionGroup('many', [ValueError(1), TypeError(2)])", 1),
        ("sys.excepthook = lambda kind, error, trace: print('mine', kind, trace.tb_lineno)\nraise KeyError(1)", 1),
        ("import atexit; atexit.register(print, 'bye'); sys.stderr.write('x'); raise OSError(5, 'disk')", 1),
        ("a = ValueError(1); a.__context__ = b = ValueError(2); b.__context__ = a\nraise a", 1),
    ],
)
def test_exit_status_and_traceback_are_pythons(runs: Runs, end: str, status: int) -> None:
    runs.write("broken.py", "def f(:\n")
    script = """
        import os, signal, sys
        def f():
            try:
                {}['key']
            except KeyError as error:
                raise RuntimeError("while handling") from error
        print("before", flush=True)
    """
    path = runs.write("end.py", script)
    path.write_text(path.read_text() + end + "\n")
    runs.same("end.py", status=status)
    runs.same("-m", "end", status=status)


def test_a_script_that_cannot_be_read_or_parsed(runs: Runs) -> None:
    assert "can't open file" in runs.same("nowhere.py", status=2)
    runs.write("wrong.py", "x = (\n")
    assert "SyntaxError" in runs.same("wrong.py", status=1)
    runs.write("latin.py", "x = 1\n").write_bytes(b"x = '\xff'\n")
    assert "SyntaxError" in runs("-m", "seedance.run", "latin.py", status=1).stderr  # Python words it otherwise


def test_an_interrupt_from_the_keyboard(runs: Runs) -> None:
    runs.write("wait.py", "import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")
    ends = []
    for words in (["wait.py"], ["-m", "seedance.run", "wait.py"]):
        process = subprocess.Popen(
            [runs.python, *words],
            cwd=runs.folder,
            env=runs.environ({}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts the tests in the background has them ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(1)  # until it sleeps
        process.send_signal(signal.SIGINT)
        ends.append((*process.communicate(timeout=60), process.returncode))
    assert ends[0] == ends[1]
    assert ends[0][2] == -signal.SIGINT


def test_children_of_a_script(runs: Runs) -> None:
    """Processes that multiprocessing starts import the script as their `__main__`, and pickles name it."""
    script = """
        import multiprocessing, pickle, sys
        class Sample:
            pass
        def work(n):
            return n * 2, Sample.__module__, sys.argv
        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Sample())).__class__)
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(work, [1, 2]))
    """
    runs.write("children.py", script)
    assert "spawn [(2, '__mp_main__'" in runs.same("children.py", "x")
    runs.write("package/__init__.py", "")
    runs.write("package/children.py", script)
    runs.same("-m", "package.children", "x")


def test_options_are_settings(runs: Runs) -> None:
    runs.write("show.py", "import os; print({k: v for k, v in os.environ.items() if k.startswith('SEEDANCE_')})")
    done = runs(
        "-m", "seedance.run", "--drop", "s3://b/c", "--job=j 1", "--usd-per-hour", "2.5", "--tp", "2", "show.py"
    )
    assert json.loads(done.stdout.replace("'", '"')) == {
        "SEEDANCE_SPOOL": str(runs.spool),
        "SEEDANCE_DROP": "s3://b/c",
        "SEEDANCE_JOB_ID": "j 1",
        "SEEDANCE_USD_PER_HOUR": "2.5",
        "SEEDANCE_TP": "2",
        "SEEDANCE_DIAGNOSTIC": "1",
    }
    for words in (["--nonsense", "1", "show.py"], [], ["-m"], ["--drop"], ["--drop", "x"], ["-x", "show.py"]):
        done = runs("-m", "seedance.run", *words, status=2)
        assert "usage: python -m seedance.run" in done.stderr
        assert done.stdout == ""
    assert runs("-m", "seedance.run", "--help").stdout.startswith("usage: python -m seedance.run")


QUIET = """
    import sys
    print(sorted(m for m in sys.modules if m.split(".")[0] in ("seedance", "torch", "pyarrow", "logging")))
    print([type(f).__module__ for f in sys.meta_path])
"""


def test_a_script_that_never_imports_torch_pays_nothing(runs: Runs) -> None:
    runs.write("quiet.py", QUIET)
    assert runs("quiet.py").stdout.splitlines()[0] == "[]"
    found = runs("quiet.py", SEEDANCE_DIAGNOSTIC="1").stdout.splitlines()
    assert found[0] == "['seedance', 'seedance.auto']"
    assert found[1].count("seedance.auto") == 1
    assert runs("quiet.py", SEEDANCE_DIAGNOSTIC="0").stdout.splitlines()[0] == "[]"
    assert not runs.spool.exists()
    begin = time.perf_counter()
    runs("-c", "", SEEDANCE_DIAGNOSTIC="1")
    assert time.perf_counter() - begin < 5
