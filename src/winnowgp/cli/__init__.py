"""The command `winnow`: each command calls what a user of the library could call."""

from winnowgp.cli.app import main

__all__ = ["main"]
