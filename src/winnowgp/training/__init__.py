"""The only room with optimiser loops: schedules take a model and data, and return a `Fit`."""

from winnowgp.training.adam import Adam
from winnowgp.training.checkpoint import Checkpoint
from winnowgp.training.course import Course
from winnowgp.training.deep_fast import DeepFast
from winnowgp.training.deep_fit import (
    DeepFit,
    DeepProgress,
    DeepSchedule,
    OnDeepProgress,
    deep_silent,
    estimated_bound,
    fit_deep,
)
from winnowgp.training.deep_race import deep_race
from winnowgp.training.deep_three_phases import DeepThreePhases
from winnowgp.training.early_stopping import EarlyStopping
from winnowgp.training.fast import Fast
from winnowgp.training.fast_latent import FastLatent
from winnowgp.training.fit import fit
from winnowgp.training.goal import FixedAlpha, Goal, MaxPoints, Tolerance
from winnowgp.training.joint_latent import JointLatent
from winnowgp.training.journal import Journal
from winnowgp.training.latent_scale import best_level
from winnowgp.training.latent_schedule import LatentFit, LatentSchedule, fit_latent
from winnowgp.training.layer_goal import LayerAlphas, LayerGoal, SharedBudget, SharedTolerance
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.layerwise import Place, random_rows, train_layerwise
from winnowgp.training.opened import opened
from winnowgp.training.parts import Parts
from winnowgp.training.placing import Places, placed
from winnowgp.training.predict_time import measured_predict_us, points_within
from winnowgp.training.principal import principal_latents
from winnowgp.training.progress import EndPhase, OnProgress, Progress, silent
from winnowgp.training.readings import inclusions, readings
from winnowgp.training.row_identity import row_identity
from winnowgp.training.schedule import Fit, Schedule
from winnowgp.training.stateful import Remembered, Stateful, decided_by
from winnowgp.training.three_phases import ThreePhases
from winnowgp.training.unshared import warn_unshared
from winnowgp.training.watchers import Watchers

__all__ = [
    "Adam",
    "Checkpoint",
    "Course",
    "DeepFast",
    "DeepFit",
    "DeepProgress",
    "DeepSchedule",
    "DeepThreePhases",
    "EarlyStopping",
    "EndPhase",
    "Fast",
    "FastLatent",
    "Fit",
    "FixedAlpha",
    "Goal",
    "JointLatent",
    "Journal",
    "LatentFit",
    "LatentSchedule",
    "LayerAlphas",
    "LayerGoal",
    "LayerTraining",
    "MaxPoints",
    "OnDeepProgress",
    "OnProgress",
    "Parts",
    "Place",
    "Places",
    "Progress",
    "Remembered",
    "Schedule",
    "SharedBudget",
    "SharedTolerance",
    "Stateful",
    "ThreePhases",
    "Tolerance",
    "Watchers",
    "best_level",
    "decided_by",
    "deep_race",
    "deep_silent",
    "estimated_bound",
    "fit",
    "fit_deep",
    "fit_latent",
    "inclusions",
    "measured_predict_us",
    "opened",
    "placed",
    "points_within",
    "principal_latents",
    "random_rows",
    "readings",
    "row_identity",
    "silent",
    "train_layerwise",
    "warn_unshared",
]
