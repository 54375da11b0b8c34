"""Probing without a line of code: `python -m seedance.run` and `SEEDANCE_DIAGNOSTIC=1`, in real programs from the built wheel."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.programs import Runs, environment


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("env"))


@pytest.fixture
def runs(python: Path, tmp_path: Path) -> Runs:
    """Programs of which no unit is sampled: which are is decided by the job's name, new each time, and a sampled unit that is
    the last one keeps torch's hooks until the end, where these programs look for what the search for models leaves.
    """
    made = Runs(python, tmp_path)
    made.always["SEEDANCE_MAX_SAMPLE_PPM"] = "0"
    return made


TRAIN = """
    import sys
    import torch
    from torch import nn
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    steps = int(sys.argv[1])
    for _ in range(steps):
        words = torch.randint(0, 16, (4, 8))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), words[:, 0]).backward()
        optimizer.step()
    print(sum(p.double().sum() for p in model.parameters()).item())
"""
DONE = """
    hooks = torch.nn.modules.module
    left = [n for n in vars(hooks) if n.startswith("_global_") and n.endswith("hooks") and len(vars(hooks)[n])]
    print(left, nn.Module._compiled_call_impl, [type(f).__module__ for f in sys.meta_path].count("seedance.auto"))
"""


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_no_generator_is_drawn_from(runs: Runs, backend: str | None) -> None:
    """Neither Python's nor torch's, whatever is sampled and counted."""
    script = """
        import random
        import sys
        import torch
        from torch import nn
        random.seed(7)
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 4))
        if len(sys.argv) > 1:
            model.compile(backend=sys.argv[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            model(torch.randn(random.randint(2, 4), 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(random.random(), torch.rand(1).item())
    """
    runs.write("draws.py", script)
    words = ["draws.py", *([backend] if backend else [])]
    bare = runs(*words)
    assert bare.stdout.count("\n") == 8
    for rate in ("0", "1000000"):
        done = runs("-m", "seedance.run", *words, SEEDANCE_MAX_SAMPLE_PPM=rate)
        assert done.stdout == bare.stdout
    steps = runs.of("step_windows")
    assert sum(row["units"] for row in steps) == 2 * 7
    # Those that count what a shape does are not sampled, and of compiled code none is.
    assert sum(row["sampled_units"] for row in steps) == (0 if backend else 7 - 2)


def test_training_is_found_and_stays_the_same(runs: Runs) -> None:
    runs.write("train.py", TRAIN + DONE)
    bare = runs("train.py", "12")
    for words, variables in (
        (["-m", "seedance.run", "train.py", "12"], {}),
        (["-m", "seedance.run", "-m", "train", "12"], {}),
        (["train.py", "12"], {"SEEDANCE_DIAGNOSTIC": "1"}),
        (["-m", "seedance.run", "train.py", "12"], {"SEEDANCE_DIAGNOSTIC": "1"}),
    ):
        runs.spool = runs.folder.parent / f"spool-{len(list(runs.folder.parent.iterdir()))}"
        done = runs(*words, **variables)
        assert done.stdout == bare.stdout
        assert done.stderr == bare.stderr == ""
        steps = runs.of("step_windows")
        assert {row["phase"] for row in steps} == {"train"}
        # The first unit is what the model was found by.
        assert sum(row["units"] for row in steps) == 11
        assert sum(row["dropped_units"] for row in steps) == 1
        assert sum(row["tokens_in"] for row in steps) == 11 * 4 * 8
        assert {row["layer"] for row in runs.of("op_windows")} >= {"0", "2", "(optimizer)"}
        jobs = runs.of("jobs")
        assert {row["statement"] for row in jobs} == {"started", "ended"}
        assert {(row["kind"], row["name"], row["model"]) for row in jobs} == {("train", "train", "Sequential")}
        assert {row["exit_reason"] for row in jobs if row["statement"] == "ended"} == {"finished"}


def test_options_reach_the_rows(runs: Runs) -> None:
    runs.write("train.py", TRAIN)
    runs("-m", "seedance.run", "--job", "night-7", "--team", "vision", "train.py", "3")
    assert {(row["job_id"], row["team"]) for row in runs.of("jobs")} == {("night-7", "vision")}
    assert {row["job_id"] for row in runs.of("step_windows")} == {"night-7"}


def test_a_program_that_fails_in_training_shows_its_own_traceback(runs: Runs) -> None:
    script = TRAIN + "    class Fails(nn.Module):\n        def forward(self, x):\n            raise ValueError(x)\n"
    runs.write("train.py", script + "    model.append(Fails())\n    model(words)\n")
    bare = runs("train.py", "6", status=1)
    ours = runs("-m", "seedance.run", "train.py", "6", status=1)
    assert ours.stdout == bare.stdout
    # Torch comes to a model that is probed by another of its own lines.
    torchs = re.compile(r'  File ".*/torch/.*\n(    .*\n)+')
    assert torchs.sub("", ours.stderr) == torchs.sub("", bare.stderr)
    assert "seedance" not in ours.stderr
    assert {row["exit_reason"] for row in runs.of("jobs") if row["statement"] == "ended"} == {"error: ValueError"}


def test_several_models_and_optimizers(runs: Runs) -> None:
    """A generator and a critic, each with its optimizer, and an average of the generator that nobody trains."""
    script = """
        import copy
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Generator(nn.Sequential): pass
        class Critic(nn.Sequential): pass
        generator = Generator(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        critic = Critic(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        average = copy.deepcopy(generator).requires_grad_(False)
        optimizers = [torch.optim.Adam(m.parameters()) for m in (critic, generator)]
        for _ in range(8):
            noise, real = torch.randn(6, 4), torch.randn(6, 8)
            optimizers[0].zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (-critic(generator(noise)).mean()).backward()
            optimizers[1].step()
            average(noise)
        print(sum(p.double().sum() for m in (generator, critic) for p in m.parameters()).item())
    """
    runs.write("gan.py", script)
    runs.same("gan.py")
    steps = runs.of("step_windows")
    assert sum(row["units"] for row in steps if row["phase"] == "train") > 0
    layers = {row["layer"].split(".")[0] for row in runs.of("op_windows")}
    assert {"Generator", "Critic"} <= layers
    assert len({(row["job_id"], row["window_start_utc"], row["phase"], row["batch_size"]) for row in steps}) == len(
        steps
    )


def test_a_program_that_only_infers(runs: Runs) -> None:
    script = """
        import torch
        from torch import nn
        model = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(64, 16)).eval()
        with torch.inference_mode():
            for _ in range(60):
                out = model(torch.arange(32).reshape(4, 8) % 16)
        print(out.shape)
    """
    runs.write("serve.py", script)
    runs.same("serve.py")
    steps = runs.of("step_windows")
    assert {row["phase"] for row in steps} == {"eval"}
    assert sum(row["units"] for row in steps) == 60 - 19
    assert {row["kind"] for row in runs.of("jobs")} == {"serve"}


def test_inference_before_another_model_is_trained(runs: Runs) -> None:
    """A frozen encoder runs first, long enough to pass for serving; what is trained then has the word."""
    script = """
        import torch
        from torch import nn
        encoder = nn.Sequential(nn.Linear(8, 8))
        with torch.no_grad():
            data = [encoder(torch.ones(4, 8)) for _ in range(40)]
        class Student(nn.Sequential): pass
        model = Student(nn.Linear(8, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in data:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    """
    runs.write("student.py", script)
    runs.same("student.py")
    train = [row for row in runs.of("step_windows") if row["phase"] == "train"]
    assert sum(row["units"] for row in train) >= 36
    assert {row["model"] for row in runs.of("jobs")} == {"Sequential", "Student"}
    assert "train" in {row["kind"] for row in runs.of("jobs") if row["model"] == "Student"}


def test_models_that_are_trained_one_after_another(runs: Runs) -> None:
    """Folds of a cross-validation; then a picture is trained, which is no model, and takes nothing from what is."""
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        def train(model, steps):
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            print(sum(p.double().sum() for p in model.parameters()).item())
        for _ in range(3):
            train(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), 24)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        train(model, 6)
        picture = nn.Parameter(torch.randn(4, 8))
        optimizer = torch.optim.SGD([picture], 0.1)
        for _ in range(20):
            optimizer.zero_grad()
            model(picture).square().mean().backward()
            optimizer.step()
        print(picture.double().sum().item())
    """
    runs.write("folds.py", script)
    runs.same("folds.py")
    train = [row for row in runs.of("step_windows") if row["phase"] == "train"]
    # The first is known at its first step; later ones are looked for when an optimizer steps that nobody knows.
    assert sum(row["dropped_units"] for row in train) >= 1 + 3 * 2
    assert sum(row["samples"] for row in train if row["units"]) >= 4 * (3 * 24 + 6 - 7)
    layers = {row["layer"] for row in runs.of("op_windows") if row["flops"]}
    assert layers == {"0", "1", "2"}


def test_a_program_that_attaches_by_itself_is_not_probed_twice(runs: Runs) -> None:
    script = TRAIN.replace(
        "    optimizer =", "    import seedance\n    probe = seedance.attach(model, team='own')\n    optimizer ="
    )
    script += "    probe.detach()\n    from seedance.probe.probe import active\n    print(active())\n"
    runs.write("train.py", script + DONE)
    done = runs("-m", "seedance.run", "--team", "cluster", "train.py", "12")
    assert done.stdout.endswith("None\n[] None 0\n")
    steps = runs.of("step_windows")
    assert sum(row["units"] for row in steps) == 12
    assert {row["team"] for row in runs.of("jobs")} == {"own"}


def test_switched_off_it_is_not_there(runs: Runs) -> None:
    runs.write("train.py", TRAIN)
    runs("-m", "seedance.run", "train.py", "3", SEEDANCE_ENABLED="0")
    assert not runs.spool.exists()


def test_workers_of_a_loader_are_no_jobs(runs: Runs) -> None:
    """They call modules too, to transform data; fork and spawn."""
    script = """
        import sys
        import torch
        from torch import nn
        scale = nn.Linear(8, 8)
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 120
            def __getitem__(self, at):
                with torch.no_grad():
                    return scale(torch.full((8,), float(at)))
        if __name__ == "__main__":
            torch.manual_seed(0)
            torch.set_num_threads(1)
            model = nn.Linear(8, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
            loader = torch.utils.data.DataLoader(Data(), 4, num_workers=1, multiprocessing_context=sys.argv[1])
            for x in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            print(model.bias.item() < 1)
    """
    runs.write("train.py", script)
    for method in ("fork", "spawn"):
        runs.same("train.py", method, SEEDANCE_JOB_ID=method)
        jobs = [row for row in runs.of("jobs") if row["job_id"] == method]
        assert [row["statement"] for row in jobs] == ["started", "ended"]
        train = [row for row in runs.of("step_windows") if row["job_id"] == method]
        assert sum(row["units"] for row in train) == 29


def test_our_own_failure_is_told_and_changes_nothing(runs: Runs) -> None:
    runs.write("train.py", TRAIN)
    bare = runs("train.py", "6")
    # A torch that lacks what the probe asks for.
    script = "import torch\ndel torch.nn.Module._compiled_call_impl\n"
    runs.write("odd.py", script + "print('fine')\n")
    odd = runs("-m", "seedance.run", "odd.py")
    assert odd.stdout == "fine\n"
    # A spool that cannot be made.
    done = runs("-m", "seedance.run", "train.py", "6", SEEDANCE_SPOOL="/dev/null/spool")
    assert done.stdout == bare.stdout
    assert "seedance: spool /dev/null/spool:" in done.stderr
    assert done.stderr.count("\n") == 1


# Barrier and pause: gloo's threads drop the last gradients late, and torch 2.13 aborts when one does so while Python ends;
# without a probe too.
RANKS = """
    import os
    import sys
    import time
    import torch
    import torch.distributed as dist
    from torch import nn
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    total = sum(p.double().sum() for p in model.parameters()).item()
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()
    print(f"{total!r} {sys.argv} {__name__} {'SEEDANCE_DIAGNOSTIC' in os.environ}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("how", ["run", "run -m", "variable"])
def test_torchrun_with_two_ranks(runs: Runs, how: str) -> None:
    runs.write("train.py", RANKS)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words = {
        "run": ["-m", "seedance.run", "train.py"],
        "run -m": ["-m", "seedance.run", "-m", "train"],
        "variable": ["train.py"],
    }[how]
    bare = runs(*torchrun, "train.py", "x")
    variables = {"SEEDANCE_MAX_SAMPLE_PPM": "1000000", **({"SEEDANCE_DIAGNOSTIC": "1"} if how == "variable" else {})}
    done = runs(*torchrun, *words, "x", **variables)
    sums = [{line.split()[0] for line in one.stdout.splitlines()} for one in (bare, done)]
    assert len(sums[0]) == 1
    assert sums[1] == sums[0]
    steps = runs.of("step_windows")
    assert {row["rank"] for row in steps} == {0, 1}
    assert len({(row["job_id"], row["attempt"]) for row in steps}) == 1
    assert all(sum(row["units"] for row in steps if row["rank"] == rank) == 7 for rank in (0, 1))
    assert "(grad_sync)" in {row["layer"] for row in runs.of("op_windows")}
    jobs = runs.of("jobs")
    assert {row["world_size"] for row in jobs} == {2}
    assert sorted((row["rank"], row["statement"]) for row in jobs) == [
        (rank, said) for rank in (0, 1) for said in ("ended", "started")
    ]


def test_ranks_that_torch_spawns(runs: Runs) -> None:
    """No launcher tells them their rank: the process group does."""
    script = """
        import os
        import time
        import torch
        import torch.distributed as dist
        from torch import nn
        def work(rank, port):
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
            model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).square().sum().backward()
                optimizer.step()
            dist.barrier()
            time.sleep(0.2)
            dist.destroy_process_group()
        if __name__ == "__main__":
            import socket
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            torch.multiprocessing.spawn(work, (port,), nprocs=2)
    """
    runs.write("spawn.py", script)
    runs("-m", "seedance.run", "spawn.py")
    steps = runs.of("step_windows")
    assert {row["rank"] for row in steps} == {0, 1}
    assert len({row["job_id"] for row in steps}) == 1
    assert all(sum(row["units"] for row in steps if row["rank"] == rank) == 5 for rank in (0, 1))


def test_the_line_of_a_running_job_is_seen(runs: Runs) -> None:
    """Where the program set up no logging; else its own set-up decides."""
    script = TRAIN.replace("    steps =", "    import time\n    steps =").replace(
        "        optimizer.step()", "        optimizer.step()\n        time.sleep(0.05)"
    )
    runs.write("train.py", script)
    often = {
        "SEEDANCE_STEP_WINDOW_NS": str(10**8),
        "SEEDANCE_OP_WINDOW_NS": str(10**9),
        "SEEDANCE_LOG_INTERVAL_NS": str(10**8),
        "SEEDANCE_USD_PER_HOUR": "3600000",
    }
    said = runs("-m", "seedance.run", "train.py", "20", **often).stderr.splitlines()
    assert len(said) > 3
    for line in said[1:]:  # the time before the first unit that was seen is nobody's
        assert line.startswith("seedance: ")
        assert " tokens/s/rank, " in line
        assert "MFU" not in line
        # A second costs 1,000 USD, a step of 50 ms at least 50.
        assert float(line.split(" USD/step")[0].split()[-1]) >= 50
    runs.write("logged.py", "import logging\nlogging.basicConfig(level=logging.WARNING)\n" + textwrap.dedent(script))
    assert runs("-m", "seedance.run", "logged.py", "20", **often).stderr == ""
