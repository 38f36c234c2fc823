"""The only room with optimiser loops: schedules take a model and data, and return a `Fit`."""

from winnowgp.training.adam import Adam
from winnowgp.training.fit import fit
from winnowgp.training.progress import OnProgress, Progress, silent
from winnowgp.training.schedule import Fit, Schedule
from winnowgp.training.three_phases import ThreePhases

__all__ = ["Adam", "Fit", "OnProgress", "Progress", "Schedule", "ThreePhases", "fit", "silent"]
