"""The package as it is installed: what is in it, and its command, which starts anywhere."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from zenflow import __version__
from zenflow.commit import describe

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zenflow", "sim", "autotune", "experiments")
START = "import sys\nfrom zenflow.console import main\nif __name__ == '__main__':\n    main()\n"
"""What pip writes as the command."""
STEPS = """
import torch
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.host.kernel import active_kernel

model = torch.nn.Linear(256, 256, bias=False)
before = model.weight.detach().clone()
config = ZenFlowConfig(topk_ratio=0.1, update_interval=2)
optimizer = ZenFlowAdamW(model.parameters(), lr=1e-3, config=config)
for _ in range(4):
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
optimizer.eval()
# Of 65,536 weights one may come back to the bits that it had.
assert (model.weight != before).double().mean() > 0.999
optimizer.close()
print(active_kernel())
"""
METADATA = re.compile(r"[^/]+\.egg-info/|(PKG-INFO|setup\.cfg|zenflow/commit\.txt)$")
"""What a source archive has beside files of the repository."""
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
]


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def repository(folder):
    """Make a folder a repository of everything in it, and return its commit."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "all")
    return git(folder, "rev-parse", "--short=12", "HEAD")


def build(source, *command, compiler="false"):
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=source, check=True,
        env={**os.environ, "CC": compiler}, capture_output=True,
    )  # fmt: skip


def contents(wheel):
    """Return the checksum of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a clone of this tree, and its commit."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source") / "clone"
    skipped = shutil.ignore_patterns("results", "__pycache__", "*.so")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    (source / ".gitignore").write_text(
        "build/\ncompiled/\ndist/\n*.egg-info/\n__pycache__/\n*.so\nruns/\n"
    )
    commit = repository(source)
    for name in ("zenflow/host/_host_kernel.so", "zenflow/__pycache__/a.pyc", "runs/summary.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("a leftover of work in the clone")
    return source, commit


@pytest.fixture(scope="module")
def plain_wheel(clone):
    """Return a wheel that was built without a compiler."""
    build(clone[0], "bdist_wheel", "-d", "dist")
    (wheel,) = (clone[0] / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def project(plain_wheel, tmp_path_factory):
    """Return a project with a repository and packages of its own, and zenflow installed in it."""
    folder = tmp_path_factory.mktemp("project")
    for name in PACKAGES[1:]:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('the project\\'s own')\n")
    with zipfile.ZipFile(plain_wheel) as archive:
        archive.extractall(folder / "venv" / "site-packages")
    (folder / "venv" / "zenflow").write_text(START)
    repository(folder)
    return folder


@pytest.fixture(scope="module")
def environment(clone, tmp_path_factory):
    """Return the programs of a virtual environment, and the wheel with the kernel that it has."""
    pytest.importorskip("pip", minversion="22.3")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("environment")
    quick = folder / "quick-compiler"  # optimising takes longest
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    quick.chmod(0o755)
    build(clone[0], "build", "-b", "compiled", "bdist_wheel", "-d", folder, compiler=str(quick))
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    programs = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", "--no-compile", wheel], check=True,
        env=without_pythons(),  # PYTHONPATH may name a tree that counts as installed
        capture_output=True,
    )  # fmt: skip
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    there = [path for path in sys.path if Path(path).name.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(there))
    return programs, wheel


def without_pythons():
    """Return this process's environment without Python's own variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def in_environment(environment, *command):
    programs, wheel = environment
    return subprocess.run(
        [programs / command[0], *command[1:]], cwd=wheel.parent, env=without_pythons(),
        capture_output=True, text=True, timeout=100, check=True,
    ).stdout  # fmt: skip


def zenflow(project, *arguments):
    path = os.pathsep.join([".", str(project / "venv" / "site-packages")])
    return subprocess.run(
        [sys.executable, str(project / "venv" / "zenflow"), *map(str, arguments)],
        cwd=project, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


def test_an_installed_package_says_its_own_commit_and_not_that_of_the_project_around(
    clone, project
):
    done = zenflow(project, "--version")
    assert done.returncode == 0, done.stderr
    first, kernel, _ = done.stdout.splitlines()
    assert first == f"zenflow {__version__}, commit {clone[1]}"
    assert kernel.startswith("host kernel: torch operations (the C kernel is not built;")


def test_a_wheel_is_named_for_its_platform_where_it_has_the_kernel(environment, plain_wheel):
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    assert plain_wheel.name == f"zenflow_offload-{__version__}-py3-none-any.whl"
    assert environment[1].name == f"zenflow_offload-{__version__}-py3-none-{platform}.whl"
    added = set(contents(environment[1])) - set(contents(plain_wheel))
    assert added == {"zenflow/host/_host_kernel.so", "sim/replay/_replay.so"}


def test_a_wheel_with_the_kernel_trains_and_plans_in_an_environment_of_its_own(environment):
    assert in_environment(environment, "python", "-c", STEPS) == "c\n"
    planned = in_environment(environment, "zenflow", "plan", "--model", "tiny", "--gpu", "rtx4090")
    assert "zenflow train" in planned


def test_the_command_starts_in_a_project_with_packages_of_the_same_names(project):
    done = zenflow(project, "simulate", "--model", "tiny", "--gpu", "rtx4090", "--json")
    assert done.returncode == 0, done.stderr
    assert '"step_seconds"' in done.stdout


def test_processes_that_the_command_starts_find_its_packages_too(project):
    """As those of `zenflow tune` do, which are started in the same way."""
    shared = ["--model", "tiny", "--gpu", "rtx4090", "--workers", 2]
    done = zenflow(project, "sweep", *shared, "--vary", "link=pcie4-x16,pcie5-x16", "--out", "a")
    assert done.returncode == 0, done.stderr
    assert (project / "a" / "picture.png").is_file(), done.stdout + done.stderr


def test_a_source_archive_gives_the_wheel_of_its_clone_and_has_no_leftovers(
    clone, plain_wheel, tmp_path
):
    build(clone[0], "sdist", "-d", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extraction_filter = getattr(tarfile, "data_filter", None)  # from 3.11.4 on
        content.extractall(tmp_path)
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    others = files - set(git(clone[0], "ls-files").splitlines())
    assert [name for name in others if not METADATA.match(name)] == []
    repository(tmp_path)  # one that is not the package's: the commit is still the clone's
    build(source, "bdist_wheel", "-d", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert contents(wheel) == contents(plain_wheel)


def test_a_changed_clone_is_marked_and_a_folder_inside_a_repository_has_no_commit(tmp_path):
    commit = repository(tmp_path)
    assert describe(tmp_path) == commit
    (tmp_path / "inner").mkdir()
    assert describe(tmp_path / "inner") is None
    (tmp_path / "file").write_text("1")
    commit = repository(tmp_path)
    (tmp_path / "file").write_text("2")
    assert describe(tmp_path) == f"{commit}-dirty"


def test_without_git_nobody_knows_the_commit(tmp_path, monkeypatch):
    repository(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe(tmp_path) is None
