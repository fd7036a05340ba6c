"""Rewards of a step, for all hosts at once."""

from esper.simic.rewards.modes import REWARD_TERMS as REWARD_TERMS
from esper.simic.rewards.modes import RewardOutput as RewardOutput
from esper.simic.rewards.modes import compute_reward_batched as compute_reward_batched
from esper.simic.rewards.objective import ObjectiveReward as ObjectiveReward
from esper.simic.rewards.reward import ContributionReward as ContributionReward
from esper.simic.rewards.reward import RewardState as RewardState
from esper.simic.rewards.reward import make_reward as make_reward
from esper.simic.rewards.reward import register_reward as register_reward
from esper.simic.rewards.reward import reward_names as reward_names
from esper.simic.rewards.reward import reward_step as reward_step
from esper.simic.rewards.reward import reward_traits as reward_traits
from esper.simic.rewards.reward_config import MODES as MODES
from esper.simic.rewards.reward_config import LossRewardConfig as LossRewardConfig
from esper.simic.rewards.reward_config import ModeTraits as ModeTraits
from esper.simic.rewards.reward_config import RewardConfig as RewardConfig
