"""The only room with optimiser loops: schedules take a model and data, and return a `Fit`."""

from winnowgp.training.adam import Adam
from winnowgp.training.fast import Fast
from winnowgp.training.fast_latent import FastLatent
from winnowgp.training.fit import fit
from winnowgp.training.goal import FixedAlpha, Goal, MaxPoints, Tolerance
from winnowgp.training.joint_latent import JointLatent
from winnowgp.training.latent_scale import best_level
from winnowgp.training.latent_schedule import LatentFit, LatentSchedule, fit_latent
from winnowgp.training.placing import Places, placed
from winnowgp.training.predict_time import measured_predict_us, points_within
from winnowgp.training.principal import principal_latents
from winnowgp.training.progress import OnProgress, Progress, silent
from winnowgp.training.schedule import Fit, Schedule
from winnowgp.training.three_phases import ThreePhases

__all__ = [
    "Adam",
    "Fast",
    "FastLatent",
    "Fit",
    "FixedAlpha",
    "Goal",
    "JointLatent",
    "LatentFit",
    "LatentSchedule",
    "MaxPoints",
    "OnProgress",
    "Places",
    "Progress",
    "Schedule",
    "ThreePhases",
    "Tolerance",
    "best_level",
    "fit",
    "fit_latent",
    "measured_predict_us",
    "placed",
    "points_within",
    "principal_latents",
    "silent",
]
