"""The commands: what they print, how they end, what they import."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

import pearl
from pearl.cli.main import app
from pearl.errors import ModelError, RunFailed, UserError


def pearl_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


class TestRoot:
    def test_version(self) -> None:
        assert pearl_command("--version").stdout == f"pearl {pearl.__version__}\n"

    def test_help_names_the_commands(self) -> None:
        text = pearl_command("--help").stdout
        assert all(command in text for command in ("train", "profile", "config", "doctor"))

    @pytest.mark.parametrize("arguments", [["nonsense"], ["train", "--nonsense"], ["config", "nonsense"]])
    def test_unknown_commands_and_options(self, arguments: list[str]) -> None:
        result = pearl_command(*arguments)
        assert result.exit_code == 2
        assert "nonsense" in result.stderr


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = ("ray", "safetensors", "tensorboard", "tokenizers", "torch", "transformers", "psutil")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pearl.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('loaded', sorted(set(sys.modules) & {{'numpy', 'pydantic', 'asyncio', *{HEAVY!r}}}))"
    )
    assert python(code).splitlines()[-1] == "loaded []"


def test_the_base_install_is_enough_for_all_but_training() -> None:
    code = (
        "import sys\n"
        f"for name in {HEAVY!r}:\n    sys.modules[name] = None\n"
        "import pearl.config.load, pearl.core.shape, pearl.core.state, pearl.report.journal, pearl.report.panel\n"
        "import pearl.cli.train, pearl.cli.profile, pearl.cli.doctor, pearl.cli.config\n"
        "from pearl.cli.main import app\n"
        "app(['config', 'check', 'x.toml'])\n"
    )
    assert python(code).startswith("x.toml: fine; ")


def test_user_errors_are_two_and_others_one() -> None:
    # The promise of the module: what the user can mend is 2.
    assert issubclass(ModelError, UserError)
    assert not issubclass(RunFailed, UserError)


def test_the_command_ends_cleanly_on_ctrl_c_outside_a_command() -> None:
    code = (
        "import sys, pearl.cli.main as m\n"
        "def app():\n    raise KeyboardInterrupt\n"
        "m.app = app\n"
        "try:\n    m.main()\nexcept SystemExit as error:\n    print(error.code)"
    )
    assert python(code) == "130\n"
