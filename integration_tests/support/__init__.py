"""Helpers of the integration tests: tiny models and pipelines, a Hub on this machine, two connected processes."""
