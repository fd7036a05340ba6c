"""Simic: the learner. Reward, rollout buffer, PPO, and the assembly of a run."""
