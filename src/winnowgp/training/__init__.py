"""Training: `fit`, its schedules and goals, callbacks and checkpoints."""

from winnowgp.training.callbacks import Callback, Callbacks, EarlyStopping, EndPhase, Progress
from winnowgp.training.checkpoint import Checkpoint
from winnowgp.training.fast import FastSchedule
from winnowgp.training.fast_deep import DeepTraining
from winnowgp.training.goals import (
    AllCandidates,
    FixedAlpha,
    Goal,
    MaxCost,
    MaxPoints,
    MaxPredictTime,
    Tolerance,
)
from winnowgp.training.initialization import principal_latents
from winnowgp.training.laplace import hyperparameter_mixture
from winnowgp.training.paper import PaperSchedule
from winnowgp.training.schedules import FitResult, Schedule, fit
from winnowgp.training.streaming import update

__all__ = [
    "AllCandidates",
    "Callback",
    "Callbacks",
    "Checkpoint",
    "DeepTraining",
    "EarlyStopping",
    "EndPhase",
    "FastSchedule",
    "FitResult",
    "FixedAlpha",
    "Goal",
    "MaxCost",
    "MaxPoints",
    "MaxPredictTime",
    "PaperSchedule",
    "Progress",
    "Schedule",
    "Tolerance",
    "fit",
    "hyperparameter_mixture",
    "principal_latents",
    "update",
]
