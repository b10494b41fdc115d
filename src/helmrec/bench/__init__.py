"""Rivals that learn or solve, and the one way all rivals are tuned. For comparisons only: nothing serves from here."""
