"""scripts/run.sh with a stand-in for Python that records its calls, so that nothing is downloaded."""

import os
import shutil
import subprocess

import pytest

from tests import ROOT

RUN = ROOT / "scripts" / "run.sh"

# Accepts the calls of run.sh: check the version, print it, make an environment, run pip, compile.
PYTHON = """#!/bin/bash
case "$*" in
    -c*version_info*) [ "${FAKE_VERSION:-3.12}" = 3.12 ] ;;
    --version) echo "Python ${FAKE_VERSION:-3.12}" ;;
    "-m venv --clear "*)
        echo "venv" >>"$CALLS"
        rm -rf "$4"; mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip --version") [ -z "${FAKE_BROKEN:-}" ] ;;
    "-m pip install "*)
        echo "install ${*: -1}" >>"$CALLS"
        [ -z "${FAKE_SLOW:-}" ] || sleep "$FAKE_SLOW"
        [ -z "${FAKE_FAILURE:-}" ] || exit 1
        echo "installed ${*: -1}" >>"$CALLS"
        printf '#!/bin/bash\\nprintf "<%%s>" "$@"; pwd\\n' >.venv/bin/show && chmod +x .venv/bin/show
        cp .venv/bin/show .venv/bin/pytest ;;
    "-m compileall "*) ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


USERS = ["install requirements.txt", "installed requirements.txt"]
DEVELOPERS = ["install requirements-dev.txt", "installed requirements-dev.txt"]


class Checkout:
    """A fresh copy of what run.sh needs, with a stand-in for every Python on the PATH."""

    def __init__(self, folder):
        self.root = folder / "a checkout"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(RUN, self.root / "scripts")
        self.requirements = self.root / "requirements.txt"
        self.requirements.write_text("torch==2\n")
        (self.root / "requirements-dev.txt").write_text("pytest==9\n")
        self.calls = folder / "calls"
        self.calls.touch()
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in ("python3", "python3.11", "python3.12", "python3.13"):
            (bin_folder / name).write_text(PYTHON)
            (bin_folder / name).chmod(0o755)
        self.environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "CALLS": str(self.calls)}

    def start(self, *command, cwd=None, **environment):
        return subprocess.Popen(
            [self.root / "scripts" / "run.sh", *command],
            cwd=cwd or self.root,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command, **options):
        process = self.start(*command, **options)
        stdout, stderr = process.communicate(timeout=300)
        return process.returncode, stdout, stderr

    def recorded(self):
        """Returns the calls of Python since the last time: venv, install, installed."""
        words = self.calls.read_text().splitlines()
        self.calls.write_text("")
        return words


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_first_command_sets_up_and_the_next_does_not_unless_the_environment_was_moved(checkout):
    for expected in (["venv", *USERS], []):
        assert checkout.run("show")[0] == 0
        assert checkout.recorded() == expected
    checkout.root = checkout.root.rename(checkout.root.with_name("elsewhere"))
    assert checkout.run("show")[0] == 0
    assert checkout.recorded() == ["venv", *USERS]


def test_arguments_arrive_as_given_in_the_root_from_anywhere(checkout, tmp_path):
    status, stdout, _ = checkout.run("show", "a b", "", "*", "$HOME", "x='1,2'", cwd=tmp_path)
    assert status == 0
    assert stdout == f"<a b><><*><$HOME><x='1,2'>{checkout.root}\n"


def test_changed_requirements_are_installed_into_the_same_environment(checkout):
    checkout.run("show")
    checkout.recorded()
    checkout.requirements.write_text("torch==3\n")
    assert checkout.run("show")[0] == 0
    assert checkout.recorded() == USERS
    # Its content decides, not its time.
    os.utime(checkout.requirements)
    checkout.run("show")
    assert checkout.recorded() == []


def test_tests_and_the_linter_bring_their_own_requirements(checkout):
    for command, expected in (
        (["show"], ["venv", *USERS]),
        (["show", "-m", "tests.faults"], DEVELOPERS),
        (["show"], []),
        (["pytest", "tests/models"], []),
    ):
        assert checkout.run(*command)[0] == 0
        assert checkout.recorded() == expected


def test_usage_and_the_environment_of_the_command(checkout):
    for arguments, status in (((), 2), (("--help",), 0)):
        returned, stdout, stderr = checkout.run(*arguments)
        assert returned == status
        assert "usage: scripts/run.sh CMD" in stdout + stderr
    assert checkout.recorded() == []
    show = 'echo "$VIRTUAL_ENV"; command -v python; echo "${PYTHONHOME:-unset}"'
    status, stdout, _ = checkout.run("bash", "-c", f"{show}; exit 7", PYTHONHOME="/nowhere")
    assert status == 7
    assert stdout.splitlines() == [f"{checkout.root}/.venv", f"{checkout.root}/.venv/bin/python", "unset"]


def test_after_a_failed_install_no_command_runs_and_the_next_call_retries(checkout):
    status, stdout, _ = checkout.run("show", FAKE_FAILURE="1")
    assert (status, stdout) == (1, "")
    assert checkout.recorded() == ["venv", USERS[0]]
    assert checkout.run("show")[0] == 0
    assert checkout.recorded() == USERS


def test_an_environment_without_pip_is_made_again(checkout):
    # The remains of an interrupted `python -m venv`.
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    (checkout.root / ".venv" / "bin" / "python").write_text("#!/bin/bash\nexit 1\n")
    (checkout.root / ".venv" / "bin" / "python").chmod(0o755)
    assert checkout.run("show")[0] == 0
    assert checkout.recorded() == ["venv", *USERS]


def test_two_commands_at_once_install_once(checkout):
    both = [checkout.start("show", FAKE_SLOW="0.5") for _ in range(2)]
    for process in both:
        process.communicate(timeout=300)
    assert [process.returncode for process in both] == [0, 0]
    assert checkout.recorded() == ["venv", *USERS]


def test_an_unsupported_python_is_named(checkout):
    status, _, stderr = checkout.run("show", FAKE_VERSION="3.9.1")
    assert status == 1
    assert "needs Python 3.11, 3.12 or 3.13; python3 is Python 3.9.1." in stderr
    assert checkout.recorded() == []
    assert not (checkout.root / ".venv").exists()


def test_a_chosen_python_is_not_replaced_by_another(checkout):
    status, _, stderr = checkout.run("show", PYTHON="/no/python")
    assert status == 1
    assert "; /no/python is missing." in stderr
    assert checkout.recorded() == []
