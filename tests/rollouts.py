"""What holds for every rollout, read back from its buffer."""

from esper.simic.rollout_buffer import TamiyoRolloutBuffer


def open_ends(buffer: TamiyoRolloutBuffer) -> list[list[int]]:
    """Rows (host, step) that end a rollout, as the last valid ones, but are neither terminal nor truncated."""
    stored = buffer.rollout
    later_NT = stored.valid.flip(1).cumsum(1).flip(1) - stored.valid.long()
    return (stored.valid & (later_NT == 0) & ~(stored.terminal | stored.truncated)).nonzero().tolist()
