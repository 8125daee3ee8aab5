"""The version, in its one place: pyproject.toml and checkpoints read it from here."""

__version__ = "0.1.0"
