"""The rulebook: what may happen to a seed and when. Masks over hosts and slots; knows no network and no parameter."""
