"""Hosts split over several processes."""
