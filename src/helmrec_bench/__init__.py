"""The evaluation: baselines, scenarios, experiments, training, report. It imports the product, never the reverse."""
