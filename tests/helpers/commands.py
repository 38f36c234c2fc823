"""Commands that must be refused."""

import pytest

from winnowgp.cli.app import run


def refusal(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command, a fit quietly, that ends with exit code 2; return the line that it prints."""
    assert run([*arguments, *(["-q"] if arguments[0] == "fit" else [])]) == 2
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert output.startswith("winnow: ")
    return output
