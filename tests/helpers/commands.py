"""Commands that must be refused."""

import pytest

from winnowgp.cli.app import run


def refusal(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command that ends with exit code 2; return the one line that it prints."""
    assert run(arguments) == 2
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert output.startswith("winnow: ")
    return output
