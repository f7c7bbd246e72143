"""Every check of the project, each in an environment of its own: `nox -l` lists them.

`SHARDKIT_TORCH` chooses the build of torch, for example `SHARDKIT_TORCH="torch==2.11.0"`. With
`--no-venv` a session runs in the environment that nox runs in, and installs nothing.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nox

if TYPE_CHECKING:
    from collections.abc import Sequence

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # unlike venv it needs no ensurepip
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

# Versions of torch; README names both ends. Those above 2.13 have no small build for CPUs here.
VERSIONS = ("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
# torch_xla loads with the torch it was built for only. That is the lower bound in pyproject.toml.
XLA = (f"torch=={VERSIONS[0]}", f"torch_xla=={VERSIONS[0]}")
# Of other packages: what shardkit.integrations._versions names, each without its last number.
FRAMEWORKS = {
    "accelerate": ("1.12", "1.13", "1.14", "1.15"),
    "transformers": ("5.20", "5.21", "5.22", "5.23", "5.24"),
    "lightning": ("2.3", "2.4", "2.5", "2.6"),
}
# That shard by FSDP2 themselves: what is installed for each. torchtitan's CPU ranks ask for triton.
CLIENTS = (
    ("torchtitan==0.3.0", "triton==3.9.0"),
    ("torchtune==0.6.1", "torchao==0.13.0"),  # newer ones of torchao lack what it imports
    ("accelerate==1.15.0", "transformers==5.24.0"),
    (
        "trl==1.16.0",
        "transformers==5.24.0",
        "accelerate==1.15.0",
        "peft==0.21.2",
        "datasets==5.2.0",
        "pyarrow==26.0.1",  # dill cannot pickle what pyarrow 21 has, so datasets makes no data set
    ),
)
TORCH = os.environ.get("SHARDKIT_TORCH", "torch==2.13.0")
NEED_NOTHING = (  # no more than torch
    "not gpu and not models and not frameworks and not clients and not xla and not parting "
    "and not hosts and not eight_ranks and not late and not page"
)

# Ranks that wait for each other leave a core idle, and so do tests of one process. The tests of a
# file stay together: they share what takes long to make.
IN_PARALLEL = ("-n", "2", "--dist", "loadfile")

# What ranks find imported in `models` and `frameworks`: seconds for each of them. None starts a
# thread, which the process that ranks are forked from must not have.
PRELOADED = "transformers.modeling_utils peft torchao bitsandbytes accelerate lightning"
BESIDE_PACKAGES = {"HF_HUB_OFFLINE": "1", "SHARDKIT_TEST_PRELOAD": PRELOADED}

# Tests of CPU ranks that also run on the simulated accelerator.
SIMULATED = [
    f"tests/distributed/test_{name}.py"
    for name in (
        "parity",
        "mixed_precision",
        "grad_dtype",
        "batch_normalization",
        "settings",
        "lists_and_roots",
        "autograd_cases",
        "unused_parameters",
        "synchronized_gradients",
        "changes_between_steps",
        "recomputed_segments",
        "containers",
        "amp",
        "interruptions",
        "compile",
        "auto_shard",
    )
]

# Small models have small groups. These tests also treat them as groups of 1 MiB and more.
AS_LARGE = [
    f"tests/distributed/test_{name}.py"
    for name in (
        "parity",
        "mixed_precision",
        "settings",
        "autograd_cases",
        "unused_parameters",
        "synchronized_gradients",
        "interruptions",
        "parameter_hooks",
        "lists_and_roots",
    )
]

# What runs on every version of torch: the smallest part in which each module takes part.
ON_EVERY_TORCH = [
    "tests/unit",
    "tests/property",
    *(
        f"tests/distributed/test_{name}.py"
        for name in (
            "parity",
            "mixed_precision",
            "batch_normalization",
            "autograd_cases",
            "compile",
        )
    ),
]

# What is left out of that: tests of code that does not use torch, and mutations that test a test.
# The sessions `tests` and `helpers` run them once, and another version of torch changes nothing.
WITHOUT_TORCH = [
    *(
        f"--ignore=tests/unit/{name}"
        for name in (
            "schedule",
            "backends/watch/test_diagnosis.py",
            "backends/watch/test_sequence.py",
            "config/test_config_fields.py",
            "doctor/test_findings.py",
            "planning/test_replay.py",
            "test_architecture.py",
            "test_docstrings.py",
            "test_litter.py",
            "test_mesh.py",
            "test_names.py",
            "test_profiles.py",
            "test_tried_versions.py",
            "tracing/test_exposed.py",
            "tracing/test_late.py",
            "tracing/test_records.py",
        )
    ),
    "--deselect=tests/property/test_checkpoint_directories.py::test_mutations_are_found",
]

# What `examples` runs: a number of ranks, a script of examples/, its options.
EXAMPLES = [
    (2, "digits"),
    (2, "resnet"),
    (2, "vit"),
    (4, "hybrid"),
    (4, "tensor_parallel"),
    (4, "experts"),
    (4, "pipeline"),
    (4, "pipeline", "--schedule", "zbv"),
    (2, "distill"),
    (2, "lora"),
    (2, "muon"),
]


def use_outer_environment(session: nox.Session) -> bool:
    """Say whether `session` runs without an environment of its own; if so, find nox's programs."""
    if session.venv_backend != "none":
        return False
    session.env["PYTHONPATH"] = "src"
    here = str(Path(sys.executable).parent)
    if here not in os.environ["PATH"].split(os.pathsep):  # nox was called by its path
        os.environ["PATH"] = session.env["PATH"] = here + os.pathsep + os.environ["PATH"]
    return True


def install(session: nox.Session, *extras: str, torch: str = TORCH) -> None:
    """Install torch, then the package with `extras`, into the environment of `session`.

    Torch comes first and by an exact version: left to the package's range, pip takes the newest
    build for CUDA, which is several gigabytes, also on a machine without a GPU.
    """
    if use_outer_environment(session):
        return
    session.log(f"installing {torch} and the package; the first time this takes minutes")
    session.install(*shlex.split(torch))
    session.install("--editable", f".[{','.join(extras)}]")


def run_tests(session: nox.Session, marks: str, paths: Sequence[str] = (), **options: Any) -> None:
    """Run the tests of these marks in parallel; what is asked after `--` in one process.

    Args:
        session: Session that runs them.
        marks: Expression over markers.
        paths: Files and folders where they are; none are all.
        options: Options of `session.run`.
    """
    wanted = session.posargs or (*IN_PARALLEL, *paths)
    session.run("pytest", "-m", marks, *wanted, **options)


def files_with(*words: str) -> list[str]:
    """Return the files of tests in which one of these words stands; the others need no import."""
    files = sorted(Path("tests").rglob("test_*.py"))
    return [str(file) for file in files if any(word in file.read_text() for word in words)]


def run_as(session: nox.Session, option: str, files: Sequence[str]) -> None:
    """Run tests that were written for CPU ranks in another way, for which pytest has an option."""
    wanted = (*files, *(session.posargs or IN_PARALLEL))
    session.run("pytest", option, "-m", NEED_NOTHING, *wanted)


def fresh_examples() -> tuple[str, ...]:
    """Return options of pytest by which property tests draw examples that were never tried."""
    seed = secrets.randbelow(2**32)
    return ("--hypothesis-profile", "fresh", "--hypothesis-seed", str(seed))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and which module imports which."""
    if not use_outer_environment(session):
        session.install(*nox.project.load_toml()["project"]["optional-dependencies"]["lint"])
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", env={"PYTHONPATH": "src"})


@nox.session
def types(session: nox.Session) -> None:
    """Check types: mypy, strict."""
    install(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages of docs/ into site/; a warning is an error. No source is imported.

    ``SHARDKIT_REPOSITORY`` is the address of the repository, which pages link to where it is set.
    """
    if not use_outer_environment(session):
        session.install(*nox.project.load_toml()["project"]["optional-dependencies"]["docs"])
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that need no GPU; arguments after `--` go to pytest."""
    install(session, "test")
    run_tests(session, f"{NEED_NOTHING} and not streams and not helpers")


@nox.session
def helpers(session: nox.Session) -> None:
    """Test what is built over `fully_shard`: wrapping, whole parameters, compression, and so on."""
    install(session, "test")
    run_tests(session, f"helpers and {NEED_NOTHING}")


@nox.session
def everything(session: nox.Session) -> None:
    """Run at once what `tests` and `helpers` run, and the scenarios of `streams`, as .ci/run does.

    One run collects once, and starts the ranks of each number once.
    """
    install(session, "test")
    run_tests(session, NEED_NOTHING)


@nox.session
def sequences(session: nox.Session) -> None:
    """Try what users do to a sharded model and to a plain one in sequences that are new each time.

    It takes about 20 minutes. `SHARDKIT_TEST_SEQUENCES` chooses how many there are for each mesh.
    """
    install(session, "test")
    session.env.setdefault(
        "SHARDKIT_TEST_SEQUENCES", os.environ.get("SHARDKIT_TEST_SEQUENCES", "60")
    )
    session.run("pytest", *fresh_examples(), "tests/machine", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Try junk for ten minutes: files, configs, command lines, arguments; jobs that are killed."""
    install(session, "test")
    stop = time.monotonic() + 60 * float(os.environ.get("SHARDKIT_FUZZ_MINUTES", "10"))
    jobs = (
        "tests/property/test_checkpoint_directories.py",
        "tests/distributed/test_killed_runs.py",
    )
    many = {"SHARDKIT_TEST_SCHEDULES": "200", "SHARDKIT_FUZZ_EXAMPLES": "100"}
    session.run("pytest", "-q", *fresh_examples(), *jobs, env=many)
    while time.monotonic() < stop:
        session.run("pytest", "-q", *fresh_examples(), "tests/fuzz", *session.posargs, env=many)


@nox.session
@nox.parametrize("torch", [nox.param(v, id=v) for v in VERSIONS])
def versions(session: nox.Session, torch: str) -> None:
    """Run unit, property and parity tests of what uses torch on every version that is supported."""
    install(session, "test", torch=f"torch=={torch}")
    run_tests(session, f"{NEED_NOTHING} and not streams", (*ON_EVERY_TORCH, *WITHOUT_TORCH))


@nox.session
def streams(session: nox.Session) -> None:
    """Run the accelerator's path on a simulated device: streams, events, memory, without a card."""
    install(session, "test")
    run_tests(session, "streams")
    run_as(session, "--simulated", SIMULATED)


@nox.session
def simulated(session: nox.Session) -> None:
    """Run the second half of `streams`: cases of CPU ranks, on the simulated device."""
    install(session, "test")
    run_as(session, "--simulated", SIMULATED)


@nox.session
def large(session: nox.Session) -> None:
    """Treat the small groups of tests as large ones: CPU ranks read them from each other."""
    install(session, "test")
    run_as(session, "--large", AS_LARGE)


@nox.session
def watch(session: nox.Session) -> None:
    """Let ranks part in every way, on 2, 4 and 2x2 ranks: all are told who and where."""
    install(session, "test")
    session.run("pytest", "-m", "parting", *session.posargs)


@nox.session
def hosts(session: nox.Session) -> None:
    """Train on two hosts, which are namespaces of this one, under SLURM and under Ray.

    Needs root. What is not allowed or not installed here is skipped by name.
    """
    install(session, "test")
    if session.venv_backend != "none":
        session.install("ray[train]==2.60.0")
    session.run("pytest", "-m", "hosts", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Train models of the transformers package, made here with random weights, sharded.

    Quantized weights and optimizers of torchao and bitsandbytes are tried here as well, and the
    blocks of docs/ that need these packages.
    """
    install(session, "models")
    folders = ("tests/real_models", "tests/packages", "tests/docs")
    run_tests(session, "models and not eight_ranks", folders, env=BESIDE_PACKAGES)


@nox.session
def eight_ranks(session: nox.Session) -> None:
    """Mixtures of experts of the transformers package, and plans, on eight ranks."""
    install(session, "models")
    session.env["HF_HUB_OFFLINE"] = "1"
    folders = ("tests/real_models", "tests/distributed/test_planned_runs.py")
    session.run("pytest", "-m", "eight_ranks", *folders, *session.posargs)


@nox.session
def page(session: nox.Session) -> None:
    """Open the page of `shardkit trace` in Chromium, where one is found, as wide as two screens."""
    install(session, "test")
    session.run("pytest", "-m", "page", "tests/unit/tracing", *session.posargs)


@nox.session
def late(session: nox.Session) -> None:
    """Delay real ranks by 3 % of a step in each way; the machine must be idle."""
    install(session, "test")
    session.run("pytest", "-m", "late", "tests/distributed", *session.posargs)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Test shardkit beside packages that train models, such as Accelerate, of pinned versions."""
    install(session, "frameworks")
    run_tests(session, "frameworks", ("tests/frameworks", "tests/docs"), env=BESIDE_PACKAGES)


@nox.session
def models_and_frameworks(session: nox.Session) -> None:
    """Run at once what `models` and `frameworks` run, as .ci/run does."""
    install(session, "models", "frameworks")
    folders = ("tests/real_models", "tests/packages", "tests/frameworks", "tests/docs")
    marks = "(models or frameworks) and not eight_ranks"
    run_tests(session, marks, folders, env=BESIDE_PACKAGES)


@nox.session
@nox.parametrize(
    ("package", "version"), [(name, each) for name, found in FRAMEWORKS.items() for each in found]
)
def framework_versions(session: nox.Session, package: str, version: str) -> None:
    """Test shardkit beside each version of such a package that it accepts without a warning.

    `nox -s "framework_versions(package='accelerate', version='1.13')"` tests one.
    """
    install(session, "frameworks")
    if session.venv_backend != "none":
        # Lightning 2.3 asks for pkg_resources.
        session.install(f"{package}=={version}.*", "setuptools<81")
    session.env["HF_HUB_OFFLINE"] = "1"
    wanted = {"accelerate": "accelerate or trainer", "transformers": "accelerate or transformers"}
    names = ("-k", wanted.get(package, package))
    session.run("pytest", "-m", "frameworks", "tests/frameworks", *names, *session.posargs)


@nox.session
@nox.parametrize("packages", [nox.param(each, id=each[0].split("=")[0]) for each in CLIENTS])
def clients(session: nox.Session, packages: tuple[str, ...]) -> None:
    """Run packages that shard by FSDP2 themselves with shardkit in its place; print a table.

    Each has an environment of its own, for they ask for other versions of the same packages.
    """
    install(session, "test")
    if session.venv_backend != "none":
        session.install(*packages)
    session.env["HF_HUB_OFFLINE"] = "1"
    name = packages[0].split("=")[0]
    files = sorted(map(str, Path("tests/clients").glob(f"test_{name}*.py")))
    session.run("pytest", "-m", "clients", *files, *session.posargs)


@nox.session(python="3.11")
def xla(session: nox.Session) -> None:
    """Run the tests that need torch_xla, and examples, on virtual devices; then as `versions`.

    Its torch is the oldest one supported. Where ``CI`` is set property tests draw fresh examples:
    the session `tests` has tried the fixed ones.
    """
    if not use_outer_environment(session):
        session.install(*XLA)
        session.install("--editable", ".[test,demo]", "scikit-learn")
    # In processes of their own, for torch_xla replaces functions of torch where it is imported.
    # Arguments may select tests of one kind only: then the other run finds none, which is 5.
    codes = [0, 5] if session.posargs else [0]
    marked = files_with("mark.xla", "XLA_MARKS", "on_meshes(")
    run_tests(session, "xla", ("tests/xla", *marked), success_codes=codes)
    on_xla = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    folder = tempfile.mkdtemp(dir=session.create_tmp())
    session.run("python", "examples/digits.py", "--device", "xla", "--folder", folder, env=on_xla)
    session.run("python", "examples/resnet.py", "--device", "xla", env=on_xla)
    session.run("python", "examples/train_gpt.py", "--device", "xla", "--steps", "20", env=on_xla)
    fresh = fresh_examples() if os.environ.get("CI") else ()
    wanted = (*ON_EVERY_TORCH, *WITHOUT_TORCH, *fresh)
    run_tests(session, f"{NEED_NOTHING} and not streams", wanted, success_codes=codes)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests that need GPUs, in the environment nox runs in: its torch suits the driver."""
    install(session, "test")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT on two ranks, or on every GPU by `-- --device cuda`."""
    install(session, "demo")
    session.run(
        *("torchrun", "--standalone", "--nproc-per-node"),
        "gpu" if "cuda" in session.posargs else "2",
        "examples/train_gpt.py",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session
def resume(session: nox.Session) -> None:
    """Let a rank of a small training run die, and torchrun and the last checkpoint go on."""
    install(session, "demo")
    session.run(
        *("torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("examples/resume.py", "--crash-at", "25"),
        *("--folder", tempfile.mkdtemp(dir=session.create_tmp())),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session
def examples(session: nox.Session) -> None:
    """Run the examples on CPU ranks; each fails if its figure is missed. `-- lora` runs one."""
    install(session, "models")
    if session.venv_backend != "none":
        session.install("scikit-learn")
    folder = Path(tempfile.mkdtemp(dir=session.create_tmp()))
    for ranks, name, *options in EXAMPLES:
        if session.posargs and name not in session.posargs:
            continue
        script = Path("examples", f"{name}.py")
        if "--folder" in script.read_text():
            options += ["--folder", str(folder / name)]
        session.run(
            *("torchrun", "--standalone", "--nproc-per-node", str(ranks), str(script), *options),
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )


@nox.session
def bench(session: nox.Session) -> None:
    """Measure time and memory against torch; arguments after `--` go to benchmarks/run.py.

    If the first one is `gpu` or a case of it, the environment nox runs in is used, as by the
    session `gpu`, whatever the options: its torch suits the driver.
    """
    if session.posargs and session.posargs[0].startswith("gpu"):
        if find_spec("torch") is None:
            session.skip(f"{sys.executable} has no torch: install nox where the torch for GPUs is")
        outer = (sys.executable, "benchmarks/run.py", *session.posargs)
        session.run(*outer, external=True, env={"PYTHONPATH": "src"})
        return
    install(session, "test")
    session.run("pytest", "-q", "-o", "pythonpath=benchmarks", "benchmarks")
    session.run("python", "benchmarks/run.py", *session.posargs)
