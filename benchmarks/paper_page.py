"""Write what the rows in docs/results say into docs/paper.md, and draw their figures.

    python benchmarks/paper_page.py

Each experiment has a place on the page between `<!-- NAME -->` and `<!-- end -->`; whatever stood
there is replaced by its claims. Run `winnow reproduce NAME -o docs/results` first.
"""

import re
from pathlib import Path

from winnowgp.experiments.catalogue import named
from winnowgp.experiments.experiment import Scope
from winnowgp.experiments.reproduction import drawn

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    page = DOCS / "paper.md"
    text = page.read_text(encoding="utf-8")
    for experiment in named("all"):
        if not (DOCS / "results" / f"{experiment.name}.jsonl").exists():
            print(f"{experiment.name}: no rows")
            continue
        found = drawn(experiment, Scope(), DOCS / "results")
        lines = [f"- {line}" for line in found.claims]
        if found.missing:
            lines.append(f"- {found.missing} runs are still to be made")
        place = re.compile(rf"(<!-- {experiment.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        filled = "\n".join(lines)
        text, count = place.subn(lambda m, s=filled: f"{m[1]}\n{s}\n\n{m[2]}", text)
        print(f"{experiment.name}: {len(found.claims)} claims, {count} places")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
