"""Optional integrations: experiment trackers, GPyTorch and BoTorch."""

from winnowgp.integrations.trackers import MLflow, TensorBoard

__all__ = ["MLflow", "TensorBoard"]
