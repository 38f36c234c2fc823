"""Make the modules of this folder importable by name, as they are when `record.py` is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
