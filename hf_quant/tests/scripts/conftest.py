"""The scripts import each other by their bare names, as they do when they are run."""

import sys
from pathlib import Path


SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
