"""Is tonight's figure worse than it was? Pure functions, and the baseline files they compare with."""
