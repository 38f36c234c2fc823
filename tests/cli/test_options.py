"""Messages of the library, in the words of the command line."""

import pytest

from winnowgp.cli.options import with_options


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("`tolerance` must be positive.", "`--tolerance` must be positive."),
        ("use it as `id_column` (`--id`).", "use it as `--id`."),
        ("leave it out with `drop` (`--drop 'a b'`).", "leave it out with `--drop 'a b'`."),
        ('try `kernel="rbf + linear[a]"` (`--kernel`).', "try `--kernel 'rbf + linear[a]'`."),
        ("fit `log_target=True` (`--log-target`).", "fit `--log-target`."),
        ("use a GPU with `device='cuda'`.", "use a GPU with `--device cuda`."),
        (
            "a column (`--split-by`), or test_size=0 (`--test-size 0`).",
            "a column (`--split-by`), or `--test-size 0`.",
        ),
    ],
)
def test_with_options_replaces_arguments_of_python(message: str, expected: str) -> None:
    assert with_options(message) == expected


@pytest.mark.parametrize("name", ["model", "data", "fit_table", "--drop", "winnow fit"])
def test_with_options_keeps_names_without_an_option(name: str) -> None:
    assert with_options(f"see `{name}`.") == f"see `{name}`."
