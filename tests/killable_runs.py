"""A process that forks training runs and kills them: a fork takes no time, importing torch does.

Run as a script it reads calls, one JSON list ``[function, *arguments]`` per line, and answers each
with a line of JSON. It never computes anything itself, so that its children may.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import pathlib
import random
import signal
import sys
import threading
import time
import traceback
import typing
import warnings

import torch
import torch.distributed as dist
from torch import nn

from shardkit import checkpoint, from_config, fully_shard
from shardkit.checkpoint._dcp import directory

if typing.TYPE_CHECKING:
    from collections.abc import Callable

STEPS_PER_SAVE = 3


def fork(run: Callable[[], object]) -> int:
    """Run a function in a child; return its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(2, 1)
        torch.set_num_threads(1)
        run()
    except BaseException:  # noqa: BLE001 - the child ends here, whatever it is
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def join(pids: list[int]) -> list[int]:
    """Wait for children; return their exit codes, negative ones for signals."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


# --- a run that goes on where it was ------------------------------------------------------------


def train(folder: str, attempt: int, rank: int, world_size: int, steps: int) -> None:
    """Train from the latest checkpoint to the end; note the loss of every step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if world_size > 1:
        store = dist.FileStore(f"{folder}/store-{attempt}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33))
    if world_size > 1:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    saved = pathlib.Path(folder, "checkpoints")
    step = 0
    if (latest := checkpoint.latest(saved)) is not None:
        step = checkpoint.load(latest, model, optimizer, scheduler=scheduler)["step"]
    with pathlib.Path(folder, f"losses-{rank}").open("a") as log:
        while step < steps:
            generator = torch.Generator().manual_seed(step * world_size + rank)
            x = torch.randn(8, 33, generator=generator)
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            log.write(f"{step} {loss.item().hex()}\n")
            log.flush()
            if step % STEPS_PER_SAVE == 0:
                in_turns = (step // STEPS_PER_SAVE) % 2
                save = checkpoint.save if in_turns else checkpoint.async_save
                extra = {"scheduler": scheduler, "step": step}
                save(saved / f"step-{step}", model, optimizer, keep_last=2, **extra)
    checkpoint.save(saved / "end", model, optimizer, scheduler=scheduler, step=step)
    dist.destroy_process_group() if world_size > 1 else None


def killed_training(
    folder: str, world_size: int, steps: int, kills: int, seed: int
) -> dict[str, int]:
    """Train to the end, killing all ranks at random moments, and starting again each time.

    Returns:
        How often it was killed, how often while something was being written, and from how many
        different steps it went on.
    """
    rng = random.Random(seed)
    pathlib.Path(folder).mkdir()
    saved = pathlib.Path(folder, "checkpoints")
    killed = torn = attempt = 0
    while True:
        attempt += 1
        if attempt > 3 * kills + 3:
            msg = f"killed {killed} times in {attempt} attempts only: train for more steps"
            raise RuntimeError(msg)
        pids = [
            fork(functools.partial(train, folder, attempt, rank, world_size, steps))
            for rank in range(world_size)
        ]
        if killed < kills:
            # By steps, not by the clock: a busy machine would never come to a save.
            wait_for_losses(folder, rng.randint(0, 2 * STEPS_PER_SAVE), pids[0])
            time.sleep(rng.uniform(0, 0.03))
            for pid in rng.sample(pids, len(pids)):
                os.kill(pid, signal.SIGKILL)
                time.sleep(rng.choice([0, 0.002]))
            codes = join(pids)
            killed += any(code == -signal.SIGKILL for code in codes)
            torn += any(saved.glob(".*")) if saved.exists() else False
            if any(code == 0 for code in codes):
                continue
        else:
            codes = join(pids)
            if any(codes):
                msg = f"ranks ended with {codes}"
                raise RuntimeError(msg)
            return {"killed": killed, "torn": torn}


def wait_for_losses(folder: str, count: int, pid: int) -> None:
    """Wait until a child has noted so many losses more, or has ended."""
    log = pathlib.Path(folder, "losses-0")
    begin = log.read_bytes().count(b"\n") if log.exists() else 0
    while not log.exists() or log.read_bytes().count(b"\n") < begin + count:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


# --- a save that is killed at one of its steps --------------------------------------------------

_WATCHING = ("shardkit-answers", "shardkit-asks", "shardkit-clock", "shardkit-ends")
_CALLS = ("open", "pwrite", "write", "fsync", "ftruncate", "mkdir", "rename", "unlink", "rmdir")


def die_at(fatal: int) -> None:
    """Have this process killed before the `fatal`-th call that changes a file.

    Those of the watch's threads do not count: they come when they come.
    """
    calls = 0

    def deadly(name: str) -> Callable[..., typing.Any]:
        real = getattr(os, name)

        def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            nonlocal calls
            if threading.current_thread().name in _WATCHING:
                return real(*args, **kwargs)
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)
            return real(*args, **kwargs)

        return call

    for name in _CALLS:
        setattr(os, name, deadly(name))


def save_and_die(folder: str, fatal: int) -> None:
    """Replace a checkpoint; be killed before the `fatal`-th call that changes something."""
    die_at(fatal)
    checkpoint.save(f"{folder}/x", model_of(2), step=2, overwrite=True, keep_last=1)


def model_of(step: int) -> nn.Module:
    torch.manual_seed(step)
    return nn.Linear(50, 50)


def steps_found(folder: str) -> list[int]:
    """Return the steps of the checkpoint that `latest` finds and of the one named x."""
    found = []
    latest = checkpoint.latest(folder)
    for path in (pathlib.Path(folder, "x"), latest):
        model = nn.Linear(50, 50)
        step = checkpoint.load(path, model)["step"]
        expected = model_of(step)
        assert torch.equal(model.weight, expected.weight)
        assert torch.equal(model.bias, expected.bias)
        found.append(step)
    return found


def save_killed_everywhere(folder: str) -> dict[str, list[typing.Any]]:
    """Kill a replacement at every step; return what was found each time, and left over at last."""
    found, left = [], []
    for fatal in range(1, 200):
        here = pathlib.Path(folder, str(fatal))
        here.mkdir()

        def begin(here: pathlib.Path = here) -> None:
            checkpoint.save(here / "x", model_of(1), step=1)

        def look(here: pathlib.Path = here) -> None:
            pathlib.Path(here, "found.json").write_text(json.dumps(steps_found(str(here))))

        def again(here: pathlib.Path = here) -> None:
            checkpoint.save(here / "x", model_of(1), step=1, overwrite=True, keep_last=1)

        assert join([fork(begin)]) == [0]
        (code,) = join([fork(lambda here=here, fatal=fatal: save_and_die(str(here), fatal))])
        assert code in {0, -signal.SIGKILL}, code
        assert join([fork(look)]) == [0], fatal
        file = here / "found.json"
        found.append(json.loads(file.read_text()))
        file.unlink()
        assert join([fork(again)]) == [0], fatal
        left.append(sorted(entry.name for entry in here.iterdir()))
        if code == 0:
            return {"found": found, "left": left}
    msg = "a save takes more than 200 steps"
    raise RuntimeError(msg)


# --- a config's state dict that is killed on one of two ranks -------------------------------------

_SHAPE = {"use_cpu": True, "distributed_type": "FSDP"}


class ConfiguredRun:
    """One of two ranks with a model that a config sharded: its values are those of a step."""

    def __init__(self, folder: pathlib.Path, kind: str, rank: int, attempt: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(f"{folder}/store-{attempt}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        fields = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "NO_WRAP"}
        fields["fsdp_state_dict_type"] = kind
        self.config = from_config({**_SHAPE, "fsdp_config": fields})
        self.model = self.config.apply(nn.Linear(5, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.folder = folder / "state"
        self.rank = rank

    def save(self, step: int) -> None:
        """Save a state in which all values are the step's."""
        for param in self.model.parameters():
            nn.init.constant_(param, step)
            self.optimizer.state[param]["momentum_buffer"] = torch.full_like(param, step)
        self.config.save(self.folder, self.model, self.optimizer)

    def found(self) -> list[float]:
        """Load, and return which values there are."""
        self.config.load(self.folder, self.model, self.optimizer)
        momenta = [s["momentum_buffer"] for s in self.optimizer.state.values()]
        wholes = [t.full_tensor() for t in (*self.model.parameters(), *momenta)]
        return sorted({value for whole in wholes for value in whole.flatten().tolist()})


def configured_save_killed_everywhere(folder: str, kind: str, victim: int) -> list[list[float]]:
    """Kill one rank at each step of a second save; return which values load each time."""
    found = []
    for fatal in range(1, 100):
        here = pathlib.Path(folder, f"{fatal}")
        here.mkdir()

        def saves(rank: int, here: pathlib.Path = here, fatal: int = fatal) -> None:
            run = ConfiguredRun(here, kind, rank, "saves")
            run.save(1)
            if rank == victim:
                die_at(fatal)
            run.save(2)

        def loads(rank: int, here: pathlib.Path = here) -> None:
            run = ConfiguredRun(here, kind, rank, "loads")
            values = run.found()
            run.save(3)
            assert run.found() == [3]
            if rank == 0:
                (here / "found.json").write_text(json.dumps(values))

        pids = [fork(functools.partial(saves, rank)) for rank in range(2)]
        (code,) = join([pids[victim]])
        if code:
            os.kill(pids[1 - victim], signal.SIGKILL)
        join([pids[1 - victim]])
        assert code in {0, -signal.SIGKILL}, code
        assert join([fork(functools.partial(loads, rank)) for rank in range(2)]) == [0, 0], fatal
        found.append(json.loads((here / "found.json").read_text()))
        if code == 0:
            return found
    msg = "a save takes more than 100 steps"
    raise RuntimeError(msg)


# --- several jobs that save to one path ----------------------------------------------------------


def save_again_and_again(folder: str, job: int, saves: int, has_exchange: bool) -> None:
    """Be one of several jobs that replace a checkpoint; note when each save began and ended."""
    warnings.simplefilter("ignore")  # They say that there are others.
    if not has_exchange:
        lack_exchange()
    with pathlib.Path(folder, "finished").open("a") as log:
        for number in range(saves):
            step, begin = job * 100 + number, time.monotonic()
            checkpoint.save(f"{folder}/all/x", model_of(step), step=step, overwrite=True)
            log.write(f"{step} {begin} {time.monotonic()}\n")
            log.flush()


def lack_exchange() -> None:
    """Behave as on NFS."""

    def refuse(*_: object) -> typing.NoReturn:
        raise OSError(errno.EINVAL, "Invalid argument")

    directory.exchange = refuse


def read_again_and_again(folder: str) -> None:
    """Load the checkpoint that others replace until they have ended."""
    loads = 0
    while not pathlib.Path(folder, "ended").exists():
        if (
            pathlib.Path(folder, "finished").exists()
            and pathlib.Path(folder, "finished").read_text()
        ):
            assert_whole(pathlib.Path(folder, "all/x"))
            loads += 1


def assert_whole(path: pathlib.Path) -> int:
    """Load a checkpoint of `model_of`; return which."""
    model = nn.Linear(50, 50)
    step = checkpoint.load(path, model)["step"]
    expected = model_of(step)
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)
    return step


def jobs_at_one_path(folder: str, seeds: list[int]) -> list[dict[str, typing.Any]]:
    """Let two or three jobs replace one checkpoint, kill some; say what was there at the end."""
    outcomes = []
    for seed in seeds:
        rng = random.Random(seed)
        here = pathlib.Path(folder, str(seed))
        here.mkdir()
        (here / "finished").touch()  # All may be killed before one has finished.
        jobs, has_exchange = rng.randint(2, 3), bool(seed % 2)
        pids = [
            fork(functools.partial(save_again_and_again, str(here), job, 3, has_exchange))
            for job in range(1, jobs + 1)
        ]
        reader = fork(functools.partial(read_again_and_again, str(here)))
        doomed = rng.sample(pids, rng.randint(0, jobs))
        for pid in doomed:
            time.sleep(rng.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
        codes = join(pids)
        (here / "ended").touch()
        (read,) = join([reader])

        def look(here: pathlib.Path = here) -> None:
            latest = checkpoint.latest(here / "all")
            step = None if latest is None else assert_whole(latest)
            (here / "found.json").write_text(json.dumps(step))

        def again(here: pathlib.Path = here) -> None:
            checkpoint.save(here / "all/x", model_of(0), step=0, overwrite=True)

        looked = join([fork(look)])
        found = json.loads((here / "found.json").read_text()) if looked == [0] else "unreadable"
        notes = (here / "finished").read_text().split("\n")[:-1]
        finished = {int(n.split()[0]): tuple(map(float, n.split()[1:])) for n in notes}
        begun_last = max((begin for begin, _ in finished.values()), default=0.0)
        outdated = [step for step, (_, end) in finished.items() if end < begun_last]
        outcomes.append(
            {
                "seed": seed,
                "failed": [code for code in codes if code not in {0, -signal.SIGKILL}],
                "reader": read,
                "found": found,
                "finished": list(finished),
                "outdated": outdated,
                "again": join([fork(again)]),
                "left": sorted(entry.name for entry in (here / "all").iterdir()),
            }
        )
    return outcomes


def main() -> None:
    # The first use of an optimizer's state dict has torch import as much again.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer.load_state_dict(optimizer.state_dict())
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = {"returned": globals()[name](*args)}
        except Exception:  # noqa: BLE001 - the test reports it
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
