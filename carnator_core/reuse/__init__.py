"""Reuse: what a donor lends (trajectory), which steps it answers (plan), and how an answer is made (answer)."""
