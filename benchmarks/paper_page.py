"""Draw the figures of the rows in docs/results, and write their claims into docs/paper.md.

    python benchmarks/paper_page.py

Each experiment has a section on the page between `<!-- NAME -->` and `<!-- end -->`, which is
replaced by its figure and claims. Run `winnow reproduce NAME -o docs/results` first.
"""

import re
from pathlib import Path

from winnowgp.errors import InputError
from winnowgp.experiments.base import Scope
from winnowgp.experiments.runner import Reproduction, draw_experiment, select_experiments

DOCS = Path(__file__).parents[1] / "docs"


def section(result: Reproduction) -> str:
    """Return the figure, the claims and the number of missing runs as Markdown."""
    lines = [f"![{result.title}](results/{result.name}.png)", ""]
    lines += [f"- {line}" for line in result.claims]
    if result.missing:
        lines.append(f"- missing: {result.missing} of {result.rows + result.missing} runs")
    return "\n".join(lines)


def replace_section(page: str, name: str, content: str) -> str:
    """Return the page with new content between the two comments of a section."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = pattern.subn(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", page)
    if count != 1:
        raise InputError(f"the page must have one section `<!-- {name} -->`; it has {count}.")
    return page


def main() -> None:
    """Update every section of the page."""
    path = DOCS / "paper.md"
    page = path.read_text(encoding="utf-8")
    for experiment in select_experiments("all"):
        try:
            result = draw_experiment(experiment, Scope(), DOCS / "results")
        except InputError as error:
            print(error)
            continue
        page = replace_section(page, experiment.name, section(result))
        print(f"{experiment.name}: {len(result.claims)} claims")
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
