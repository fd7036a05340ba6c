"""All hosts in one forward and one backward pass of stacked modules."""
