"""Simic: the learner. Reward, rollout buffer and PPO."""
