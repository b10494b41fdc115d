"""Pieces of a report: charts and tables, claims and verdicts."""
