"""The paper's experiments by name, in the order of their figures."""

from winnowgp.errors import InputError
from winnowgp.experiments.estimators import Estimators
from winnowgp.experiments.experiment import Experiment
from winnowgp.experiments.gplvm import Gplvm
from winnowgp.experiments.illustration import Illustration
from winnowgp.experiments.kin8nm_deep import Kin8nmDeep
from winnowgp.experiments.noise import Noise
from winnowgp.experiments.real import Real
from winnowgp.experiments.square_wave import SquareWave
from winnowgp.experiments.synthetic import Synthetic

EXPERIMENTS: tuple[type[Experiment], ...] = (
    Illustration,
    Noise,
    Synthetic,
    Real,
    SquareWave,
    Kin8nmDeep,
    Gplvm,
    Estimators,
)


def named(*names: str) -> list[Experiment]:
    """The experiments of some names, each once, or every one for "all".

    >>> [experiment.title for experiment in named("noise")]
    ['figure 2: the more noise, the fewer points an accurate posterior needs']
    """
    known = [kind.name for kind in EXPERIMENTS]
    for name in names:
        if name not in ("all", *known):
            raise InputError(f"`name` must be all or one of {', '.join(known)}; got {name!r}.")
    return [kind() for kind in EXPERIMENTS if "all" in names or kind.name in names]
