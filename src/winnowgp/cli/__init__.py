"""The command `winnow`: each command calls the public functions of the library."""

from winnowgp.cli.app import main

__all__ = ["main"]
