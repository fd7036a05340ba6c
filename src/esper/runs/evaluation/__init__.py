"""Comparisons of controllers, and the search for the best schedule, rule and heuristic."""
