"""Messages of the library in the words of the command line: options instead of Python arguments."""

import re
from functools import cache

# "`drop` (`--drop 'id'`)" and "`kernel='rbf'` (`--kernel`)": messages that name both.
_BOTH = re.compile(r"(?:`\w+(?:=[^`]*)?`|\b\w+=\S+) \(`(--[\w-]+ [^`]+)`\)")
_BARE = re.compile(r"(`\w+(?:=[^`]*)?`) \(`--[\w-]+`\)")
_VALUE = re.compile(r"`(\w+)=(?:'([^'`]*)'|\"([^\"`]*)\"|([^`]*))`")
_NAME = re.compile(r"`(\w+)`")
# Arguments of Python that have another name than their option.
_OTHER_NAMES = {"targets": "--target", "test_table": "--test-file", "folds": "--cv"}


def with_options(message: str) -> str:
    """Return a message of the library with the options of `winnow` for arguments of Python.

    >>> with_options("`max_points` must be an integer of at least 1; got 0.")
    '`--max-points` must be an integer of at least 1; got 0.'
    >>> with_options("leave it out with `drop` (`--drop 'id'`), or use `device='cuda'`.")
    "leave it out with `--drop 'id'`, or use `--device cuda`."
    """
    message = _BARE.sub(r"\1", _BOTH.sub(r"`\1`", message))
    return _NAME.sub(_option, _VALUE.sub(_option_with_value, message))


def _option(match: re.Match[str]) -> str:
    option = _options().get(match[1])
    return match[0] if option is None else f"`{option}`"


def _option_with_value(match: re.Match[str]) -> str:
    option = _options().get(match[1])
    if option is None:
        return match[0]
    value = next(text for text in match.groups()[1:] if text is not None)
    if value == "True":
        return f"`{option}`"
    return f"`{option} {value!r}`" if " " in value else f"`{option} {value}`"


@cache
def _options() -> dict[str, str]:
    """Return the option of each argument that has one, over all commands."""
    from typer.main import get_command

    from winnowgp.cli.app import app

    commands = getattr(get_command(app), "commands", {})
    parameters = [each for command in commands.values() for each in command.params]
    arguments = {each.name for each in parameters if each.param_type_name == "argument"}
    options = {each.name: max(each.opts, key=len) for each in parameters}
    return {name: options[name] for name in options.keys() - arguments} | _OTHER_NAMES
