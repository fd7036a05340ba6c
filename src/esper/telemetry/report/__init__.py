"""A run as one HTML page and as figures: page.py reads the record and writes the page, figures.py draws the figures."""
