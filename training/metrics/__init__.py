"""The measurements of a run, and where they go: read `step_timer` first, then `run_summary`."""
