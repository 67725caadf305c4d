"""The tests; their folders mirror those of the source."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
