"""Options that several commands share, and messages that name them; paths; process of torchrun."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from winnowgp.errors import InputError

if TYPE_CHECKING:
    from winnowgp import TabularModel
    from winnowgp.report.summary import Summary
    from winnowgp.tabular.outputs import MultiOutputTable

Quiet: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print errors and warnings only.")
]

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of the random numbers.")
]

Encoding: TypeAlias = Annotated[
    str, typer.Option("--encoding", help="Encoding of a CSV file, such as latin-1.")
]

Device: TypeAlias = Annotated[
    str,
    typer.Option("--device", help="cpu, cuda, or auto: a GPU if there is one."),
]

ModelFile: TypeAlias = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="A file that `winnow fit` wrote.", show_default=False),
]


PICTURES = (".png", ".pdf", ".svg")

# Likelihoods that each of several targets can have.
_LIKELIHOODS = (
    "gaussian",
    "student-t",
    "laplace",
    "poisson",
    "negative-binomial",
    "beta",
    "bernoulli",
)


def checked_output(output: Path, suffixes: tuple[str, ...] = ()) -> Path:
    """Return `output` if a file with one of these suffixes can be written there."""
    if suffixes and not output.name.lower().endswith(suffixes):
        ends = suffixes[0] if len(suffixes) == 1 else f"one of {', '.join(suffixes)}"
        raise InputError(f"`--output` must end in {ends}; got {output.name!r}.")
    folder = output.absolute().parent
    if not folder.is_dir():
        raise InputError(
            f"`--output` must be in a folder that exists; got {output}. Create {folder} first."
        )
    special = output.exists() and not output.is_file()  # a folder or a device such as /dev/null
    if special or not os.access(folder, os.W_OK):
        raise InputError(
            f"`--output` must be a file that can be written; got {output}. Choose another path."
        )
    return output


def checked_folder(output: Path) -> Path:
    """Return `output` if it is, or can become, a folder that can be written to."""
    ancestor = output.absolute()
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise InputError(
            f"`--output` must be a folder that can be written to; got {output}. Choose another."
        )
    return output


def check_rereadable(data: Path) -> None:
    """Raise an error if a table is a pipe: a fit reads its file several times."""
    if data == Path("-") or data.is_fifo():
        raise InputError(
            f"`DATA` must be a file, because it is read several times; got {data}, a pipe. Save "
            "the table to a file first."
        )


def check_columns(data: Path, used: Mapping[str, Sequence[str]], *, encoding: str) -> None:
    """Raise an error if options name columns that a table lacks.

    Only the start of the file is read, and PyTorch is not imported: a misspelt name is reported at
    once.

    Args:
        used: the columns that each option names.
    """
    from winnowgp.data.readers import read_blocks

    table = next(read_blocks(data, size=1, encoding=encoding))
    for option, names in used.items():
        table.require_columns(names, argument=option)


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    import json

    typer.echo(json.dumps(value, ensure_ascii=False))


def target_likelihoods(options: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
    """Return the likelihood of each target from `--likelihood NAME` and `TARGET=NAME`.

    >>> target_likelihoods(["poisson", "b=beta"], ["a", "b"])
    {'a': 'poisson', 'b': 'beta'}
    """
    twice = [name for number, name in enumerate(targets) if name in targets[:number]]
    if twice:
        raise InputError(f"`--target` has {twice[0]!r} twice; give each target once.")
    everywhere = [option for option in options if "=" not in option]
    if len(everywhere) > 1:
        raise InputError(
            f"`--likelihood` of all targets was given twice, {' and '.join(everywhere[:2])}; give "
            "one, or one for each target: `--likelihood TARGET=NAME`."
        )
    chosen = dict.fromkeys(targets, everywhere[0] if everywhere else "auto")
    named: set[str] = set()
    for option in options:
        target, equal, name = option.rpartition("=")
        if equal and target in named:
            raise InputError(f"`--likelihood` of {target!r} was given twice; give one of them.")
        if equal and target not in chosen:
            raise InputError(
                f"`--likelihood TARGET=NAME` must name a target, {', '.join(targets)}; got "
                f"{target!r}."
            )
        if equal:
            named.add(target)
            chosen[target] = name
    return chosen


def several_likelihoods(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return likelihoods that several targets can have; auto is Gaussian noise."""
    for target, name in chosen.items():
        if name not in ("auto", *_LIKELIHOODS):
            raise InputError(
                f"`--likelihood` of several targets must be one of {', '.join(_LIKELIHOODS)}; got "
                f"{name!r} for {target!r}."
            )
    return {target: "gaussian" if name == "auto" else name for target, name in chosen.items()}


def refuse_single_target_options(defaults: Mapping[str, bool]) -> None:
    """Raise an error if an option of models of one target was given.

    Args:
        defaults: whether each option has its default.
    """
    for option, is_default in defaults.items():
        if not is_default:
            raise InputError(f"`{option}` is for models of one target; leave it out.")


def file_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file, by which a model knows the file it was fitted to."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_table_model(path: Path) -> "TabularModel":
    """Load a model of one target that `winnow fit` wrote."""
    from winnowgp import TabularModel

    model = load_predictor(path)
    if not isinstance(model, TabularModel):
        raise _other_model(path, type(model).__name__)
    return model


def load_predictor(path: Path) -> "TabularModel | MultiOutputTable":
    """Load a model that `winnow fit` wrote, of one target or of several."""
    from winnowgp import TabularModel, load
    from winnowgp.tabular.outputs import MultiOutputTable

    model = load(_checked_file(path))
    if not isinstance(model, TabularModel | MultiOutputTable):
        raise _other_model(path, type(model).__name__)
    return model


def load_outputs(path: Path) -> "MultiOutputTable | None":
    """Load a model of several targets; None if the file holds another one."""
    from winnowgp.io.registry import load_field

    if load_field(_checked_file(path), "targets", list[str])[0] != "MultiOutputTable":
        return None
    from winnowgp import load
    from winnowgp.tabular.outputs import MultiOutputTable

    model = load(path)
    assert isinstance(model, MultiOutputTable)
    return model


def load_summary(path: Path) -> "Summary":
    """Load the summary of a model that `winnow fit` wrote, without the model.

    scikit-learn is not imported, which takes longer than PyTorch.
    """
    from winnowgp.io.format import unreadable
    from winnowgp.io.registry import load_field
    from winnowgp.report.summary import Summary, is_consistent

    kind, summary = load_field(_checked_file(path), "summary", Summary)
    if kind != "TabularModel":
        raise _other_model(path, kind)
    if summary is None or not is_consistent(summary):
        raise unreadable(path)
    return summary


def _checked_file(path: Path) -> Path:
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file that `winnow fit` wrote.")
    if not path.exists():
        raise InputError(f"{path} does not exist; give a file that `winnow fit` wrote.")
    return path


def _other_model(path: Path, kind: str) -> InputError:
    if kind == "MultiOutputTable":
        return InputError(
            f"{path} holds a model of several targets, which `winnow predict`, `info`, `evaluate`, "
            "`frontier`, `plot`, `update` and `export` can use; fit one target for this command."
        )
    return InputError(
        f"{path} holds a {kind}, saved from Python; the command line needs a file that "
        "`winnow fit` wrote. Use `winnowgp.load` in Python."
    )


def launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_main_process() -> bool:
    """Return whether this process prints and writes: the first one of torchrun, or the only one."""
    return not launched() or os.environ.get("RANK") == "0"


def process_name() -> str:
    """Return the prefix of messages, with the number of the process unless it is the first."""
    return "winnow" if is_main_process() else f"winnow (process {int(os.environ['RANK']) + 1})"


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
