"""Other people's software, each in one file, each optional."""

from winnowgp.integrations.trackers import MLflow, TensorBoard

__all__ = ["MLflow", "TensorBoard"]
