"""Every figure and table of the evaluation: one named experiment each, and the report of all. For comparisons only."""
