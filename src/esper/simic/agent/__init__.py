"""The agent: rollout buffer, advantages, PPO, normalizers."""
