"""Scores on the held-out split (`held_out`), and samples, between the steps of a run."""
