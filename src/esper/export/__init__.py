"""What grew, as a plain network and as files."""
