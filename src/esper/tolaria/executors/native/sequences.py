"""Rules of embeddings, attention and dropout, whose kernels are in sequences.h."""
