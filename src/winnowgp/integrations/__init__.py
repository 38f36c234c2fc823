"""Other people's software, each in one file, each optional."""

from winnowgp.integrations.mlflow import MLflow
from winnowgp.integrations.tensorboard import TensorBoard

__all__ = ["MLflow", "TensorBoard"]
