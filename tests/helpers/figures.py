"""What a test reads from matplotlib axes."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection


def scattered(ax: Axes) -> list[np.ndarray]:
    """Return the positions of all scattered points, one array per scatter."""
    scatters = [c for c in ax.collections if isinstance(c, PathCollection)]
    return [np.asarray(c.get_offsets()) for c in scatters]
