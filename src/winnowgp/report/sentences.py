"""Sentences about the selection, which commands, reports and warnings show, and the HTML report."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path

from winnowgp.io.format import atomic_write
from winnowgp.report.summary import Choice, ShallowChoice, SubsetChoice, Summary

# Nats per observation from which a gain counts as one.
_NOTICEABLE = 5e-4

# Why a model without inducing points was selected although its ELBO is lower than the tolerance
# asks.
_CONSTANT = {
    "chance": "models with them gain no more than they would by chance",
    "held_out": "models with them predict held-out rows no better than a constant",
}


def selection_lines(choice: Choice) -> list[tuple[str, str]]:
    """Return what is known about the selection, as pairs of a label and a sentence.

    Fields that are None, as in files of earlier versions, have no line.
    """
    points = counted(choice["points"])
    if "layers" in choice:
        points += f" in {counted(len(choice['layers']), 'layer')}: {listed(choice['layers'])}"
    lines = [("selected", f"{points}; goal: {choice['asked']}")]
    if "shallow" in choice:
        lines.append(("depth", shallow_sentence(choice["shallow"])))
    if "noise_points" in choice:
        points = choice["noise_points"]
        lines.append(
            (
                "noise",
                f"depends on the inputs; its logarithm has {counted(points)}"
                if points
                else "does not vary: its dependence on the inputs gains no more than chance",
            )
        )
    if choice["kernel"] is not None:
        lines.append(("kernel", kernel_sentence(choice["kernel"], choice["kernel_evidence"])))
    if "hyper_posteriors" in choice:
        members = counted(choice["hyper_posteriors"], "posterior")
        if "constant_weight" in choice:
            members += f" and a constant (weight {choice['constant_weight']:.2g})"
        lines.append(("hyper-parameters", f"uncertain: predictions average over {members}"))
    if "subset_posterior" in choice:
        lines.append(("subsets", subset_sentence(choice["subset_posterior"])))
    lines.append(("ELBO gap", f"{choice['elbo_gap']:.4f} nats per observation"))
    if choice["kl"] is not None and choice["evidence"] is not None:
        lines.append(("log evidence", evidence_sentence(choice)))
    if choice["predictive_gap"] is not None:
        gap, error = choice["predictive_gap"], choice["predictive_gap_se"]
        spread = "" if error is None else f" ± {error:.4f}"
        lines.append(
            (
                "predictive gap",
                f"{gap:.4f}{spread} nats per observation, by held-out log density",
            )
        )
    if choice["last_gain"] is not None and choice["resized_from"] is None:
        lines.append(("growth", growth_sentence(choice["growth_limit"], choice["last_gain"])))
    if len(choice["sizes"]) > 1:
        sizes = ", ".join(map(str, choice["sizes"]))
        lines.append(("sizes", f"{sizes} inducing points are available (`winnow resize`)"))
    if choice["resized_from"] is not None:
        lines.append(("resized", f"from {counted(choice['resized_from'])}"))
    return lines


def counted(number: int, noun: str = "inducing point") -> str:
    """Return a number and its noun, in the plural unless the number is one.

    >>> counted(1), counted(12)
    ('1 inducing point', '12 inducing points')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(layers: Sequence[int]) -> str:
    """Return the numbers of inducing points of all layers.

    >>> listed([40, 23])
    '40 + 23'
    """
    return " + ".join(map(str, layers))


def rounded(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, without an exponent below ten million.

    >>> rounded(0.84991), rounded(396412.0), rounded(-4451.0, 3), rounded(1.25e9)
    ('0.8499', '396400', '-4450', '1.25e+09')
    """
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e7 else text


def shallow_sentence(compared: ShallowChoice) -> str:
    """Return whether a deep or a shallow GP was selected, and the gains of the deep one.

    >>> held = {"density_gain": -0.05, "density_gain_error": 0.02}
    >>> shallow_sentence({"selected": "shallow", "elbo_gain": 0.04, **held})
    'shallow; gains of the deep GP per observation: ELBO +0.040, held-out density -0.050 ± 0.020'
    """
    gains, density = f"ELBO {compared['elbo_gain']:+.3f}", compared["density_gain"]
    if density is not None:
        gains += f", held-out density {density:+.3f} ± {compared['density_gain_error']:.3f}"
    return f"{compared['selected']}; gains of the deep GP per observation: {gains}"


def subset_sentence(subsets: SubsetChoice) -> str:
    """Return what the posterior over subsets says, and whether its samples can be relied on."""
    low, high = subsets["credible_size"]
    size = f"between {low} and {high}" if low < high else f"{low}"
    text = f"{subsets['kind']} posterior: {size} inducing points with a probability of 90 %"
    if subsets["averaged"] is not None:
        text += f"; predictions average over {subsets['averaged']} subsets"
    if subsets["effective_samples"] is not None:
        r_hat = "∞" if subsets["r_hat"] is None else f"{subsets['r_hat']:.2f}"
        text += f" (R-hat {r_hat}, {subsets['effective_samples']:.0f} independent samples)"
    return text


def kernel_sentence(name: str, evidence: Mapping[str, float | None]) -> str:
    """Return the name of the kernel, and how far other kernels were behind.

    Args:
        evidence: nats per observation of each kernel relative to the best; None for a kernel whose
            evidence could not be computed.

    >>> kernel_sentence("matern32", {"matern52": -0.0124, "rbf": -0.2, "matern32": 0.0})
    'matern32; evidence per observation relative to the best: matern32 0, matern52 -0.012, rbf -0.2'
    """
    known = {kernel: nats for kernel, nats in evidence.items() if nats is not None}
    if len(known) < 2:
        return name
    ranked = sorted(known.items(), key=lambda item: -item[1])
    others = ", ".join(f"{kernel} {nats:.2g}" for kernel, nats in ranked)
    return f"{name}; evidence per observation relative to the best: {others}"


def evidence_sentence(choice: Choice) -> str:
    """Return where the log evidence is relative to the ELBO: exactly, or between two bounds."""
    assert choice["kl"] is not None
    (lower, upper), rows = choice["kl"], choice["rows"]
    if choice["evidence_method"] == "exact":
        return (
            f"exact, ELBO is {upper / rows:.4f} nats per observation below "
            f"(KL[q ‖ posterior] = {upper:.3g} nats)"
        )
    return (
        f"between {lower / rows:.4f} and {upper / rows:.4f} nats per observation above the ELBO "
        f"(KL[q ‖ posterior] between {lower:.3g} and {upper:.3g} nats)"
    )


def growth_sentence(limit: str | None, gain: float) -> str:
    """Return whether more inducing points would pay.

    Args:
        limit: the limit that ended the growth of the candidates, if one did.
        gain: nats per observation that the last doubling gained.

    >>> growth_sentence("work", 0.21)
    'more inducing points still pay: the last doubling gained 0.21 nats per observation \
(limit: work)'
    """
    if limit is None:
        return "ended because more candidates gain less than the tolerance"
    nats = f"{gain:.2g} nats per observation" if isfinite(gain) else "an unknown number of nats"
    if limit in _CONSTANT:
        return f"no inducing points, because {_CONSTANT[limit]} (limit: {limit})"
    if limit == "precision":
        return "ended because rounding errors exceed what more candidates add (limit: precision)"
    if limit == "max_points":
        return f"twice as many inducing points would gain at least {nats} (limit: max_points)"
    verb = "still pay" if gain >= _NOTICEABLE else "may still pay"
    return f"more inducing points {verb}: the last doubling gained {nats} (limit: {limit})"


def report_page(summary: Summary) -> str:
    """Return the report as an HTML page that loads nothing from elsewhere.

    All text from the user's table is JSON inside the page, and displayed as text by the script.
    """
    folder = files("winnowgp.report")
    page, style, script = (
        (folder / f"page.{suffix}").read_text(encoding="utf-8") for suffix in ("html", "css", "js")
    )
    # "</script>" and "<!--" inside a string would end the element that contains it.
    content = {**summary, "lines": selection_lines(summary["choice"])}
    data = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    for mark, text in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*SUMMARY*/", data)):
        before, after = page.split(mark)
        page = before + text + after
    return page


def save_report(summary: Summary, path: str | os.PathLike[str]) -> Path:
    """Write the report to a file, which appears complete or not at all."""
    path = Path(path)
    with atomic_write(path) as temporary:
        temporary.write_text(report_page(summary), encoding="utf-8")
    return path
