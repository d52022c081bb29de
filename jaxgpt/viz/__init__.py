"""Pictures of runs: the only place that draws."""
