"""Words typed by a person, turned into calls that a user of the library could make."""

from winnowgp.cli.app import main

__all__ = ["main"]
