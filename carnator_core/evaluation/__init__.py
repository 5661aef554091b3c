"""Evaluation: methods side by side on paired requests."""
