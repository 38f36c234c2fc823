"""What the pages take for granted: data under the names that the examples use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def given() -> Mapping[str, Any]:
    """Rows `X` of two columns, a smooth target `y`, new rows `X_new`, and a file `houses.csv`."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(120, 2))
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.1 * rng.normal(size=120)
    lines = ["house,area,built,district,price"]
    for house, ((size, age), price) in enumerate(zip(X, y, strict=True)):
        area, built, cost = round(90 + 30 * size), round(1990 + 15 * age), round(300 + 90 * price)
        lines.append(f"{house},{area},{built},{'north' if house % 3 else 'south'},{cost}")
    Path("houses.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"X": X, "y": y, "X_new": rng.uniform(-2, 2, size=(5, 2))}
