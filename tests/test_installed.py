"""The package as it is installed: its command starts anywhere, and knows its own commit."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from experiments.output.commit import describe

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zenflow", "sim", "autotune", "experiments")
START = "import sys\nfrom zenflow.console import main\nif __name__ == '__main__':\n    main()\n"
"""What pip writes as the command."""
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


def build(source, *command):
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=source, check=True,
        env={**os.environ, "CC": "false"}, capture_output=True,
    )  # fmt: skip


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
    (source / ".gitignore").write_text("build/\ndist/\n*.egg-info/\n__pycache__/\n")
    return source, repository(source)


@pytest.fixture(scope="module")
def project(clone, tmp_path_factory):
    """Return a project with a repository and packages of its own, and zenflow installed in it."""
    build(clone[0], "bdist_wheel", "-d", "dist")
    folder = tmp_path_factory.mktemp("project")
    for name in PACKAGES[1:]:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('the project\\'s own')\n")
    (wheel,) = (clone[0] / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "venv" / "site-packages")
    (folder / "venv" / "zenflow").write_text(START)
    repository(folder)
    return folder


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
    assert done.stdout.split()[-1] == clone[1]


def test_the_command_starts_in_a_project_with_packages_of_the_same_names(project):
    done = zenflow(project, "simulate", "--model", "tiny", "--gpu", "rtx4090", "--json")
    assert done.returncode == 0, done.stderr
    assert '"step_seconds"' in done.stdout


@pytest.mark.parametrize(
    ("command", "made"),
    [
        (["sweep", "--vary", "link=pcie4-x16,pcie5-x16", "--out", "swept"], "swept/picture.png"),
        (["tune", "--trials", 2, "--storage", "a.journal", "--out", "tuned"], "tuned/best.toml"),
    ],
)
def test_processes_that_the_command_starts_find_its_packages_too(project, command, made):
    shared = ["--model", "tiny", "--gpu", "rtx4090", "--workers", 2]
    done = zenflow(project, command[0], *shared, *command[1:])
    assert done.returncode == 0, done.stderr
    assert (project / made).is_file(), done.stdout + done.stderr


def test_a_wheel_of_a_source_archive_says_the_archives_commit(clone, tmp_path):
    build(clone[0], "sdist", "-d", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    repository(tmp_path)  # one that is not the package's
    build(source, "build_py")
    (baked,) = source.glob("build/lib*/experiments/commit.txt")
    assert baked.read_text().strip() == clone[1]


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
