"""Draw the figures of the rows in docs/results, and write what they say into docs/paper.md.

    python benchmarks/paper_page.py

Each experiment has a place on the page between `<!-- NAME -->` and `<!-- end -->`; whatever stood
there is replaced by its figure and claims. Run `winnow reproduce NAME -o docs/results` first.
"""

import re
from pathlib import Path

from winnowgp.errors import InputError
from winnowgp.experiments.base import Scope
from winnowgp.experiments.runner import draw_experiment, select_experiments

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    page = DOCS / "paper.md"
    text = page.read_text(encoding="utf-8")
    for experiment in select_experiments("all"):
        try:
            found = draw_experiment(experiment, Scope(), DOCS / "results")
        except InputError as error:
            print(error)
            continue
        picture = f"![{experiment.title}](results/{experiment.name}.png)"
        lines = [picture, "", *(f"- {line}" for line in found.claims)]
        if found.missing:
            lines.append(
                f"- still to be made: {found.missing} of {found.rows + found.missing} runs"
            )
        place = re.compile(rf"(<!-- {experiment.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        filled = "\n".join(lines)
        text, count = place.subn(lambda m, s=filled: f"{m[1]}\n{s}\n\n{m[2]}", text)
        print(f"{experiment.name}: {len(found.claims)} claims, {count} places")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
