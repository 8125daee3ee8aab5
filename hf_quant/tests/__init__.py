"""Unit tests; the directories mirror the package. Not part of the wheel."""
