"""Scores: metrics, predictions and probes."""
