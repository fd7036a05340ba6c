"""A run as one HTML page and as figures: payloads.py reads the record, page.py and figures.py draw what it found."""
